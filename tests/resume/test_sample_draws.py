"""Data sets that draw from random generators of their own draw on, in a run that goes on, from where they stood."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data import default_collate as plain_collate

import drivetrain.lightning as facade
from drivetrain import Trainer
from drivetrain.callbacks import ModelCheckpoint
from drivetrain.errors import Interrupted
from tests.resume.runs import Everything, NoisyStream
from tests.resume.test_own_generators import MOMENTS, Project, earliest
from tests.runs import QUIET, Outcome, dataset, difference, train

SAMPLES, BATCH = 26, 4  # seven batches, the last one of two


class Noise:
    """A transform with a generator."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.rng, torch.Generator):
            return x + 0.1 * torch.randn(x.shape, generator=self.rng, dtype=x.dtype)
        if isinstance(self.rng, random.Random):
            return x + 0.1 * self.rng.random()
        return x + 0.1 * self.rng.normal()


class Chain:
    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


class Transformed(Dataset[Any]):
    def __init__(self, transform: Callable[[Any], Any], samples: int = SAMPLES) -> None:
        self.data, self.transform = dataset(samples), transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return self.transform(x), y


class TransformedStream(IterableDataset[Any]):
    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.data = Transformed(transform)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(SAMPLES))


class Endless(BatchSampler):
    """Does not say how many batches there are."""

    def __len__(self) -> int:
        raise TypeError


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def masked(samples: list[Any], rng: Any) -> Any:
    x, y = plain_collate(samples)
    return x * (torch.rand(x.shape, generator=rng) > 0.2), y


def closed_over() -> Callable[[Any], Any]:
    noise = Noise(np.random.default_rng(5))
    return lambda x: torch.tanh(noise(x))


def read(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=BATCH, shuffle=not isinstance(data, IterableDataset), **options)


def without_length() -> DataLoader[Any]:
    data = Transformed(Noise(own()))
    return DataLoader(data, batch_sampler=Endless(RandomSampler(data), BATCH, False))


KINDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: read(Transformed(Noise(own()))),
    "numpy": lambda: read(Transformed(Noise(np.random.default_rng(5)))),
    "older numpy": lambda: read(Transformed(Noise(np.random.RandomState(5)))),
    "python, in a chain": lambda: read(Transformed(Chain(torch.tanh, Noise(random.Random(5))))),
    "part of several": lambda: read(Subset(ConcatDataset([Transformed(Noise(own()))] * 2), range(20, 46))),
    "closed over": lambda: read(Transformed(closed_over())),
    "collated": lambda: read(dataset(SAMPLES), collate_fn=partial(masked, rng=own())),
    "stream": lambda: read(TransformedStream(Noise(own()))),
    "without a length": without_length,
}


def validation() -> Any:
    return DataLoader(Transformed(Noise(own()), 9), batch_size=3)


def options(strategy: str, kind: str) -> dict[str, Any]:
    devices = 1 if strategy == "single" else 2
    return {"strategy": strategy, "devices": devices, "data": KINDS[kind](), "validation": validation()}


def check(tmp_path: Path, moment: str, make: Callable[[], dict[str, Any]], **more: Any) -> None:
    more = {"max_epochs": 3, **more}
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS[moment])
    whole = train(callbacks=[saving], enable_checkpointing=True, **make(), **more)
    resumed = train(**make(), **more, resume=earliest(tmp_path))
    assert max(difference(whole, resumed).values()) == 0.0


