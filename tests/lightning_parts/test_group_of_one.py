"""A distributed strategy on one device: what a project asks of torch.distributed for several workers works for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import drivetrain.lightning as ours
from tests.lightning_parts.both import classifier, close, loader, trainer, weights


def asks(L: Any) -> tuple[Any, list[Any]]:
    """A module that calls ``torch.distributed`` without asking if it may, and what it found."""
    seen: list[Any] = []

    def train_dataloader(module: Any) -> Any:
        data = loader(12).dataset
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))

    def on_train_start(module: Any) -> None:
        seen.append((dist.is_initialized(), dist.get_rank(), dist.get_world_size()))
        stacked = (module.all_gather(torch.ones(3)), module.trainer.strategy.all_gather(torch.ones(3)))
        seen.append([list(one.shape) for one in stacked])

    def on_train_epoch_end(module: Any) -> None:
        total = torch.tensor(2.0)
        dist.all_reduce(total)
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, "a")
        dist.barrier()
        seen.append((float(total), gathered))

    parts = {"train_dataloader": train_dataloader, "on_train_start": on_train_start}
    return classifier(L, on_train_epoch_end=on_train_epoch_end, **parts), seen


def run(L: Any, root: Path, strategy: str) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        module, seen = asks(L)
        trainer(L, root, strategy=strategy, max_epochs=2).fit(module)
    return {"seen": seen, "weights": weights(module)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ring"])
def test_it_is_there_while_a_stage_lasts(tmp_path: Path, strategy: str) -> None:
    before = dict(os.environ)
    here = run(ours, tmp_path, strategy)
    assert here["seen"] == [(True, 0, 1), [[1, 3], [1, 3]], (2.0, ["a"]), (2.0, ["a"])]
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    if strategy == "ddp":
        try:
            there = run(theirs, tmp_path, strategy)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
        assert close(there, here)


def test_one_that_is_there_stays(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run(ours, tmp_path, "ddp")
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_it_is_gone_after_an_error(tmp_path: Path) -> None:
    module, _ = asks(ours)

    def fails() -> None:
        raise RuntimeError("on purpose")

    module.on_train_epoch_end = fails
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(ours, tmp_path, strategy="ddp", max_epochs=1).fit(module)
    assert not dist.is_initialized()


def test_a_single_device_has_none(tmp_path: Path) -> None:
    module = classifier(ours, on_train_start=lambda self: self.losses.append(float(dist.is_initialized())))
    trainer(ours, tmp_path, max_epochs=1).fit(module, loader(8))
    assert module.losses == [0.0]
