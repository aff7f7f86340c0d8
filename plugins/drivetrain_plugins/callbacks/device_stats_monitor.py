"""DeviceStatsMonitor: memory and load of the device, logged at the starts and ends of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain import device_stats
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Keys are Lightning's: ``DeviceStatsMonitor.on_train_batch_start/cpu_percent`` and so on, at log boundaries.

    On GPUs these are ``torch.cuda.memory_stats``; on CPUs the load and the memory in use, in per cent, of the machine.

    Args:
        cpu_stats: True: of the CPUs beside a GPU too; False: never; None: where training runs on CPUs.

    Raises:
        ConfigurationError: the Trainer has no logger; psutil is not installed.
    """

    rank_zero_only = True
    rebuilds = False

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._evaluated = 0  # batches of the evaluation at hand

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers:
            raise ConfigurationError("DeviceStatsMonitor has nowhere to log to: give the Trainer a logger.")
        if self._cpu_stats or (self._cpu_stats is None and trainer.strategy.device.type == "cpu"):
            device_stats.of_cpus()

    def _get_and_log_device_stats(self, trainer: Trainer, key: str) -> None:
        """Log where it is due in the hook ``key``; subclasses that read other figures override it (the name is
        Lightning's)."""
        step = trainer.batches_stepped
        if key == "on_train_batch_end":
            step -= trainer.between_steps
        number = step + 1  # of the batch: what is due after it
        if not key.startswith("on_train_"):
            step, number = max(step - (trainer.stage == "fit"), 0), self._evaluated  # the step that validation follows
        if not trainer.log_falls_on(number):
            return
        device = trainer.strategy.device
        found: dict[str, float] = {}
        if device.type == "cuda":
            found |= device_stats.of_gpu(device)
        if self._cpu_stats or (self._cpu_stats is None and device.type == "cpu"):
            found |= device_stats.of_cpus()
        for logger in trainer.loggers if found else []:
            separator = logger.group_separator if hasattr(logger, "group_separator") else "/"
            prefix = f"{type(self).__qualname__}.{key}{separator}"
            logger.log_metrics({f"{prefix}{name}": float(value) for name, value in found.items()}, step=step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._get_and_log_device_stats(trainer, "on_train_batch_start")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._get_and_log_device_stats(trainer, "on_train_batch_end")

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._evaluated = 0

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._evaluated = 0

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated += 1
        self._get_and_log_device_stats(trainer, "on_validation_batch_start")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._get_and_log_device_stats(trainer, "on_validation_batch_end")

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated += 1
        self._get_and_log_device_stats(trainer, "on_test_batch_start")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._get_and_log_device_stats(trainer, "on_test_batch_end")
