"""What the model itself rules out is refused by the command before workers start, from a look at it in a copy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from drivetrain import TrainModule, checkpoint
from drivetrain.cli import look
from drivetrain.cli.request import Request
from drivetrain.errors import ConfigurationError
from tests.patience import GONE, LIMIT


class Stacked(TrainModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        print("made")
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum()


class Twice(Stacked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(self.net(batch)).sum()


class Measures(Twice):
    """Its constructor reads numbers, which there are none of yet."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.ones(2).sum())


def refusal(request: Request) -> str:
    try:
        look.refuse_module(request, Path())
    except ConfigurationError as error:
        return str(error)
    return ""


def test_the_model_is_looked_at_in_a_copy(
    request_of: Callable[..., Request],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(look, "why_not_fork", lambda: None)  # the tests' own process has computed; this copy will not

    none = ["recipe=none", "model=none", "optimizer=none", "scheduler=none", "callbacks=none"]
    base = {name: request_of([*none, f"strategy={name}", "+model={_target_: torch.x}"]) for name in ("pipeline", "ddp")}

    def asked(kind: str, strategy: str = "pipeline", workers: int = 2, **given: Any) -> Request:
        model = {"_target_": f"tests.app.test_look.{kind}", **given}
        one = base[strategy]
        return replace(one, config={**one.config, "model": model}, plan=replace(one.plan, world_size=workers))

    assert refusal(asked("Stacked")) == ""
    assert "more than once in a step" in refusal(asked("Twice"))
    assert "4 stages and net has 3 blocks" in refusal(asked("Stacked", workers=4))
    assert "takes no argument 'widht'" in refusal(asked("Stacked", widht=3))
    assert refusal(asked("Measures")) == ""
    assert refusal(asked("Twice", "ddp")) == ""

    saved = checkpoint.save(tmp_path / "saved", {"state_dict": Stacked().state_dict(), "optimizer_states": []})
    capfd.readouterr()
    fits = replace(asked("Stacked", "ddp", width=4), resume_from=str(saved))
    assert refusal(fits) == ""
    wider = replace(asked("Stacked", "ddp", width=5), resume_from=str(saved))
    assert "does not fit Stacked: net.0.weight has shape (4, 2) in it and (5, 2)" in refusal(wider)
    assert capfd.readouterr() == ("", "")


def test_the_copy_ends_with_its_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor that takes its time is not left behind where the command is killed meanwhile."""
    note = tmp_path / "pid"

    def long(*given: Any) -> str:
        beside = note.with_suffix(".new")
        beside.write_text(str(os.getpid()))
        beside.replace(note)
        time.sleep(LIMIT)
        return ""

    monkeypatch.setattr(look, "_wrong", long)
    maker = os.fork()
    if maker == 0:
        try:
            look._in_copy(None, tmp_path, None)  # type: ignore[arg-type]
        finally:
            os._exit(0)
    deadline = time.monotonic() + LIMIT
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    copy = psutil.Process(int(note.read_text()))
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    copy.wait(GONE)  # raises where it is still there
