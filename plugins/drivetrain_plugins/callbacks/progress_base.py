"""ProgressBar: what progress bars have in common, and what a project's own bar derives from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """What is shown beside every bar: the version that the loggers write, its last four letters where it is text."""
    versions = list(dict.fromkeys(logger.version for logger in trainer.loggers))
    version = versions[0] if len(versions) == 1 else "_".join(str(each) for each in versions)
    if version in ("", None):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


class ProgressBar(Callback):
    """Names and meanings are Lightning's. Its hooks are called on the first worker only.

    Override :meth:`get_metrics` to choose what is shown, and hooks to draw.
    """

    shows_progress = True
    rank_zero_only = True
    rebuilds = False

    _trainer: Trainer | None = None
    _enabled = True
    _current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__} has no trainer yet: it gets it when a stage begins.")
        return self._trainer

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._trainer = trainer

    def disable(self) -> None:
        """Show nothing from here on."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        return not self.is_enabled

    def print(self, *objects: Any, **options: Any) -> None:
        """Print without breaking the bar: what writes to the standard output while rich's is on it goes above."""
        print(*objects, **options)

    # -- what is shown ------------------------------------------------------------------------------------------
    def get_metrics(self, trainer: Trainer, pl_module: TrainModule) -> dict[str, int | str | float]:
        """What is shown beside the bar: metrics logged with ``prog_bar=True``, and as ``v_num`` the loggers' version
        where Lightning's meanings hold."""
        shown: dict[str, Any] = {}
        if getattr(getattr(trainer, "meanings", None), "shows_version", False):
            shown.update(get_standard_metrics(trainer))
        shown.update(trainer.progress_bar_metrics.items())
        return shown

    @property
    def sanity_check_description(self) -> str:
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        return "Training"

    @property
    def validation_description(self) -> str:
        return "Validation"

    @property
    def test_description(self) -> str:
        return "Testing"

    @property
    def predict_description(self) -> str:
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """Training batches of an epoch, or fewer where only ``max_steps`` ends training and comes before its end;
        infinite where neither is known."""
        trainer = self.trainer
        if trainer.max_epochs not in (None, -1) or trainer.max_steps in (None, -1):
            return trainer.num_training_batches
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(trainer.num_training_batches, left)

    @property
    def total_val_batches(self) -> int | float:
        """Validation batches of all loaders; none in an epoch of a fit that is not validated."""
        fit = self.trainer.loop if self.trainer.stage == "fit" else None
        return 0 if fit is not None and not fit.validations.in_epoch() else sum(self.trainer.num_val_batches)

    @property
    def total_test_batches(self) -> int | float:
        return sum(self.trainer.num_test_batches)

    @property
    def total_predict_batches(self) -> int | float:
        return sum(self.trainer.num_predict_batches)

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the validation loader at hand; of the sanity check while that runs."""
        checking = self.trainer.sanity_checking
        return self._of_current(self.trainer.num_sanity_val_batches if checking else self.trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        return self._of_current(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        return self._of_current(self.trainer.num_predict_batches)

    def _of_current(self, batches: list[int | float]) -> int | float:
        return batches[self._current_eval_dataloader_idx or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether this is not the loader of the last call: a bar of its own begins."""
        former, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return former != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Let the next call of :meth:`has_dataloader_changed` be the first."""
        self._current_eval_dataloader_idx = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}
