"""A rank whose first step after a checkpoint has no loss goes along with the others' as in the run without a break."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.checkpoint.export import to_file
from drivetrain.errors import WorkerError
from drivetrain_plugins.strategies.going_along import GoingAlong
from tests.resume.runs import Save
from tests.runs import dataset, difference, train
from tests.strategies.test_skipped_batches import (
    AFTER,
    BEFORE,
    HAS_A_LOSS,
    SHARDS,
    Blocks,
    SkippingClassifier,
    Skips,
)

FULL: dict[str, Any] = {"name": "fsdp", "wrap": "Sequential"}
ZERO: dict[str, Any] = {"name": "zero", "stage": 2}
DDP: dict[str, Any] = {"name": "ddp", "find_unused_parameters": True}  # Blocks has some that nobody uses
SAVED = 3  # optimizer steps before the checkpoint, of six; an epoch has four


class SkipsAfterwards(Skips):
    """The second rank has no loss of the first batch after the checkpoint, nor the first of the second."""

    found = BEFORE

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = 4 * self.trainer.current_epoch + batch_idx
        without = {SAVED: [1], SAVED + 1: [0]}.get(step, [])
        if self.trainer.world_size > 1:
            return self.of_one(batch, self.found if self.trainer.strategy.data.rank in without else None)
        parts = zip(*(tensor.tensor_split(self.replicas) for tensor in batch), strict=True)
        kept = [part for rank, part in enumerate(parts) if rank not in without]
        return torch.stack([self.loss(part) * (len(part[0]) / len(batch[0])) for part in kept]).sum()


class AfterwardsBlocks(SkipsAfterwards, Blocks):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}


class AfterwardsPlain(SkipsAfterwards, SkippingClassifier):
    pass


class LookingBlocks(AfterwardsBlocks):
    found = AFTER


def made(make: type[SkipsAfterwards], replicas: int) -> type[SkipsAfterwards]:
    return type(f"{make.__name__}{replicas}", (make,), {"replicas": replicas})


def options(tmp_path: Path | None = None, precision: str = "64-true") -> dict[str, Any]:
    saving = {} if tmp_path is None else {"callbacks": [Save(tmp_path, "batch")], "enable_checkpointing": None}
    return {
        "data": DataLoader(dataset(48), batch_size=12),
        "max_steps": 6,
        "max_epochs": -1,
        "timeout": 30,
        "precision": precision,
        **saving,
    }


def saved(tmp_path: Path) -> Path:
    return tmp_path / f"{SAVED}-batch-0.ckpt"


def resume(make: Any, strategy: Any, devices: int, path: Path, precision: str = "64-true") -> Any:
    return train(make, strategy, devices, **options(precision=precision), resume=path)


def weights(a: Any, b: Any) -> float:
    return difference(a, b)["weights"]


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(
    ("make", "strategy", "precision", "bound"),
    [
        (AfterwardsBlocks, FULL, "64-true", 1e-10),
        (LookingBlocks, FULL, "64-true", 1e-10),
        (AfterwardsPlain, FULL | {"wrap": "auto"}, "64-true", 1e-10),
        (AfterwardsBlocks, SHARDS, "64-true", 1e-10),
        (AfterwardsPlain, ZERO, "32-true", 1e-6),
    ],
    ids=["blocks", "looking", "nothing cut but the whole", "mesh", "zero"],
)
def test_the_first_step_after_a_checkpoint_has_no_loss_on_one_rank(
    make: Any, strategy: dict[str, Any], precision: str, bound: float, devices: int, tmp_path: Path
) -> None:
    if strategy["name"] == "mesh":
        strategy = strategy | {"shard": devices}
    module = made(make, devices)
    alone = train(module, **options(precision=precision))
    whole = train(module, strategy, devices, **options(tmp_path, precision))
    resumed = resume(module, strategy, devices, saved(tmp_path), precision)
    assert resumed.steps == whole.steps == 6
    assert weights(alone, whole) < bound
    assert max(difference(whole, resumed).values()) < bound


@pytest.mark.parametrize(
    ("before", "after"),
    [((FULL, 2), (FULL, 3)), ((FULL, 3), (FULL, 2)), ((FULL, 2), (SHARDS | {"shard": 3, "wrap": "Sequential"}, 3))],
    ids=["more", "fewer", "mesh"],
)
@pytest.mark.parametrize("one_file", [False, True], ids=["folder", "file"])
def test_with_another_number_of_ranks(before: Any, after: Any, one_file: bool, tmp_path: Path) -> None:
    ranks = after[1]
    module = made(AfterwardsBlocks, ranks)
    alone = train(module, **options())
    train(made(AfterwardsBlocks, before[1]), *before, **{**options(tmp_path), "max_steps": SAVED})
    path = to_file(saved(tmp_path), tmp_path / "one.ckpt") if one_file else saved(tmp_path)
    assert weights(alone, resume(module, *after, path)) < 1e-10


def test_zero_with_another_number_of_ranks(tmp_path: Path) -> None:
    module = made(AfterwardsPlain, 3)
    alone = train(module, **options(precision="32-true"))
    train(made(AfterwardsPlain, 2), ZERO, 2, **{**options(tmp_path, "32-true"), "max_steps": SAVED})
    assert weights(alone, resume(module, ZERO, 3, saved(tmp_path), "32-true")) < 1e-6


class Shorter(AfterwardsBlocks):
    """Other blocks than were saved."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]


