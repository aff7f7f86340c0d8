"""ThroughputMonitor: samples and batches per second of training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class ThroughputMonitor(Callback):
    """Log ``samples_per_second`` (global samples) and ``batches_per_second`` (global batches) at log boundaries.

    Nothing waits for the device: between two log boundaries, where the Trainer reads its metrics and so waits anyway,
    the mean rate is right. Left out are the first batch (lazy initialisation,
    compilation) and what lies between epochs and around validation: only from a batch's start on does the clock run.

    Attributes:
        samples_per_second: mean over the run so far, 0.0 before the second batch.
    """

    rank_zero_only = True

    def __init__(self) -> None:
        self._reset(0)

    def _reset(self, step: int) -> None:
        self._samples = self._batches = 0
        self._seconds = 0.0
        self._total_samples, self._total_seconds = 0, 0.0
        self._since: float | None = None  # clock of the last start; None: not running
        self._warm = False
        self._step = self._logged_step = step

    @property
    def samples_per_second(self) -> float:
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        seconds = self._total_seconds + self._seconds + running
        return (self._total_samples + self._samples) / seconds if seconds > 0 else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._reset(trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._since is None and self._warm:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self._warm:
            self._warm, self._since, self._step = True, time.perf_counter(), step
            return
        self._batches += 1
        if step == self._step:  # inside an accumulation window
            return
        self._step = step
        self._samples += trainer.last_batch_size
        if step % trainer.log_every_n_steps == 0 and step != self._logged_step:
            self._logged_step = step
            self._log(trainer, step)

    def _log(self, trainer: Trainer, step: int) -> None:
        self._pause()
        if self._seconds > 0:
            rates = {
                "samples_per_second": self._samples / self._seconds,
                "batches_per_second": self._batches / self._seconds,
            }
            for logger in trainer.loggers:
                logger.log_metrics(rates, step=step - 1)  # like the metrics of that step
        self._total_samples += self._samples
        self._total_seconds += self._seconds
        self._samples = self._batches = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    def _pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._pause()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._pause()

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._pause()
