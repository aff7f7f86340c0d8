"""TQDMProgressBar: the one bar in the plain look of tqdm."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

from drivetrain_plugins.callbacks.progress_bar import RichProgressBar, RichProgressBarTheme

_WIDTH = 20


class TQDMProgressBar(RichProgressBar):
    """``epoch 1/6:  40%|████████            | 25/63 [00:03<00:05,  7.9 it/s, loss=0.231]``.

    It draws by itself; the package tqdm is not used, so there are no bars of its to replace (``init_train_tqdm``).

    Args:
        refresh_rate: batches between two draws, 0 for no bar.
        process_position: has no effect: a bar of this process is always the last line.
        leave: keep each epoch's bar on the screen.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        plain = RichProgressBarTheme(time="", processing_speed="", metrics="", metrics_text_delimiter=", ")
        super().__init__(refresh_rate=refresh_rate, leave=leave, theme=plain)
        self._process_position = process_position

    @property
    def process_position(self) -> int:
        return self._process_position

    def columns(self) -> list[ProgressColumn | str]:
        return [_Line()]


class _Line(ProgressColumn):
    """All of a task in one line."""

    def render(self, task: Task) -> Text:
        done, total = int(task.completed), None if task.total is None else int(task.total)
        metrics = f", {task.fields['metrics']}" if task.fields["metrics"] else ""
        rate = task.fields["rate"] or "? it/s"
        passed = task.elapsed or 0.0
        if not total:
            return Text(f"{task.description}: {done} [{_clock(passed)}, {rate}{metrics}]")
        filled = min(_WIDTH, _WIDTH * done // total)
        bar = "█" * filled + " " * (_WIDTH - filled)
        left = _clock(passed * (total - done) / done) if done else "?"
        share = 100 * done // total
        return Text(f"{task.description}: {share:3d}%|{bar}| {done}/{total} [{_clock(passed)}<{left}, {rate}{metrics}]")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
