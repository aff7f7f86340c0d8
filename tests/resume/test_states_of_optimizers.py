"""The states of every optimizer go from each way of keeping them to the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.pipelining  # before the workers are forked

from drivetrain.callbacks import ModelCheckpoint
from tests.runs import Outcome, difference, train
from tests.strategies.features import OPTIMIZERS, PLACES, ZERO, with_optimizer

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds

STEP = 9
EACH: dict[str, tuple[Any, int]] = {
    "single": ("single", 1),
    "servers": ({"name": "parameter_server", "servers": 2}, 4),
    "pipelines": ({"name": "mesh", "data": 2, "pipeline": 2}, 4),
    **PLACES,
}
RING = ("single", "zero 1", "fsdp", "zero 2", "tensor_parallel", "pipeline", "zero 3", "server", "shards", "zero 0")


def pairs() -> list[tuple[type[torch.optim.Optimizer], str, str]]:
    found = []
    for number, kind in enumerate(OPTIMIZERS):
        for step in (1, 2, 5):
            first = RING[(number + step) % len(RING)]
            found.append((kind, first, RING[(number + 2 * step) % len(RING)]))
    others = ("zero 1", "zero 2", "zero 3", "pipeline", "servers", "pipelines")
    return found + [(torch.optim.Adagrad, a, b) for one in others for a, b in (("single", one), (one, "single"))]


@pytest.mark.parametrize(("kind", "first", "second"), pairs())
def test_a_run_goes_on_elsewhere(kind: type[torch.optim.Optimizer], first: str, second: str, tmp_path: Path) -> None:
    precision, bound = ("32-true", 5e-6) if {first, second} & ZERO else ("64-true", 1e-10)
    make = with_optimizer(kind, **OPTIMIZERS[kind])

    def run(place: str, **more: Any) -> Outcome:
        strategy, devices = EACH[place]
        return train(make, strategy, devices, precision=precision, **more)

    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=STEP)
    run(first, callbacks=[saving], enable_checkpointing=True)
    resumed = run(second, resume=tmp_path / f"step={STEP}.ckpt")
    assert max(difference(run("single"), resumed).values()) < bound
