"""Samplers and streams with random generators of their own draw on, in a run that goes on, from where they stood."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

import drivetrain.lightning as facade
from drivetrain.callbacks import ModelCheckpoint
from tests.runs import QUIET, Classifier, dataset, difference, train

SAMPLES, BATCH = 26, 4  # seven batches, the last one of two


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Drawn(Sampler[int]):
    """Draws when an epoch begins, or each sample when it is asked for it."""

    def __init__(self, rng: Any, at_once: bool) -> None:
        self.rng, self.at_once = rng, at_once

    def __iter__(self) -> Iterator[int]:
        draws = (int(self.rng.random() * SAMPLES) for _ in range(SAMPLES))
        return iter(list(draws)) if self.at_once else draws

    def __len__(self) -> int:
        return SAMPLES


class Old(Drawn):
    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(SAMPLES).tolist())


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        samples = dataset(SAMPLES)
        for _ in range(SAMPLES):
            yield samples[self.rng.randrange(SAMPLES)]


class Batches:
    """A loader of a project's own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[Any]:
        x, y = dataset(SAMPLES).tensors
        for _ in range(7):
            chosen = torch.from_numpy(self.rng.integers(SAMPLES, size=BATCH))
            yield x[chosen], y[chosen]

    def __len__(self) -> int:
        return 7


class Within(Sampler[int]):
    """Reads what another one chooses, which draws by a generator that lies deeper."""

    def __init__(self) -> None:
        self.chosen_by = {"inner": Drawn(np.random.default_rng(5), at_once=True)}

    def __iter__(self) -> Iterator[int]:
        return iter(self.chosen_by["inner"])

    def __len__(self) -> int:
        return SAMPLES


class ByItself(DataLoader[Any]):
    """Iterates in a way of its own, in which it asks torch's for an iterator when its first batch is asked for."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def by(sampler: Any) -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), batch_size=BATCH, sampler=sampler)


def weighted() -> Any:
    return WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], SAMPLES, generator=generator())


KINDS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: by(weighted()),
    "numpy": lambda: by(Drawn(np.random.default_rng(5), at_once=True)),
    "one by one": lambda: by(Drawn(random.Random(5), at_once=False)),
    "older numpy": lambda: by(Old(np.random.RandomState(5), at_once=True)),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "loader": Batches,
}


def validation() -> Any:
    return DataLoader(dataset(9), batch_size=3, sampler=WeightedRandomSampler([1.0] * 9, 5, generator=generator()))


MOMENTS: dict[str, dict[str, Any]] = {
    "within an epoch": {"every_n_train_steps": 10},
    "before its end": {"every_n_train_steps": 14},
    "at its end": {"every_n_epochs": 2, "save_on_train_epoch_end": True},
}


def saved(folder: Path, moment: str, **options: Any) -> Path:
    saving = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **MOMENTS[moment])
    train(callbacks=[saving], enable_checkpointing=True, **options)
    return earliest(folder)


def earliest(folder: Path) -> Path:
    """The checkpoint of the fewest steps; further ones may follow it."""
    return min(folder.glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("first", "second"), [("single", "single"), ("ring", "ring"), ("ring", "single")])
def test_a_run_goes_on_with_the_same_samples(kind: str, moment: str, first: str, second: str, tmp_path: Path) -> None:
    def options(strategy: str) -> dict[str, Any]:
        devices = 1 if strategy == "single" else 2
        data, evaluated = KINDS[kind](), validation()
        return {"strategy": strategy, "devices": devices, "data": data, "validation": evaluated, "max_epochs": 3}

    whole = train(**options(second))
    with pytest.warns(UserWarning, match="is of 2 workers") if first != second else nothing():
        resumed = train(**options(second), resume=saved(tmp_path, moment, **options(first)))
    assert max(difference(whole, resumed).values()) <= (0.0 if first == second else 1e-12)


def test_other_generators_begin_anew_and_it_is_told(tmp_path: Path) -> None:
    resume = saved(tmp_path, "at its end", data=KINDS["weighted"](), max_epochs=3)
    with pytest.warns(UserWarning, match="draw from other random generators than in the run that goes on"):
        resumed = train(data=KINDS["numpy"](), max_epochs=3, resume=resume)
    assert resumed.steps == 21
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a loader's samplers")
        train(data=KINDS["weighted"](), max_epochs=3, resume=resume)


@pytest.mark.parametrize("kind", ["shuffled", *KINDS])
@pytest.mark.parametrize("moment", MOMENTS)
def test_under_lightnings_meanings(kind: str, moment: str, tmp_path: Path) -> None:
    """In one process the loader draws its order itself."""

    def run(**more: Any) -> tuple[list[torch.Tensor], dict[str, float]]:
        torch.manual_seed(3)
        module = Project()
        trainer = facade.Trainer(**{**QUIET, "max_epochs": 3, "num_sanity_val_steps": 0, **more})
        shuffled = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True, generator=generator())
        trainer.fit(module, shuffled if kind == "shuffled" else KINDS[kind](), ckpt_path=resume)
        return [weight.detach() for weight in module.parameters()], trainer.callback_metrics

    resume = None
    saving = facade.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **MOMENTS[moment])
    weights, _ = run(callbacks=[saving], enable_checkpointing=True)
    resume = earliest(tmp_path)
    again, _ = run()
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_a_generator_deep_within_a_sampler(tmp_path: Path) -> None:
    whole = train(data=by(Within()), max_epochs=3)
    resumed = train(
        data=by(Within()), max_epochs=3, resume=saved(tmp_path, "within an epoch", data=by(Within()), max_epochs=3)
    )
    assert max(difference(whole, resumed).values()) == 0.0


def test_a_loader_with_processes_that_iterates_in_its_own_way_is_shuffled_by_the_runs_seed(run_alone: Any) -> None:
    run_alone(shuffled_by_the_runs_seed, timeout=60)  # torch keeps a signal handler


def shuffled_by_the_runs_seed() -> None:
    def run() -> Any:
        return train(data=ByItself(dataset(SAMPLES), BATCH, shuffle=True, num_workers=1))

    first = run()
    torch.manual_seed(7)
    assert max(difference(first, run()).values()) == 0.0


class Project(facade.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier().net.double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