@pytest.mark.parametrize(
    ("strategy", "make"),
    [(FULL, Shorter), (FULL | {"wrap": "Linear"}, AfterwardsBlocks)],
    ids=["other blocks", "cut elsewhere"],
)
def test_of_a_module_that_has_changed_nothing_is_known(strategy: Any, make: Any, tmp_path: Path) -> None:
    train(made(AfterwardsBlocks, 2), FULL, 2, **{**options(tmp_path), "max_steps": SAVED})
    with pytest.raises(WorkerError, match=HAS_A_LOSS):
        resume(made(make, 2), strategy, 2, saved(tmp_path))


@pytest.mark.parametrize(("before", "after"), [((DDP, 2), (FULL, 2)), ((FULL, 1), (FULL, 2))], ids=["ddp", "alone"])
def test_where_no_rank_has_gone_along_before_nothing_is_known(before: Any, after: Any, tmp_path: Path) -> None:
    module = made(AfterwardsBlocks, 2)
    train(module, *before, **{**options(tmp_path), "max_steps": SAVED})
    with pytest.raises(WorkerError, match=HAS_A_LOSS):
        resume(module, *after, saved(tmp_path))


def test_what_is_known_goes_on_under_other_strategies(tmp_path: Path) -> None:
    """Which pass over it."""
    module = made(AfterwardsBlocks, 2)
    alone = train(module, **options())
    train(module, FULL, 2, **{**options(tmp_path), "max_steps": SAVED})
    for strategy in (DDP, {"name": "local_sgd", "period": 1}):
        assert weights(alone, resume(module, strategy, 2, saved(tmp_path))) < 1e-10


# -- what is read ---------------------------------------------------------------------------------------------
def along(module: Any = None) -> GoingAlong:
    module = Blocks() if module is None else module
    step: Any = SimpleNamespace(rest=None)
    parts = [*module.blocks, module.blocks[0][1], module]
    return GoingAlong(module, parts, step, torch.device("cpu"), lambda: None)


def known() -> dict[str, Any]:
    made = along()
    call = ["blocks.0", False, True, True, False, True, []]
    return {"layout": made.layout, "calls": [call, ["blocks.2", True, True, True, False, True, []]], "used": ["scale"]}


def changed(where: list[Any], value: Any) -> dict[str, Any]:
    state = known()
    place: Any = state
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    return state


def test_what_was_known_is_known_again() -> None:
    state = json.loads(json.dumps(known()))
    one = along()
    one.load_state_dict(state)
    assert one.state_dict() == known()
    one.load_state_dict(None)
    assert one.state_dict() == {}


@pytest.mark.parametrize(
    "state",
    [
        None,
        "passes",
        [],
        {},
        {"calls": [], "used": []},
        changed(["layout"], "another"),
        changed(["calls"], {}),
        changed(["calls", 0], "blocks.0"),
        changed(["calls", 0, 0], "blocks.9"),
        changed(["calls", 0, 0], 0),
        changed(["calls", 0, 1], 1),
        changed(["calls", 0, 6], [["os.system", True, True, True, True, True, []]]),
        changed(["calls", 1], known()["calls"][1][:5]),
        changed(["used"], "scale"),
        changed(["used", 0], "gone"),
        changed(["used", 0], ["scale"]),
        changed(["used"], []),
    ],
    ids=str,
)
def test_what_is_no_such_state_is_as_if_nothing_was_known(state: Any) -> None:
    one = along()
    one.load_state_dict(known())
    one.load_state_dict(state)
    assert one.state_dict() == {}


def test_calls_deeper_than_can_be_read_are_as_if_nothing_was_known() -> None:
    one, deep = along(), known()
    for _ in range(5000):
        deep["calls"] = [["blocks.0", True, True, True, True, True, deep["calls"]]]
    one.load_state_dict(deep)
    assert one.state_dict() == {}