@pytest.mark.parametrize(
    ("strategy", "moment", "kind"),
    [
        *(("single", moment, kind) for moment in MOMENTS for kind in KINDS),
        *(("ddp", "within an epoch", kind) for kind in KINDS),
        ("ddp", "at its end", "torch"),
        ("pipeline", "within an epoch", "torch"),
        ("pipeline", "before its end", "collated"),
    ],
)
def test_a_run_goes_on_with_the_same_draws(strategy: str, moment: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, moment, lambda: options(strategy, kind))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_within_windows_and_where_validation_draws_from_the_same(strategy: str, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        noise = Noise(own())
        evaluated = DataLoader(Transformed(noise, 9), batch_size=3)
        return options(strategy, "torch") | {"data": read(Transformed(noise)), "validation": evaluated}

    check(tmp_path, "within an epoch", make, accumulate_grad_batches=2, val_check_interval=2, max_epochs=4)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_loaders_that_are_read_at_once(strategy: str, tmp_path: Path) -> None:
    class OfTwo(Everything):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (x, y), (more, _) = batch
            return super().training_step((x + more.mean(), y), batch_idx)

    def make() -> dict[str, Any]:
        both = [read(Transformed(Noise(own()))), read(Transformed(Noise(random.Random(5)), 14))]
        return options(strategy, "torch") | {"data": both, "make": lambda: OfTwo(0.0)}

    check(tmp_path, "within an epoch", make)


@pytest.mark.parametrize("strategy", ["single", "ddp", "pipeline"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["map", "collated"])
def test_draws_in_loader_processes_are_those_of_the_sample(
    strategy: str, persistent: bool, kind: str, tmp_path: Path, run_alone: Any
) -> None:
    run_alone(in_processes, strategy, persistent, kind, tmp_path, timeout=120)  # torch keeps a signal handler


def in_processes(strategy: str, persistent: bool, kind: str, tmp_path: Path) -> None:
    def make(workers: int = 1) -> dict[str, Any]:
        processes = {"num_workers": workers, "persistent_workers": persistent}
        collate = partial(masked, rng=own()) if kind == "collated" else None
        noisy = dataset(SAMPLES) if kind == "collated" else Transformed(Noise(np.random.default_rng(5)))
        data = read(noisy, collate_fn=collate, **processes)
        return options(strategy, "torch") | {"data": data, "validation": None}

    check(tmp_path, "within an epoch", make)
    if kind == "map" and not persistent:
        one, two = train(**make()), train(**make(2))
        assert max(difference(one, two).values()) == 0.0
        single = train(**{**make(), "strategy": "single", "devices": 1})
        assert max(difference(single, one).values()) < 1e-10


def test_another_number_of_workers_begins_anew_and_it_is_told(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS["within an epoch"])
    train(**options("ddp", "torch"), callbacks=[saving], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="another number of workers: the random generators that a data set has"):
        train(**options("single", "torch"), resume=earliest(tmp_path))


def test_other_generators_begin_anew_and_it_is_told(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS["within an epoch"])
    train(**options("single", "torch"), callbacks=[saving], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="a data set draws from other random generators"):
        train(**options("single", "numpy"), resume=earliest(tmp_path))


@pytest.mark.parametrize("kind", [partial(TransformedStream, Noise(own())), NoisyStream])
def test_processes_that_stay_with_their_generators_are_told_of(kind: Any, tmp_path: Path, run_alone: Any) -> None:
    run_alone(in_staying_processes, kind, tmp_path, timeout=60)


def in_staying_processes(kind: Any, tmp_path: Path) -> None:
    def run(**more: Any) -> None:
        stream = read(kind(), num_workers=1, persistent_workers=more.pop("stay"))
        train(data=stream, max_epochs=2, **more)

    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS["within an epoch"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*processes that stay")
        run(stay=True, callbacks=[saving], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="by processes that stay .*, whose random generators begin anew"):
        run(stay=True, resume=earliest(tmp_path))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*processes that stay")
        run(stay=False, resume=earliest(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_under_lightnings_meanings(kind: str, moment: str, tmp_path: Path) -> None:
    def run(**more: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = Project()
        trainer = facade.Trainer(**{**QUIET, "max_epochs": 3, "num_sanity_val_steps": 0, **more})
        trainer.fit(module, KINDS[kind](), ckpt_path=resume)
        return [weight.detach() for weight in module.parameters()]

    resume = None
    saving = facade.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS[moment])
    weights = run(callbacks=[saving], enable_checkpointing=True)
    resume = earliest(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights, run(), strict=True))


def test_processes_of_a_loader_that_is_asked_for_again_draw_as_before(tmp_path: Path, run_alone: Any) -> None:
    """Though validation, in this process, draws from the same generator meanwhile."""
    run_alone(asked_for_again, tmp_path, timeout=60)


def asked_for_again(tmp_path: Path) -> None:
    def run(**more: Any) -> Outcome:
        noise = Noise(np.random.default_rng(5))
        module = Asked(noise)
        settings = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, "seed": 3, "precision": "64-true"}
        trainer = Trainer(**{**settings, "reload_dataloaders_every_n_epochs": 1, **more})
        trainer.fit(module, ckpt_path=resume)
        return Outcome([*trainer.loss_curve], {**module.state_dict()}, {}, trainer.global_step, trainer, module)

    resume = None
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS["within an epoch"])
    whole = run(callbacks=[saving], enable_checkpointing=True)
    resume = earliest(tmp_path)
    assert max(difference(whole, run()).values()) == 0.0


class Asked(Everything):
    def __init__(self, noise: Noise) -> None:
        super().__init__(0.0)
        self.loaders = (read(Transformed(noise), num_workers=1), DataLoader(Transformed(noise, 9), batch_size=3))

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]


def test_a_validation_that_was_given_up_is_made_with_the_same_draws(tmp_path: Path) -> None:
    """The checkpoint that is made when a signal comes is of the moment before it."""

    class Stopped(Everything):
        stops_in = -1

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == self.stops_in and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGINT)
            super().validation_step(batch, batch_idx)

    class Stops(Stopped):
        stops_in = 10

    def run(make: Any, **more: Any) -> Any:
        x = Transformed(Noise(own()), 9)
        sampler = WeightedRandomSampler([1.0] * 9, 7, generator=own())
        evaluated = DataLoader(x, batch_size=3, sampler=sampler)
        data = options("single", "torch") | {"validation": evaluated, "val_check_interval": 3, "make": make}
        return train(**data, max_epochs=2, **more)

    whole = run(partial(Stopped, 0.0))
    with pytest.raises(Interrupted):
        run(partial(Stops, 0.0), callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    resumed = run(partial(Stopped, 0.0), resume=tmp_path / "last.ckpt")
    assert max(difference(whole, resumed).values()) == 0.0
