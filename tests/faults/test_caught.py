"""A script that each rank runs catches what a fit failed with, and goes on with a module that they have in parts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from drivetrain import Trainer
from drivetrain.errors import MisuseError
from tests.distributed import run_job
from tests.runs import QUIET, Classifier, loader


class FailsOnce(Classifier):
    """In step 4 on the last rank, or the only one."""

    failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        if last and not self.failed and self.trainer.global_step == 3:
            raise ValueError("it failed")
        return super().training_step(batch, batch_idx)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}


def goes_on(strategy: Any, devices: int) -> tuple[FailsOnce, Trainer]:
    module = FailsOnce()
    trainer = Trainer(strategy=strategy, devices=devices, precision="64-true", max_epochs=2, seed=3, **QUIET)
    with pytest.raises((ValueError, RuntimeError)):
        trainer.fit(module, loader())
    assert (trainer.global_step, trainer.status) == (3, "failed")
    module.failed = True
    return module, trainer


def weights(module: FailsOnce) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@cache
def reference() -> list[torch.Tensor]:
    module, trainer = goes_on("single", 1)
    trainer.fit(module, loader())
    return weights(module)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("fsdp", 2), ({"name": "mesh", "tensor": 2}, 4), ("pipeline", 2)],
)
def test_the_next_fit_goes_on_as_in_one_process(strategy: Any, devices: int) -> None:
    def script(rank: int, size: int) -> list[torch.Tensor]:
        module, trainer = goes_on(strategy, size)
        for use in (lambda: module(torch.zeros(1)), module.state_dict, lambda: module.load_state_dict({})):
            with pytest.raises(MisuseError, match="each rank has a part of FailsOnce only since a stage failed"):
                use()
        trainer.fit(module, loader())
        trained = weights(module)
        module.load_state_dict(module.state_dict())
        return trained

    for found in run_job(script, devices):
        assert max(float((a - b).abs().max()) for a, b in zip(found, reference(), strict=True)) < 1e-10


def test_whole_weights_may_be_loaded_by_each_rank_for_itself() -> None:
    def script(rank: int, size: int) -> list[torch.Tensor]:
        module, _ = goes_on("fsdp", size)
        module.load_state_dict(FailsOnce().state_dict())
        module.net(torch.ones(1, 6, dtype=next(module.parameters()).dtype))
        return weights(module)

    fresh = weights(FailsOnce())
    assert all(float(weight.abs().max()) > 0 for weight in fresh)
    for found in run_job(script, 2):
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, fresh, strict=True))
