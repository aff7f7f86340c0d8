"""The overhead benchmark: that it measures what it says. How fast anything is, is not tested."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, which sets a variable and makes a folder

from drivetrain.errors import ConfigurationError
from drivetrain_plugins.bench import overhead


def spin(batches: Sequence[overhead.Batch], seconds_a_step: float) -> float:
    """A loop that costs a known CPU time per step."""
    began = time.process_time()
    for _ in batches:
        until = time.process_time() + seconds_a_step
        while time.process_time() < until:
            pass
    return time.process_time() - began


def test_a_known_cost_is_measured_by_turns() -> None:
    turns: list[int] = []

    def by_hand(batches: Sequence[overhead.Batch]) -> float:
        turns.append(len(batches))
        return spin(batches, 0.5e-3)

    def twice(data: overhead.Batches) -> tuple[float, float]:
        pair = overhead.Pair(data.batches, by_hand)
        spin(data.batches, 1e-3)  # not yet
        pair.start()
        for done in (15, 30, 40):
            spin(data.batches[:15] if done < 40 else data.batches[:10], 1e-3)
            pair.turn(done)
        return pair.seconds

    [result] = overhead.compare({"twice": twice}, steps=40, pairs=3)
    assert result.name == "twice"
    assert turns == [15, 5, 0, *[15, 15, 10] * 3]  # the first is the warm-up
    assert 1000 <= result.microseconds < 1500 and 500 <= result.loop_microseconds < 750
    assert 1.5 < result.ratio < 2.5
    assert len(result.ratios) == 3


def test_the_number_of_threads_is_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []

    def look(data: overhead.Batches) -> tuple[float, float]:
        seen.append(torch.get_num_threads())
        return 1.0, 1.0

    try:
        overhead.compare({"look": look}, steps=1, pairs=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_a_framework_that_is_not_installed_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] in {"lightning", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert overhead.main(["--only", "lightning", "accelerate", "--steps", "1"]) == 1
    said = capsys.readouterr().err
    assert "left out: lightning: lightning is not installed" in said
    assert "left out: accelerate: accelerate is not installed" in said


def trainer_outcome() -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = overhead.main(["--only", "trainer", "trainer-log", "--steps", "60", "--pairs", "1", "--json"])
    return code, printed.getvalue()


def test_the_trainer_is_measured_with_and_without_logging(run_alone: Callable[..., Any]) -> None:
    code, printed = run_alone(trainer_outcome)
    outcome = json.loads(printed)
    assert (code, outcome["steps"], outcome["pairs"], outcome["left_out"]) == (0, 60, 1, {})
    assert [result["name"] for result in outcome["results"]] == ["trainer", "trainer-log"]
    assert all(result["microseconds"] > 0 and result["ratio"] > 0 for result in outcome["results"])


def test_the_table_has_a_line_for_each() -> None:
    results = [overhead.Result("trainer", 330.0, 300.0, 1.1, [1.0, 1.1, 1.2])]
    last = overhead.table(results, steps=10, pairs=3).splitlines()[-1]
    assert last.split() == ["trainer", "330.0", "300.0", "1.10", "(1.00", "to", "1.20)"]


@pytest.mark.parametrize("arguments", [["--pairs", "0"], ["--steps", "many"], ["--only", "nobody"]])
def test_impossible_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=arguments[0]):  # one sentence and exit code 2 as a command
        overhead.main(arguments)
