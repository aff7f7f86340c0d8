"""RichProgressBar: a live bar on a terminal, plain lines elsewhere, nothing left behind."""

from __future__ import annotations

import io
import pickle
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import TextColumn

from drivetrain import Trainer
from drivetrain_plugins.callbacks.progress_bar import RichProgressBar
from drivetrain_plugins.callbacks.tqdm_progress_bar import TQDMProgressBar
from tests.runs import QUIET, Classifier, loader


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140, color_system=None)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_off_a_terminal(make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(RichProgressBar())
    trainer.progress_bar_metrics = {"loss": torch.tensor(0.25), "val/accuracy": torch.tensor(0.5)}
    trainer.fit(2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"epoch 1/3  step 4  loss=0\.2500  val/accuracy=0\.5000  \d+\.\ds", lines[0])
    assert lines[1].startswith("epoch 2/3  step 8  ")
    make_trainer(RichProgressBar(), max_epochs=-1).fit(1)
    assert re.fullmatch(r"epoch 1  step 4  \d+\.\ds\n", capsys.readouterr().out)


def test_live_bar(make_trainer: Callable[..., Any]) -> None:
    console = terminal()
    bar = RichProgressBar(interval=0.0, console=console)
    threads = threading.active_count()
    trainer = make_trainer(bar)
    trainer.progress_bar_metrics = {"loss[a]": torch.tensor(0.25)}
    trainer.call("setup", "fit")
    trainer.call("on_train_start")
    assert text(console) == "", "built on first use"
    trainer.fit(2)
    shown = text(console)
    for part in ("sanity check", "epoch 1/3", "epoch 2/3", "4/4", "it/s", "loss[a]=0.2500", "validation", "2/2"):
        assert part in shown
    assert threading.active_count() == threads
    assert shown.endswith("\x1b[?25h"), "the cursor is back"


def test_columns_of_ones_own(make_trainer: Callable[..., Any]) -> None:
    """By Lightning's name, with what it gives by itself and the Trainer."""

    class Own(RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            return [*super().configure_columns(trainer), TextColumn(f"of {trainer.max_epochs} epochs, mine")]

    console = terminal()
    make_trainer(Own(interval=0.0, console=console)).fit(1)
    assert "it/s" in text(console) and "of 3 epochs, mine" in text(console)


def test_metrics_are_read_at_log_boundaries_only(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(RichProgressBar(interval=0.0, console=terminal()), num_val_batches=[])
    reads = []

    class Metrics(dict[str, Any]):
        def items(self) -> Any:
            reads.append(trainer.global_step)
            return super().items()

    trainer.progress_bar_metrics = Metrics()
    trainer.num_training_batches, trainer.log_every_n_steps = 6, 3
    trainer.fit(1)
    assert reads == [1, 3, 6, 6], "first batch, two boundaries, end of the epoch"


def test_draws_are_limited(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bar = RichProgressBar(interval=1000.0, console=terminal())
    drawn = []
    monkeypatch.setattr(bar, "_draw_training", lambda *arguments: drawn.append(arguments))
    make_trainer(bar, num_training_batches=50, num_val_batches=[]).fit(1)
    assert len(drawn) == 1, "the end of the epoch alone"


def test_print_goes_above(make_trainer: Callable[..., Any]) -> None:
    console = terminal()
    bar = RichProgressBar(console=console)
    trainer = make_trainer(bar)
    trainer.call("setup", "fit")
    trainer.call("on_train_epoch_start")
    bar.print("hello from the module")
    after = text(console).split("hello from the module")[1]
    assert "epoch 1/3" in after, "the bar is drawn again below"
    trainer.call("teardown", "fit")


@pytest.mark.parametrize("drawn", [False, True])
def test_print_takes_words_and_options_as_they_are(
    make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str], drawn: bool
) -> None:
    """No markup, no line broken or coloured, and the arguments of Python's own ``print``."""
    console = terminal() if drawn else Console(file=io.StringIO(), width=40)
    bar = RichProgressBar(console=console)
    trainer = make_trainer(bar)
    trainer.call("setup", "fit")
    if drawn:
        trainer.call("on_train_epoch_start")
    line = "[val] loss [1, 2] " + "x" * 60
    bar.print(line, flush=True)
    bar.print("a", "b", sep="|", end="!\n")
    bar.print("aside", file=sys.stderr)
    trainer.call("teardown", "fit")
    out, err = capsys.readouterr()
    found = text(console) if drawn else out
    assert f"{line}\n" in found and "a|b!\n" in found
    assert "aside\n" in (found if drawn else err), "above the bar too"


@pytest.mark.parametrize("hook", ["on_exception", "teardown", "on_train_end"])
def test_screen_is_given_back(make_trainer: Callable[..., Any], hook: str) -> None:
    console = terminal()
    bar = RichProgressBar(console=console)
    trainer = make_trainer(bar)
    trainer.call("setup", "fit")
    trainer.call("on_train_epoch_start")
    assert not text(console).endswith("\x1b[?25h")
    trainer.call(hook, *{"on_exception": [RuntimeError()], "teardown": ["fit"]}.get(hook, []))
    assert text(console).endswith("\x1b[?25h")


@pytest.mark.parametrize("console", [terminal(), Console(file=io.StringIO(), width=80)])
def test_table_after_test_and_validate(make_trainer: Callable[..., Any], console: Console) -> None:
    trainer = make_trainer(RichProgressBar(console=console))
    trainer.log(**{"train/loss": 0.3, "test/accuracy": 0.5})
    trainer.call("setup", "test")
    trainer.call("on_test_start")
    for index in range(3):
        trainer.call("on_test_batch_end", None, None, index)
    trainer.log(**{"test/accuracy": 0.98})
    trainer.call("on_test_end")
    assert "test metrics" in text(console)
    assert "train/loss" not in text(console), "of an earlier stage"
    assert re.search(r"test/accuracy\W+0\.98", text(console))
    trainer.call("setup", "validate")
    trainer.validate_now(**{"val/loss": 0.125})
    assert re.search(r"val/loss\W+0\.125", text(console))


def test_table_only_when_asked_for(make_trainer: Callable[..., Any]) -> None:
    console = Console(file=io.StringIO())
    trainer = make_trainer(RichProgressBar(console=console))
    trainer.request = SimpleNamespace(verbose=False)
    trainer.call("setup", "test")
    trainer.call("on_test_start")
    trainer.log(**{"test/accuracy": 0.98})
    trainer.call("on_test_end")
    assert text(console) == ""


def test_fit_prints_no_table(make_trainer: Callable[..., Any]) -> None:
    console = Console(file=io.StringIO())
    make_trainer(RichProgressBar(console=console)).fit(1, lambda epoch: {"val/loss": 1.0})
    assert "metrics" not in text(console)


def test_unknown_lengths_and_prediction(make_trainer: Callable[..., Any]) -> None:
    console = terminal()
    trainer = make_trainer(RichProgressBar(interval=0.0, console=console), num_val_batches=[])
    trainer.num_training_batches = float("inf")
    trainer.call("setup", "fit")
    trainer.call("on_train_epoch_start")
    trainer.call("on_train_batch_end", None, None, 0)
    trainer.call("on_train_epoch_end")
    trainer.call("teardown", "fit")
    assert "1/?" in text(console)
    trainer.call("setup", "predict")
    trainer.call("on_predict_start")
    trainer.call("on_predict_batch_end", None, None, 0)
    trainer.call("on_predict_end")
    assert "predict" in text(console)
    assert text(console).endswith("\x1b[?25h")


def test_travels_to_workers(make_trainer: Callable[..., Any]) -> None:
    bar = RichProgressBar()
    trainer = make_trainer(bar)
    trainer.fit(1)
    pickle.loads(pickle.dumps(bar)).print("still prints")


def test_print_of_a_bar_of_tqdm_can_be_flushed(capsys: pytest.CaptureFixture[str]) -> None:
    TQDMProgressBar().print("[val]", 1, sep="|", end="!\n", flush=True)
    assert capsys.readouterr().out == "[val]|1!\n"


class AsksEverywhere(Classifier):
    """Has the bar say nothing, on every rank, and writes down what it finds there."""

    def on_train_start(self) -> None:
        bar = self.trainer.progress_bar_callback
        bar.disable()
        names = [type(one).__name__ for one in self.trainer.callbacks]
        Path(self.folder, f"rank_{self.global_rank}").write_text(f"{bar.is_enabled} {bar.called} {names}")

    folder = ""


class Bar(RichProgressBar):
    called = 0

    def setup(self, *arguments: Any, **named: Any) -> None:
        super().setup(*arguments, **named)
        self.called += 1


def test_every_rank_has_the_bar_and_the_first_draws_it(tmp_path: Path) -> None:
    made = type("Asks", (AsksEverywhere,), {"folder": str(tmp_path)})
    Trainer(**{**QUIET, "enable_progress_bar": True}, strategy="ddp", devices=2, callbacks=Bar(), max_epochs=1).fit(
        made(), loader()
    )
    first, second = ((tmp_path / f"rank_{rank}").read_text() for rank in range(2))
    assert first.startswith("False 1 ") and second.startswith("False 0 ")
    assert first.split(" ", 2)[2] == second.split(" ", 2)[2] and "Bar" in first
