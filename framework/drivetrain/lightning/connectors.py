"""What projects ask of Lightning's connectors: what a Trainer's flags stand for on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from drivetrain import snapshot
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.lightning.trainer import Trainer

__path__: list[str] = []

_LITERAL_WARN = Literal["warn"]


class _AcceleratorConnector:
    """What the Trainer makes of these flags: Optuna's pruning, samplers that know their place and packages that place
    a module before they have a Trainer ask for it. A Trainer's own is ``trainer._accelerator_connector``.

    Attributes:
        _accelerator_flag: ``cpu`` or ``cuda``.
        _devices_flag: how many processes, or on GPUs which ones.
        _parallel_devices: a device of torch's for each process of this node.
        is_distributed: whether the strategy is for several ranks, on one device, too.
        use_distributed_sampler: as the Trainer was told.
        strategy, accelerator: the Trainer's.
    """

    def __init__(
        self,
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        plugins: Any = None,
        precision: Any = None,
        sync_batchnorm: bool = False,
        benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        deterministic: Any = None,
    ) -> None:
        from drivetrain.lightning.trainer import Trainer

        self._read(
            Trainer(
                devices=devices,
                num_nodes=num_nodes,
                accelerator=accelerator,
                strategy=strategy,
                plugins=plugins,
                precision=precision,
                sync_batchnorm=sync_batchnorm,
                benchmark=benchmark,
                use_distributed_sampler=use_distributed_sampler,
                deterministic=deterministic,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        )

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """That of a Trainer that is there."""
        found = cls.__new__(cls)
        found._read(trainer)
        return found

    def _read(self, trainer: Trainer) -> None:
        on_gpus = trainer.accelerator_name == "cuda"
        self._accelerator_flag = trainer.accelerator_name
        self._devices_flag = trainer.device_ids if on_gpus else trainer.num_devices
        self._parallel_devices = [
            torch.device("cuda", number) if on_gpus else torch.device("cpu") for number in trainer.device_ids
        ]
        self.is_distributed = trainer.strategy_name != "single"
        self.use_distributed_sampler = trainer.use_distributed_sampler
        self.strategy, self.accelerator = trainer.strategy, trainer.accelerator

    @staticmethod
    def _choose_auto_accelerator() -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @staticmethod
    def _choose_gpu_accelerator_backend() -> str:
        """What ``gpu`` stands for.

        Raises:
            ConfigurationError: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise ConfigurationError("there is no GPU that torch can use here.")
        return "cuda"


class _CheckpointConnector:
    """A Trainer's ``_checkpoint_connector``: MLflow's callback asks it for a checkpoint that it writes itself, on the
    first rank only."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """What a checkpoint of this moment holds; ``trainer.strategy.save_checkpoint`` writes it.

        Raises:
            CheckpointError: the strategy leaves no rank the whole state.
        """
        return snapshot.contents(self._trainer, weights_only)


class _LoggerConnector:
    """A Trainer's ``_logger_connector``: callbacks that log by themselves ask it whether it is time, log by it, and
    read and change what is known of metrics.

    Attributes:
        trainer: whose it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = self._trainer = trainer

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        return self._trainer.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return self._trainer.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return self._trainer.progress_bar_metrics

    # Lightning brings into these what a step logged when it is over; here they are the same.
    _callback_metrics = callback_metrics
    _logged_metrics = logged_metrics
    _progress_bar_metrics = progress_bar_metrics

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """What was logged in the step, or at an epoch's end in the epoch, for callbacks (``callback``), loggers
        (``log``) and the bar (``pbar``).

        Raises:
            ConfigurationError: nothing is running.
        """
        results = self._trainer._results
        if results is None:
            raise ConfigurationError(
                "trainer._logger_connector.metrics is of the step at hand, and nothing is running."
            )
        return results.metrics(bool(self._trainer.published.by_step))

    def reset_metrics(self) -> None:
        """Let nothing be known of metrics."""
        self._trainer.published.forget()

    def reset_results(self) -> None:
        """Forget what was logged in the epoch at hand."""
        results = self._trainer._results
        if results is not None:
            results.reset()

    @property
    def should_update_logs(self) -> bool:
        """Whether what is logged by step is written after the step, or with the batch, at hand."""
        trainer = self._trainer
        if trainer.log_every_n_steps == 0 or trainer.status != "running":
            return trainer.log_every_n_steps > 0
        number = trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        if trainer.evaluating or trainer.predicting:
            number = self._evaluated()
        return trainer.log_falls_on(number) or trainer.should_stop

    def _evaluated(self) -> int:
        """Batches of the evaluation at hand so far, of all its loaders, with this one."""
        trainer = self._trainer
        batch = None if trainer.metrics is None else trainer.metrics.batch
        if batch is None:
            return 0
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        if trainer.stage in ("test", "predict"):
            counts = trainer.num_test_batches if trainer.stage == "test" else trainer.num_predict_batches
        return int(sum(counts[: batch.loader])) + batch.index + 1

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Give the loggers ``metrics``; without ``step`` beside the step among them, or that of training. Every worker
        may call it."""
        trainer = self._trainer
        if not trainer.loggers or not metrics:
            return
        trainer.logged_metrics.update(metrics)
        found = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}
        if step is None and "step" in found:
            step = int(found.pop("step"))
        elif step is None:
            found.setdefault("epoch", trainer.current_epoch)
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(metrics=found, step=step)
            logger.save()
