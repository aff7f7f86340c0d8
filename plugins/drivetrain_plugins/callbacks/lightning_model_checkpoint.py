"""ModelCheckpoint by Lightning's rules: when it saves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from drivetrain_plugins.callbacks.lightning_checkpoint_ranking import CheckpointRanking
from drivetrain_plugins.callbacks.monitor import has_validation

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class ModelCheckpoint(CheckpointRanking):
    """The ModelCheckpoint of :mod:`drivetrain.lightning`. Arguments, attributes and the files after a run are those of
    Lightning 2.6; drivetrain's own (``model_checkpoint``) is stricter about ``last.ckpt``.

    It saves at the end of the training epoch; where validation comes in the midst of epochs or not in each of them, at
    the end of validation; or every so many steps or seconds. ``save_last=True`` writes one more file, ``last.ckpt``,
    whenever a checkpoint is saved; ``"link"`` makes it a link.

    Better than there: with several workers the first decides what is saved and under which name (metrics that ranks
    know differently cannot part them), and ``save_on_exception`` never waits for another worker.

    The arguments are those of :class:`CheckpointOptions`; by default the folder is the first logger's
    ``save_dir/name/version_N/checkpoints``.

    Raises:
        ConfigurationError: arguments that exclude each other.
        TrainingError: the monitor was not logged by the end of an epoch with validation.
    """

    def _fresh(self) -> None:
        super()._fresh()
        self._last_time_checked: float | None = None
        self._deferred = False  # a save that was due before its metric was there
        self._has_trained = False  # in this fit: one that goes on from a finished run has nothing new to save

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._last_time_checked = _clock(trainer)
        self._has_trained = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._has_trained = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.between_steps and trainer.meanings.checkpoint != "file":
            return  # a directory cannot hold a window that is not complete
        if not (self._due_by_time(trainer) or self._by_step(trainer)):
            return
        trainer.fit_loop.combine_step()  # the score, and what the file is called by, are this step's
        candidates = self._monitor_candidates(trainer)
        absent = self.monitor is not None and self.monitor not in candidates
        # A metric of an earlier validation must not rank what the next one, due now, will measure.
        stale = (
            self.monitor is not None
            and pl_module.automatic_optimization
            and trainer.is_last_batch
            and not self._should_save_on_train_epoch_end(trainer)
            and _validates_in_this_epoch(trainer)
        )
        if absent or stale:
            self._deferred = True
        elif not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._should_skip_saving_checkpoint(trainer) or self._should_save_on_train_epoch_end(trainer):
            return
        if self._deferred:
            self._deferred = False
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        else:
            self._save_by_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer) and self._should_save_on_train_epoch_end(trainer):
            self._save_by_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        saved = self._last_checkpoint_saved or not self._has_trained
        if self.save_last and not saved and not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"deferred": True} if self._deferred else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._deferred = state_dict.get("deferred", False)

    def save_now(self, trainer: Trainer) -> str:
        """Save where training stands, whatever is due; all ranks call it at the same step. Returns the path."""
        if trainer.fast_dev_run or self.dirpath is None:
            return ""
        if self._last_global_step_saved != trainer.global_step:
            path = self._get_metric_interpolated_filepath_name(self._monitor_candidates(trainer), trainer)
            self._save_checkpoint(trainer, path)
        return self._last_checkpoint_saved

    def _save_by_epoch(self, trainer: Trainer) -> None:
        candidates = self._monitor_candidates(trainer)
        if self._by_epoch(trainer):
            self._save_topk_checkpoint(trainer, candidates)
        linked = self.save_last == "link" and self._last_checkpoint_saved
        if self._last_global_step_saved == trainer.global_step or linked:
            self._save_last_checkpoint(trainer, candidates)

    def _due_by_time(self, trainer: Trainer) -> bool:
        if self._train_time_interval is None:
            return False
        now, before = _clock(trainer), self._last_time_checked
        if before is None or now - before < self._train_time_interval.total_seconds():
            return False
        self._last_time_checked = now
        return True

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        """Whether the training epoch's end is the moment, and not validation's."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1 or trainer.val_check_seconds is not None:
            return False
        return not has_validation(trainer) or trainer.val_check_interval == 1.0

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return (
            bool(trainer.fast_dev_run)
            or trainer.stage != "fit"
            or trainer.sanity_checking
            or self._last_global_step_saved == trainer.global_step
        )


def _clock(trainer: Trainer) -> float:
    """Seconds; with several workers those that they agreed on, which move at boundaries only."""
    return time.monotonic() if trainer.communicator.world_size == 1 else trainer.agreed_seconds


def _validates_in_this_epoch(trainer: Trainer) -> bool:
    every = trainer.check_val_every_n_epoch
    return has_validation(trainer) and (every is None or (trainer.current_epoch + 1) % every == 0)
