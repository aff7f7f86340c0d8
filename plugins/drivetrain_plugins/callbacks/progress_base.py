"""ProgressBar: what progress bars have in common, and what a project's own bar derives from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class ProgressBar(Callback):
    """Names and meanings are Lightning's. It exists on the first worker only.

    Override :meth:`get_metrics` to choose what is shown, and hooks to draw.
    """

    rank_zero_only = True
    rebuilds = False

    _trainer: Trainer | None = None
    _enabled = True

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
        """Print without breaking the bar."""
        print(*objects, **options)

    # -- what is shown ------------------------------------------------------------------------------------------
    def get_metrics(self, trainer: Trainer, pl_module: TrainModule) -> dict[str, int | str | float]:
        """What is shown beside the bar: metrics logged with ``prog_bar=True``, and as ``v_num`` the loggers' version
        where Lightning's meanings hold."""
        shown: dict[str, Any] = {}
        if trainer.loggers and getattr(getattr(trainer, "meanings", None), "shows_version", False):
            version = "_".join(dict.fromkeys(str(logger.version) for logger in trainer.loggers))
            if version not in ("", "None"):
                shown["v_num"] = version[-4:]
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
        """Training batches of an epoch; infinite where that is not known."""
        return self.trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Validation batches of all loaders."""
        return sum(self.trainer.num_val_batches)

    @property
    def total_test_batches(self) -> int | float:
        return sum(self.trainer.num_test_batches)

    @property
    def total_predict_batches(self) -> int | float:
        return sum(self.trainer.num_predict_batches)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}
