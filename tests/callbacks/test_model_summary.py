"""ModelSummary: sizes, shapes without computing, plain text off a terminal."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain
import drivetrain.lightning
from drivetrain.errors import ConfigurationError
from drivetrain.module_summary import Summary
from drivetrain_plugins.callbacks.model_summary import ModelSummary, RichModelSummary, readable, totals


class Net(nn.Module):
    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, 10)
        self.tied = nn.Linear(4 * 6 * 6, 10)
        self.tied.weight = self.head.weight
        self.head.bias.requires_grad_(False)
        self.example_input_array = example
        self.forwards = 0

    def forward(self, x: torch.Tensor, twice: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.forwards += 1
        hidden = self.body(x)
        return self.head(hidden), self.tied(hidden)


def test_counts() -> None:
    summary = Summary(Net(), max_depth=-1)
    rows = {row.name: (row.kind, row.parameters, row.trainable) for row in summary.rows}
    assert rows["body"] == ("Sequential", 48, 48)
    assert rows["body.0"] == ("Conv2d", 40, 40)
    assert rows["head"] == ("Linear", 1450, 1440)
    assert (summary.parameters, summary.trainable) == (48 + 1440 + 20, 48 + 1440 + 10), "shared weights count once"
    assert summary.megabytes == pytest.approx(1508 * 4 / 1e6)
    assert [row.name for row in Summary(Net(), 1).rows] == ["body", "head", "tied"]
    assert Summary(Net(), 0).rows == []
    assert Summary(nn.LazyLinear(3)).parameters == 0


def test_shapes_leave_everything_as_it_was() -> None:
    net = Net(torch.ones(2, 1, 8, 8, dtype=torch.float64)).train()
    net.body[1].eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    random = torch.get_rng_state()
    rows = {row.name: (row.takes, row.gives) for row in Summary(net, -1).rows}
    assert rows["body"] == ([2, 1, 8, 8], [2, 144])
    assert rows["tied"] == ([2, 144], [2, 10])
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert (net.training, net.body[0].training, net.body[1].training) == (True, True, False)
    assert not any(child._forward_hooks for child in net.modules())
    as_keywords = Net({"x": torch.ones(1, 1, 8, 8), "twice": True})
    assert Summary(as_keywords).rows[1].gives == [1, 10]


def test_forward_that_fails_is_no_reason_to_fail() -> None:
    summary = Summary(Net(torch.ones(3)))
    assert summary.rows[0].takes is None
    assert "no shapes: forward(example_input_array) raised RuntimeError" in totals(summary)


def test_plain_text_on_the_first_rank(make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer()
    ModelSummary(max_depth=2).on_fit_start(trainer, Net(torch.ones(1, 1, 8, 8)))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "Name"
    assert any("body.0" in line and "[1, 1, 8, 8]" in line and "[1, 4, 6, 6]" in line for line in lines)
    assert lines[-1] == "1.5 K parameters: 1.5 K trainable, 10 not; about 0.0 MB"
    assert not any("\x1b" in line for line in lines)
    ModelSummary().on_fit_start(SimpleNamespace(is_global_zero=False), Net())  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_what_was_taken_of_one_module_is_not_shown_for_another(
    make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    callback, trainer, small = ModelSummary(), make_trainer(), nn.Linear(2, 3)
    callback.before_division(trainer, small)  # type: ignore[arg-type]
    callback.on_fit_start(trainer, Net())  # type: ignore[arg-type]
    assert "1.5 K parameters" in capsys.readouterr().out
    callback.on_fit_start(trainer, small)  # type: ignore[arg-type]
    assert "9 parameters" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [ModelSummary, RichModelSummary])
def test_a_keyword_that_the_table_does_not_have_is_told_and_passed_over(
    kind: type[ModelSummary], make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's tables read the keywords that they know and leave the others alone."""
    with pytest.warns(UserWarning, match=f"{kind.__name__} passes over depth, verbose: its table has no such keyword"):
        callback = kind(verbose=True, depth=3, title="Layers of it")
    callback.on_fit_start(make_trainer(), Net())  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Layers of it", "what the table does know is as it was asked for"
    kind.summarize([("Name", ["body"])], 3, 3, 0.1, {"train": 1, "eval": 0}, 0, verbose=True)
    assert "body" in capsys.readouterr().out


def test_the_keywords_of_ones_own_summarize_are_its_own_matter(recwarn: pytest.WarningsRecorder) -> None:
    class Own(ModelSummary):
        @staticmethod
        def summarize(*columns: Any, verbose: bool = False, **more: Any) -> None: ...

    Own(verbose=True)
    assert not recwarn.list


def test_readable() -> None:
    assert [readable(n) for n in (0, 999, 1000, 1199882, 250_000_000, 7 * 10**9)] == [
        "0",
        "999",
        "1.0 K",
        "1.2 M",
        "250 M",
        "7.0 B",
    ]
    with pytest.raises(ConfigurationError, match="use -1 for all levels"):
        ModelSummary(-2)


def test_the_default_one_is_the_one_that_lightning_takes() -> None:
    for kind, given, expected in [
        (drivetrain.lightning.Trainer, [], RichModelSummary),
        (drivetrain.lightning.Trainer, [ModelSummary()], ModelSummary),
        (drivetrain.Trainer, [], ModelSummary),
    ]:
        found = [c for c in kind(callbacks=given, logger=False).callbacks if isinstance(c, ModelSummary)]
        assert [type(callback) for callback in found] == [expected]
