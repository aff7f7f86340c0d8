"""BasePredictionWriter: predictions go to where a subclass writes them, on every worker its own part."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class WriteInterval(StrEnum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        return self is not WriteInterval.BATCH


INTERVALS = tuple(str(interval) for interval in WriteInterval)


class BasePredictionWriter(Callback):
    """Override ``write_on_batch_end`` or ``write_on_epoch_end``; with ``trainer.predict(return_predictions=False)``
    nothing is kept for the caller.

    Under several workers each writes what it predicted; ``batch_indices`` are the numbers of these samples in the data
    set (None, or empty, for a stream, whose samples have no number). No sample is predicted twice.

    Args:
        write_interval: ``"batch"``, ``"epoch"`` or ``"batch_and_epoch"``.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if str(write_interval) not in INTERVALS:
            raise ConfigurationError(
                f"{type(self).__name__}(write_interval={write_interval!r}): {nearest(str(write_interval), INTERVALS)}"
            )
        self.interval = WriteInterval(str(write_interval))
        self.reads_predictions = self.interval.on_epoch

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the predictions of one batch."""
        raise NotImplementedError(f"{type(self).__name__} has no write_on_batch_end: define it.")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: TrainModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all predictions of this worker: a list for each batch, within a list for each loader where there are
        several; ``batch_indices`` are lists for each batch within a list for each loader."""
        raise NotImplementedError(f"{type(self).__name__} has no write_on_epoch_end: define it.")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loop = trainer.predict_loop
        if self.interval.on_batch and loop.keeps:
            indices = loop.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.interval.on_epoch:
            loop = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)
