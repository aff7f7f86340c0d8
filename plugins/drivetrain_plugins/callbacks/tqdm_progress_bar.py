"""TQDMProgressBar: a bar for training, one for each evaluation, each made by a method that a project may override."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from drivetrain_plugins.callbacks.progress_bar import RichProgressBar
from drivetrain_plugins.callbacks.tqdm_bar import Tqdm

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class _Bar:
    """The bar of ``kind`` as an attribute: there from that one's beginning to its end, and another may be set."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get__(self, owner: TQDMProgressBar | None, of: type | None = None) -> Any:
        return self if owner is None else owner._of(self.kind)

    def __set__(self, owner: TQDMProgressBar, bar: Any) -> None:
        owner._bars[self.kind] = bar


class TQDMProgressBar(RichProgressBar):
    """The bars are :class:`Tqdm`'s, or what ``init_train_tqdm`` and its like return: anything with ``n``, ``total``,
    ``disable``, ``reset``, ``refresh``, ``set_description``, ``set_postfix`` and ``close``. Off a terminal a line is
    printed at the end of each epoch. ``BAR_FORMAT`` may be another one.

    Args:
        refresh_rate: batches between two draws, 0 for no bar; at least ``TQDM_MINITERS`` where the environment says so.
        process_position: lines between the bar and the cursor; a bar of this process is always the last line.
        leave: keep each epoch's bar on the screen.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
    sanity_check_description = "Sanity Checking"
    train_description = "Training"
    validation_description = "Validation"
    test_description = "Testing"
    predict_description = "Predicting"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate=self._resolve_refresh_rate(refresh_rate), leave=leave)
        self._process_position = process_position
        self._bars: dict[str, Any] = {}

    @staticmethod
    def _resolve_refresh_rate(refresh_rate: int) -> int:
        """Batches between two draws in this environment (the name is Lightning's, as that of `_should_update`)."""
        if "COLAB_GPU" in os.environ and refresh_rate == 1:
            return 20  # its pages take longer to draw a line than a step does
        return max(refresh_rate, int(os.environ.get("TQDM_MINITERS", refresh_rate)))

    def _should_update(self, current: int, total: int | float | None) -> bool:
        """Whether ``current`` batches are shown of ``total``, None where that is not known."""
        return self.is_enabled and (current % self.refresh_rate == 0 or current == total)

    @property
    def process_position(self) -> int:
        return self._process_position

    # -- the bars -----------------------------------------------------------------------------------------------
    train_progress_bar = _Bar("train")
    val_progress_bar = _Bar("validation")
    test_progress_bar = _Bar("test")
    predict_progress_bar = _Bar("predict")

    def _of(self, kind: str) -> Any:
        if kind not in self._bars:
            raise TypeError(f"{type(self).__name__} has no bar of {kind} now: it is made when that begins.")
        return self._bars[kind]

    def _made(self, description: str, leave: bool) -> Tqdm:
        console = self.console
        return Tqdm(
            desc=f"{description}: ",
            position=self.process_position,
            disable=self.is_disabled,
            leave=leave,
            file=console.file,
            mininterval=self._interval,
            tty=console.is_terminal or console.is_jupyter,
            bar_format=None if self.BAR_FORMAT is TQDMProgressBar.BAR_FORMAT else self.BAR_FORMAT,
        )

    def init_sanity_tqdm(self) -> Any:
        """The bar of the sanity check."""
        return self._made(self.sanity_check_description, False)

    def init_train_tqdm(self) -> Any:
        """The bar of training."""
        return self._made(self.train_description, True)

    def init_validation_tqdm(self) -> Any:
        """The bar of a validation, within training or alone."""
        return self._made(self.validation_description, not self._fitting)

    def init_test_tqdm(self) -> Any:
        """The bar of a test."""
        return self._made(self.test_description, True)

    def init_predict_tqdm(self) -> Any:
        """The bar of a prediction."""
        return self._made(self.predict_description, True)

    def print(self, *objects: Any, sep: str = " ", flush: bool = False, **options: Any) -> None:
        """Print above the bar."""
        Tqdm.write(sep.join(map(str, objects)), **options)
        if flush:
            (options.get("file") or sys.stdout).flush()

    def _stop(self) -> None:
        for bar in self._bars.values():  # they can be asked afterwards how far they came
            if not bar.disable:
                bar.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bars": {}}

    def _go_on(self, bar: Any, done: int) -> bool:
        """Show ``done`` batches where that is due; whether it was."""
        due = self._should_update(done, bar.total)
        if due and not bar.disable:
            bar.n = done
            bar.refresh()
        return due

    # -- training -----------------------------------------------------------------------------------------------
    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.val_progress_bar = self.init_sanity_tqdm()
        self.train_progress_bar = Tqdm(disable=True)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._stop()

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        bar = self.train_progress_bar
        bar.reset(convert_inf(self.total_train_batches))
        bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar = self.train_progress_bar
        if self._go_on(bar, batch_idx + 1):
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        bar = self.train_progress_bar
        if not bar.disable:
            bar.set_postfix(self.get_metrics(trainer, pl_module))
        if self.is_enabled and not self.live:
            print(bar, file=self.console.file, flush=True)
        if self._leave:
            bar.close()

    # -- evaluation ---------------------------------------------------------------------------------------------
    @staticmethod
    def _begin(bar: Any, description: str, total: int | float, loader: int) -> None:
        bar.reset(convert_inf(total))
        bar.set_description(f"{description} DataLoader {loader}")

    def _end(self, kind: str) -> None:
        self._of(kind).close()
        self.reset_dataloader_idx_tracker()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.val_progress_bar = self.init_validation_tqdm()
            self._before = dict(trainer.callback_metrics)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            checks = trainer.sanity_checking
            description = self.sanity_check_description if checks else self.validation_description
            total = self.total_val_batches_current_dataloader
            self._begin(self.val_progress_bar, description, total, dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._go_on(self.val_progress_bar, batch_idx + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._fitting and "train" in self._bars:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))
        self._end("validation")
        if not self._fitting:
            self._table("validate", trainer)

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.test_progress_bar = self.init_test_tqdm()
        self._before = dict(trainer.callback_metrics)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_test_batches_current_dataloader
            self._begin(self.test_progress_bar, self.test_description, total, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._go_on(self.test_progress_bar, batch_idx + 1)

    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("test")
        self._table("test", trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_predict_batches_current_dataloader
            self._begin(self.predict_progress_bar, self.predict_description, total, dataloader_idx)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._go_on(self.predict_progress_bar, batch_idx + 1)

    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("predict")


def convert_inf(x: int | float | None) -> int | float | None:
    """``x`` batches, or None where their number is not known."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x
