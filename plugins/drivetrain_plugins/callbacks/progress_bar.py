"""RichProgressBar: one bar for the whole job on a terminal, plain lines where there is none."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from drivetrain_plugins.callbacks.progress_base import ProgressBar

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


@dataclass
class RichProgressBarTheme:
    """Styles of the bar's parts, as rich writes them, and how metrics are written; fields are Lightning's.

    Attributes:
        description, progress_bar, progress_bar_finished, progress_bar_pulse, batch_progress, time, processing_speed,
            metrics: styles.
        metrics_text_delimiter: between two metrics.
        metrics_format: of a number.
    """

    description: StyleType = ""
    progress_bar: StyleType = "bar.complete"
    progress_bar_finished: StyleType = "bar.finished"
    progress_bar_pulse: StyleType = "bar.pulse"
    batch_progress: StyleType = "progress.download"
    time: StyleType = "progress.elapsed"
    processing_speed: StyleType = "dim"
    metrics: StyleType = "italic"
    metrics_text_delimiter: str = "  "
    metrics_format: str = ".4f"


_THEME = RichProgressBarTheme()  # what a configuration shows where none is given


class RichProgressBar(ProgressBar):
    """On the first worker only: a bar for the epoch with steps, steps per second and the metrics logged with
    ``prog_bar=True``; validation, test and prediction as bars below it.

    Off a terminal a line is printed at the end of each epoch:
    ``epoch 1/6  step 63  loss=0.2311  val/accuracy=0.9480  12.3s``.
    After ``validate()`` and ``test()`` the metrics are printed as a table.

    A batch costs a counter and a look at the clock: the screen is drawn at most ``1 / interval`` times a second, from
    the loop itself, so there is no thread to survive a fork or to stop after an error. The bar is built when it is
    first shown.

    Args:
        refresh_rate: batches between two draws, sooner where a second has passed; 0 for no bar at all.
        leave: keep each epoch's bar on the screen.
        theme: styles, and how metrics are written.
        console_kwargs: for rich's ``Console``.
        interval: seconds between two draws at least.
        console: where to draw; default the standard output.
    """

    monitors = True

    sanity_check_description = "sanity check"
    train_description = "epoch"
    validation_description = "validation"
    test_description = "test"
    predict_description = "predict"

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = _THEME,
        console_kwargs: dict[str, Any] | None = None,
        interval: float = 0.1,
        console: Console | None = None,
    ) -> None:
        self._refresh_rate = refresh_rate
        self._interval = interval
        self._leave = leave
        self.theme = RichProgressBarTheme() if theme is None or theme is _THEME else theme
        self._console_kwargs = console_kwargs or {}
        self._given = console
        self._console: Console | None = console
        self.progress: Progress | None = None
        self._progress_stopped = False
        self._reset_progress_bar_ids()
        self._evaluation = "val"  # whose bar is shown
        self._done = 0  # batches of the training epoch
        self._evaluated = 0
        self._drawn = 0.0
        self._epoch_start = 0.0
        self._shown_step = -1
        self._fitting = False
        self._before: dict[str, Any] = {}  # metrics from before the evaluation

    # -- the screen ---------------------------------------------------------------------------------------------
    @property
    def console(self) -> Console:
        if self._console is None:
            self._console = Console(**{"file": sys.stdout, **self._console_kwargs})
        return self._console

    @property
    def refresh_rate(self) -> int:
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        return self._enabled and self.refresh_rate > 0

    @property
    def live(self) -> bool:
        """Whether there is a screen to draw on."""
        return self.is_enabled and (self.console.is_terminal or self.console.is_jupyter)

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn | str]:
        """The parts of a line, for others to override: columns of rich. A task has the ``fields`` ``rate`` and
        ``metrics``, both text."""
        theme = self.theme
        return [
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", style=theme.description),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}", style=theme.processing_speed),
            TextColumn("{task.fields[metrics]}", style=theme.metrics, markup=False),
        ]

    # -- parts that projects override or call by Lightning's names ------------------------------------------------
    def _init_progress(self, trainer: Trainer) -> None:
        """Begin to draw, where there is a screen and that was not done yet: make ``progress`` and start it."""
        if self._progress_stopped:
            self.progress = None
        if self.live and self.progress is None:
            self._reset_progress_bar_ids()
            self.progress = Progress(*self.configure_columns(trainer), console=self.console, auto_refresh=False)
            self.progress.start()
            self._progress_stopped = False

    def _reset_progress_bar_ids(self) -> None:
        """No bar is shown."""
        self.train_progress_bar_id: TaskID | None = None
        self.val_sanity_progress_bar_id: TaskID | None = None
        self.val_progress_bar_id: TaskID | None = None
        self.test_progress_bar_id: TaskID | None = None
        self.predict_progress_bar_id: TaskID | None = None

    def _task(self, kind: str) -> Any:
        """The bar of ``kind`` as rich has it: how far it is, what stands beside it.

        Raises:
            TypeError: there is none now.
        """
        task = getattr(self, f"{kind}_progress_bar_id")
        if self.progress is None or task is None:
            raise TypeError(f"{type(self).__name__} has no bar of {kind} now: it is made when that begins.")
        return next(each for each in self.progress.tasks if each.id == task)

    train_progress_bar: Any = property(lambda self: self._task("train"))
    val_sanity_check_bar: Any = property(lambda self: self._task("val_sanity"))
    val_progress_bar: Any = property(lambda self: self._task("val"))
    test_progress_bar: Any = property(lambda self: self._task("test"))

    def _add_task(self, total_batches: int | float, description: str, visible: bool = True) -> TaskID:
        """A new bar of so many batches."""
        assert self.progress is not None
        total = _total(total_batches)
        return self.progress.add_task(description, total=total, visible=visible, rate="", metrics="")

    def _initialize_train_progress_bar_id(self) -> None:
        """The bar of an epoch of training."""
        description = self._get_train_description(self.trainer.current_epoch)
        self.train_progress_bar_id = self._add_task(self.total_train_batches, description)

    def _get_train_description(self, current_epoch: int) -> str:
        """What stands before the bar of this epoch, and before its line where there is no screen."""
        last = self.trainer.max_epochs
        number = f"{self.train_description} {current_epoch + 1}"
        return number if last is None or last < 0 else f"{number}/{last}"

    def _update(self, progress_bar_id: TaskID | None, current: int, visible: bool = True, hard: bool = False) -> None:
        """Draw the bar with ``current`` batches; called as often as it is drawn."""
        if self.progress is not None and self.is_enabled and progress_bar_id is not None:
            self.progress.update(progress_bar_id, completed=current, visible=visible)
            self.refresh(hard)

    def _update_metrics(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Show the metrics of now beside the bar of training, when that is drawn next."""
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.progress.update(self.train_progress_bar_id, metrics=self._text(trainer))

    def refresh(self, hard: bool = False) -> None:
        """Draw; ``hard`` changes nothing here, where no thread draws."""
        if self.progress is not None and not self._progress_stopped:
            self.progress.refresh()

    def _stop_progress(self) -> None:
        """Give the screen back."""
        if self.progress is not None:
            self.progress.stop()
            self._progress_stopped = True

    def _stop(self) -> None:
        self._stop_progress()  # it stays to be looked at
        self._reset_progress_bar_ids()
        self._console = self._given

    def __getstate__(self) -> dict[str, Any]:
        none = {name: None for name in vars(self) if name.endswith("_progress_bar_id")}
        return {**super().__getstate__(), "progress": None, **none, "_console": None}

    # -- training -----------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._fitting = stage == "fit"

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._done, self._shown_step = 0, -1
        self._epoch_start = self._drawn = time.monotonic()
        self._init_progress(trainer)
        if self.progress is not None:
            if self.train_progress_bar_id is not None:
                if self._leave:
                    self.progress.stop_task(self.train_progress_bar_id)
                else:
                    self.progress.remove_task(self.train_progress_bar_id)
            self._initialize_train_progress_bar_id()
            self.refresh()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done += 1
        if self.train_progress_bar_id is not None:
            now = time.monotonic()
            if self._due(self._done, now):
                self._drawn = now
                self._draw_training(trainer, batch_idx + 1)

    def _due(self, batches: int, now: float) -> bool:
        """Whether to draw after so many batches."""
        passed = now - self._drawn
        return passed >= self._interval and (passed >= 1.0 or batches % self.refresh_rate == 0)

    def _text(self, trainer: Trainer) -> str:
        metrics = self.get_metrics(trainer, trainer.lightning_module)
        return _metrics_text(metrics, self.theme.metrics_text_delimiter, self.theme.metrics_format)

    def _draw_training(self, trainer: Trainer, completed: int) -> None:
        if self.progress is None or self.train_progress_bar_id is None:
            return
        seconds = time.monotonic() - self._epoch_start
        rate = f"{self._done / seconds:.1f} it/s" if seconds > 0 else ""
        self.progress.update(self.train_progress_bar_id, rate=rate)
        boundary = trainer.global_step // max(trainer.log_every_n_steps, 1)
        if boundary != self._shown_step:  # metrics are read at log boundaries only: reading may wait for the device
            self._shown_step = boundary
            self._update_metrics(trainer, trainer.lightning_module)
        self._update(self.train_progress_bar_id, completed)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.train_progress_bar_id is not None:
            self._shown_step = -1
            total = trainer.num_training_batches
            self._draw_training(trainer, self._done if math.isinf(total) else max(self._done, int(total)))
        elif self.is_enabled and not self.live:
            parts = [
                self._get_train_description(trainer.current_epoch),
                f"step {trainer.global_step}",
                self._text(trainer),
                f"{time.monotonic() - self._epoch_start:.1f}s",
            ]
            print("  ".join(part for part in parts if part), file=self.console.file, flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._stop()

    # -- evaluation ---------------------------------------------------------------------------------------------
    @property
    def _shown(self) -> TaskID | None:
        """The bar of the evaluation at hand."""
        shown: TaskID | None = getattr(self, f"{self._evaluation}_progress_bar_id")
        return shown

    @_shown.setter
    def _shown(self, task: TaskID | None) -> None:
        setattr(self, f"{self._evaluation}_progress_bar_id", task)

    def _start_evaluation(self, kind: str, description: str, batches: list[int | float] | int | float | None) -> None:
        self._evaluation, self._evaluated = kind, 0
        self._drawn = time.monotonic()
        self._init_progress(self.trainer)
        if self.progress is not None:
            total = sum(batches) if isinstance(batches, list) else float("inf") if batches is None else batches
            self._shown = self._add_task(total, description)
            self.refresh()

    def _evaluation_batch(self) -> None:
        self._evaluated += 1
        if self._shown is not None:
            now = time.monotonic()
            if self._due(self._evaluated, now):
                self._drawn = now
                self._update(self._shown, self._evaluated)

    def _end_evaluation(self) -> None:
        if self.progress is not None and self._shown is not None:
            self.progress.remove_task(self._shown)
            self.refresh()
        self._shown = None
        if not self._fitting:
            self._stop()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.sanity_checking:
            self._start_evaluation(
                "val_sanity", self.sanity_check_description, getattr(trainer, "num_sanity_val_batches", None)
            )
        else:
            self._start_evaluation("val", self.validation_description, trainer.num_val_batches)
            self._before = dict(trainer.callback_metrics)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluation_batch()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()
        if not self._fitting:
            self._table("validate", trainer)

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start_evaluation("test", self.test_description, trainer.num_test_batches)
        self._before = dict(trainer.callback_metrics)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluation_batch()

    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()
        self._table("test", trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start_evaluation("predict", self.predict_description, getattr(trainer, "num_predict_batches", None))

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluation_batch()

    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()

    def _table(self, title: str, trainer: Trainer) -> None:
        found, before = trainer.callback_metrics, self._before
        metrics = {name: value for name, value in found.items() if before.get(name) is not value}
        request = getattr(trainer, "request", None)
        if not metrics or not getattr(request, "verbose", True) or trainer.meanings.results == "trainer":
            return
        table = Table(title=f"{title} metrics", title_justify="left")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for name in sorted(metrics):
            table.add_row(Text(name), f"{float(metrics[name]):.6g}")
        self.console.print(table)

    # -- the end ------------------------------------------------------------------------------------------------
    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._stop()
        self._fitting = False


def _total(batches: int | float) -> float | None:
    """So many batches; None (a bar without an end) where that is not known."""
    return None if math.isinf(batches) else batches


def _metrics_text(metrics: Mapping[str, Any], delimiter: str, number: str) -> str:
    def one(value: Any) -> str:
        return str(value) if isinstance(value, (str, int)) else format(float(value), number)

    return delimiter.join(f"{name}={one(value)}" for name, value in metrics.items())
