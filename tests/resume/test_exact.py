"""A run that was stopped anywhere and resumed ends with the bits of one that was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from tests.resume.runs import Noisy, NoisyStream, assert_same, fit, noisy_loader
from tests.runs import dataset

MOMENTS = ("batch", "validation", "epoch")
STEPS = 6  # two epochs of 5 batches in windows of 2, 2 and 1


def _every_stop(folder: Path, workers: int) -> None:
    whole = fit(folder / "whole", data=noisy_loader(workers))
    for step in range(1, STEPS + 1):
        parts = folder / str(step)
        fit(parts, "batch", data=noisy_loader(workers), max_steps=step)
        (parts / "end.ckpt").rename(parts / "stopped.ckpt")
        stopped = max(parts.glob("*-batch-*.ckpt"), key=lambda path: int(path.name.split("-")[0]))
        fit(parts, data=noisy_loader(workers), resume=stopped)
        assert_same(whole, parts)


def test_stopped_after_any_step(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    run_alone(_every_stop, tmp_path, 0)


def _every_checkpoint(folder: Path, make_data: Callable[[], Any], options: dict[str, Any]) -> None:
    whole = fit(folder / "whole", *MOMENTS, data=make_data(), **options)
    assert_same(fit(folder / "without", data=make_data(), **options), whole)  # saving leaves no trace
    made = sorted(path for path in whole.glob("*-*.ckpt"))
    assert {path.name.split("-")[1] for path in made} == set(MOMENTS)
    for path in made:
        resumed = folder / path.stem
        fit(resumed, data=make_data(), resume=path, **options)
        assert_same(whole, resumed, best=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_from_every_checkpoint(workers: int, tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    run_alone(_every_checkpoint, tmp_path, lambda: noisy_loader(workers), {})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream(workers: int, tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    run_alone(
        _every_checkpoint,
        tmp_path,
        lambda: DataLoader(NoisyStream(), batch_size=4, num_workers=workers),
        {"check_val_every_n_epoch": 1},
    )


def _weighted() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(18)], 18))


class Drawing(Sampler[int]):
    """Draws each sample when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(18, ())) for _ in range(18))

    def __len__(self) -> int:
        return 18


def _drawing() -> DataLoader[Any]:
    return DataLoader(dataset(18), batch_size=4, sampler=Drawing(), num_workers=1)


def test_a_sampler_of_a_project_that_is_read_as_it_is(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    """What processes of a loader read ahead had been drawn from the generators of training."""
    run_alone(_every_checkpoint, tmp_path, _drawing, {"use_distributed_sampler": False})


def test_a_sampler_of_the_users(tmp_path: Path, run_alone: Callable[..., Any]) -> None:
    run_alone(_every_checkpoint, tmp_path, _weighted, {})
