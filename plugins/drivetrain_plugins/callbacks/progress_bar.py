"""RichProgressBar: one bar for the whole job on a terminal, plain lines where there is none."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class RichProgressBar(Callback):
    """On the first worker only: a bar for the epoch with steps, steps per second and the metrics logged with
    ``prog_bar=True``; validation, test and prediction as bars below it.

    Off a terminal a line is printed at the end of each epoch:
    ``epoch 1/6  step 63  loss=0.2311  val/accuracy=0.9480  12.3s``.
    After ``validate()`` and ``test()`` the metrics are printed as a table.

    A batch costs a counter and a look at the clock: the screen is drawn at most ``1 / interval`` times a second, from
    the loop itself, so there is no thread to survive a fork or to stop after an error. The bar is built when it is
    first shown.

    Args:
        interval: seconds between two draws.
        leave: keep each epoch's bar on the screen.
        console: where to draw; default the standard output.
    """

    rank_zero_only = True
    monitors = True

    def __init__(self, interval: float = 0.1, leave: bool = False, console: Console | None = None) -> None:
        self._interval = interval
        self._leave = leave
        self._given = console
        self._console: Console | None = console
        self._progress: Progress | None = None
        self._train: TaskID | None = None
        self._evaluation: TaskID | None = None
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
            self._console = Console(file=sys.stdout)
        return self._console

    @property
    def live(self) -> bool:
        """Whether there is a screen to draw on."""
        return self.console.is_terminal or self.console.is_jupyter

    def print(self, *objects: Any, **options: Any) -> None:
        """Print above the bar."""
        self.console.print(*objects, **options)

    def _bar(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(finished_text=" "),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]}", style="dim"),
                TextColumn("{task.fields[metrics]}", style="italic", markup=False),
                console=self.console,
                auto_refresh=False,
            )
            self._progress.start()
        return self._progress

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._train = self._evaluation = None
        self._console = self._given

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None, "_train": None, "_evaluation": None, "_console": None}

    # -- training -----------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._fitting = stage == "fit"

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._done, self._shown_step = 0, -1
        self._epoch_start = self._drawn = time.monotonic()
        if self.live:
            bar = self._bar()
            if self._train is not None:
                if self._leave:
                    bar.stop_task(self._train)
                else:
                    bar.remove_task(self._train)
            self._train = bar.add_task(_epoch(trainer), total=_total(trainer.num_training_batches), rate="", metrics="")
            bar.refresh()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done += 1
        if self._train is not None:
            now = time.monotonic()
            if now - self._drawn >= self._interval:
                self._drawn = now
                self._draw_training(trainer, batch_idx + 1)

    def _draw_training(self, trainer: Trainer, completed: int) -> None:
        if self._progress is None or self._train is None:
            return
        seconds = time.monotonic() - self._epoch_start
        fields: dict[str, Any] = {"rate": f"{self._done / seconds:.1f} it/s" if seconds > 0 else ""}
        boundary = trainer.global_step // trainer.log_every_n_steps
        if boundary != self._shown_step:  # metrics are read at log boundaries only: reading may wait for the device
            self._shown_step = boundary
            fields["metrics"] = _metrics_text(trainer.progress_bar_metrics)
        self._progress.update(self._train, completed=completed, **fields)
        self._progress.refresh()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._train is not None:
            self._shown_step = -1
            total = trainer.num_training_batches
            self._draw_training(trainer, self._done if math.isinf(total) else max(self._done, int(total)))
        elif not self.live:
            parts = [
                _epoch(trainer),
                f"step {trainer.global_step}",
                _metrics_text(trainer.progress_bar_metrics),
                f"{time.monotonic() - self._epoch_start:.1f}s",
            ]
            print("  ".join(part for part in parts if part), file=self.console.file, flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._stop()

    # -- evaluation ---------------------------------------------------------------------------------------------
    def _start_evaluation(self, description: str, batches: list[int | float] | int | float | None) -> None:
        self._evaluated = 0
        self._drawn = time.monotonic()
        if self.live:
            bar = self._bar()
            self._evaluation = bar.add_task(description, total=_total(batches), rate="", metrics="")
            bar.refresh()

    def _evaluation_batch(self) -> None:
        self._evaluated += 1
        if self._evaluation is not None:
            now = time.monotonic()
            if now - self._drawn >= self._interval and self._progress is not None:
                self._drawn = now
                self._progress.update(self._evaluation, completed=self._evaluated)
                self._progress.refresh()

    def _end_evaluation(self) -> None:
        if self._progress is not None and self._evaluation is not None:
            self._progress.remove_task(self._evaluation)
            self._progress.refresh()
        self._evaluation = None
        if not self._fitting:
            self._stop()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.sanity_checking:
            self._start_evaluation("sanity check", getattr(trainer, "num_sanity_val_batches", None))
        else:
            self._start_evaluation("validation", trainer.num_val_batches)
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
        self._start_evaluation("test", trainer.num_test_batches)
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
        self._start_evaluation("predict", getattr(trainer, "num_predict_batches", None))

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
        if not metrics or not getattr(request, "verbose", True):
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


def _epoch(trainer: Trainer) -> str:
    last = trainer.max_epochs
    number = trainer.current_epoch + 1
    return f"epoch {number}" if last is None or last < 0 else f"epoch {number}/{last}"


def _total(batches: list[int | float] | int | float | None) -> float | None:
    """Batches of all loaders together; None (a bar without an end) where that is not known."""
    if batches is None:
        return None
    total = sum(batches) if isinstance(batches, list) else batches
    return None if math.isinf(total) else total


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={float(value):.4f}" for name, value in metrics.items())
