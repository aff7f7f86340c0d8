"""What goes with what: refused combinations are refused without a process, allowed ones train to single's figures."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.declaration import Plan, conflicts
from drivetrain.errors import ConfigurationError
from drivetrain.support import (
    AXES,
    HEAD,
    Combination,
    allowed,
    covering,
    declarations,
    main,
    plain_plan,
    plan_of,
    table,
)
from tests.runs import QUIET
from tests.strategies.gpt import TinyGPT, token_loader

# Largest difference of the first losses from single's in the same combination. Sums in another order are all that
# changes, but fp16 and bf16 round what is summed to 3 and 2 digits.
TOLERANCE = {"64-true": 1e-10, "32-true": 1e-4, "bf16-mixed": 0.05, "16-mixed": 0.05, "bf16-true": 0.2}
COMPRESSED = 0.5  # a lossy gradient: about the same descent
COMPUTES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
}
STEPS = 3


# -- the pages --------------------------------------------------------------------------------------------------
def test_the_page_is_up_to_date(repository: Path) -> None:
    page = (repository / "docs" / "support.md").read_text(encoding="utf-8")
    assert page == HEAD + table() + "\n", "run: python -m drivetrain support --write docs/support.md"


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
def arguments(plan: Plan) -> dict[str, Any]:
    """A plan as the Trainer's arguments."""
    return {
        **QUIET,
        "strategy": {"name": plan.strategy, **vars(plan.options)},
        "devices": plan.world_size,
        "precision": plan.precision,
        "compression": plan.compression,
        "gradient_clip_val": plan.clip_value,
        "gradient_clip_algorithm": plan.clip_algorithm,
        "accumulate_grad_batches": plan.accumulation,
        "compile": "eager" if plan.compile else False,
        "max_steps": STEPS,
        "num_sanity_val_steps": 0,
        "seed": 3,
    }


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
class Small(TinyGPT):
    """Two blocks, whose layers fail when they compute in another format than ``precision`` says."""

    def __init__(self, precision: str) -> None:
        super().__init__(layers=2)

        def refuse_other_formats(layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            assert output.dtype == COMPUTES[precision], f"{precision} computes in {output.dtype}"

        for block in self.model.blocks:
            block.mlp.up.register_forward_hook(refuse_other_formats)


class Closures(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=2)


class Manual(Small):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        given = self.optimizers()
        optimizers = given if isinstance(given, list) else [given]
        loss = self.loss(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("loss", loss, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Several(Manual):
    def configure_optimizers(self) -> Any:
        parts = {id(p) for p in self.model.blocks.parameters()}
        groups = [[p for p in self.parameters() if (id(p) in parts) is inside] for inside in (True, False)]
        return [torch.optim.SGD(group, lr=0.01) for group in groups]


MODULES: dict[str, type[Small]] = {
    "automatic": Small,
    "manual": Manual,
    "several": Several,
    "closures": Closures,
}


def losses(combination: Combination) -> list[float]:
    declaration = declarations()[combination.strategy]
    plan = plan_of(combination, declaration, declaration.support.exact_with)
    trainer = Trainer(**arguments(plan))
    trainer.fit(MODULES[combination.get("optimization")](plan.precision), token_loader(59, 8))
    if combination.get("optimization") in ("automatic", "closures"):
        assert trainer.global_step == STEPS
        return [loss for _, loss in trainer.loss_curve]
    return [float(trainer.callback_metrics["loss_epoch"])]


@cache
def alone(choices: tuple[str, ...]) -> list[float]:
    """The losses of ``single`` with the same choices, uncompressed."""
    plain = list(choices)
    plain[list(AXES).index("compression")] = "none"
    plain[list(AXES).index("compile")] = "false"
    return losses(Combination("single", tuple(plain)))


@pytest.mark.parametrize("combination", covering(allowed()), ids=str)
def test_allowed_trains(combination: Combination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # dynamo makes it, even where nothing goes in
    found, expected = losses(combination), alone(combination.choices)
    assert all(math.isfinite(loss) for loss in found)
    support = declarations()[combination.strategy].support
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if combination.get("compression") != "none" or support.exact_with is None:
        assert worst < COMPRESSED
    else:
        assert worst <= TOLERANCE[combination.get("precision")]
