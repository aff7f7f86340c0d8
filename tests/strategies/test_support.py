"""What goes with what: refused combinations are refused without a process, allowed ones train to single's figures."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain import Trainer, support
from drivetrain.declaration import Plan, conflicts
from drivetrain.errors import ConfigurationError
from drivetrain.support import AXES, HEAD, Combination, allowed, covering, declarations, main, plain_plan, table
from drivetrain.support_modules import Manual, token_loader
from drivetrain.support_report import kept, read, rows
from drivetrain.support_training import Outcome, arguments, outcome


# -- the pages --------------------------------------------------------------------------------------------------
def test_the_page_is_up_to_date(repository: Path) -> None:
    page = (repository / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == support.page(kept(page)), "run: python -m drivetrain support --write docs/support.md"
    numbers = Counter(one.strategy for one in allowed())
    for name, line in kept(page).items():  # a declaration that allows more has more to train
        assert f" of {numbers[name]} |" in line, f"run: python -m drivetrain support --train --only {name} --write ..."


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == HEAD + table() + "\n"
    assert main(["--refusals"]) == 0
    refusals = capsys.readouterr().out.splitlines()
    assert any(line.startswith("single compression=topk accumulation=1: strategy=single cannot") for line in refusals)
    assert main(["--covering"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(covering(allowed()))


def test_the_covering_part_holds_every_pair() -> None:
    every = allowed()
    pairs = {pair for one in every for pair in one.pairs()}
    part = covering(every)
    assert {pair for one in part for pair in one.pairs()} == pairs
    assert len(part) < len(every) / 20


# -- refusals ---------------------------------------------------------------------------------------------------
def refused() -> list[Any]:
    """Every choice and every two choices that a strategy refuses; those that the module brings come later."""
    found = []
    for declaration in declarations().values():
        plain = plain_plan(declaration)
        seen: set[str] = set()
        for a, b in itertools.combinations_with_replacement([axis for axis in AXES if axis != "optimization"], 2):
            for x, y in itertools.product(AXES[a], AXES[b]):
                plan = replace(plain, **AXES[a][x], **AXES[b][y]) if a != b else replace(plain, **AXES[a][x])
                reasons = conflicts(plan, declaration)
                if reasons and str(reasons[0]) not in seen:
                    seen.add(str(reasons[0]))
                    found.append(pytest.param(plan, str(reasons[0]), id=f"{declaration.name}-{a}={x}-{b}={y}"))
    return found


@pytest.mark.parametrize(("plan", "reason"), refused())
def test_refused_before_anything_starts(plan: Plan, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(**arguments(plan))
    assert reason in str(caught.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("name", [n for n, d in declarations().items() if not d.support.manual_optimization])
def test_manual_optimisation_refused(name: str) -> None:
    trainer = Trainer(**arguments(plain_plan(declarations()[name])))
    with pytest.raises(ConfigurationError, match="automatic_optimization=False"):
        trainer.fit(Manual("32-true"), token_loader())


# -- what is allowed trains -------------------------------------------------------------------------------------
@pytest.mark.parametrize("combination", covering(allowed()), ids=str)
def test_allowed_trains(combination: Combination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # dynamo makes it, even where nothing goes in
    found = outcome(combination)
    assert found.status == "trained", found


def _kill_first_child() -> None:
    while not (found := psutil.Process().children()):
        time.sleep(0.01)
    found[0].kill()


def test_the_command_trains_and_tells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One combination that an earlier call has trained, one whose process is killed, one that trains after it."""
    names = [f"single-64-true-none-{clipping}-1-automatic-false" for clipping in ("none", "norm", "value")]
    every = {str(one): one for one in allowed()}
    monkeypatch.setattr(support, "allowed", lambda: [every[name] for name in names])
    record, page = tmp_path / "record.jsonl", tmp_path / "page.md"
    earlier = [Outcome(names[0], "trained", 5e-11, 1e-10), Outcome(names[1], "failed", error="of another kind")]
    record.write_text("".join(json.dumps(asdict(one)) + "\n" for one in earlier))
    killer = threading.Thread(target=_kill_first_child)
    killer.start()
    assert main(["--train", "--only", "single", "--json", str(record), "--write", str(page)]) == 1
    killer.join()
    assert not psutil.Process().children()
    out, amiss = capfd.readouterr().out, "failed: its process ended with exit code -9"
    assert f"{names[1]}: {amiss}" in out and names[2] not in out
    assert out.splitlines()[-1] == "2 of 3 combinations trained"
    assert [read(record)[name].status for name in names] == ["trained", "failed", "trained"]
    assert len(record.read_text().splitlines()) == 4
    assert f"| `single` | 2 of 3 | 5.0e-01 | 64-true-none-norm-1-automatic-false: {amiss} |" in page.read_text()
    before = page.read_text()
    assert main(["--write", str(page)]) == 0
    assert page.read_text() == before  # what is not trained anew stays


def test_what_fails_is_told() -> None:
    found = outcome(Combination("single", ("64-true", "none", "none", "1", "nothing", "false")))
    assert (found.status, found.error) == ("failed", "KeyError: 'nothing'")


def test_differences_beyond_the_bound_are_told() -> None:
    found = Outcome("ring-64-true", "not exact", 0.3, 1e-10)
    assert rows([found, Outcome("ring-32-true", "trained", 5e-5, 1e-4)], ["ddp", "ring"]) == {
        "ring": "| `ring` | 1 of 2 | 3.0e+09 | 64-true: not exact: 3.0e-01 of 1e-10 |"
    }


def test_words_that_cannot_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--train", "--only", "rnig"]) == 2
    assert "ring" in capsys.readouterr().err
    assert main(["--train", "--jobs", "0"]) == 2
