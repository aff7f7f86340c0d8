"""Runs that are drawn as in :mod:`tests.strategies.drawn`, over data that is read in less usual ways.

``python -m tests.strategies.drawn_data FIRST COUNT`` runs the seeds from FIRST on, as that does.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

from tests.runs import Outcome, dataset, train
from tests.strategies import drawn
from tests.strategies.drawn import CALLBACKS, MODULES, Drawn, main
from tests.strategies.features import PLACES, Planned


class Augmented(Dataset[Any]):
    """Draws from the global generators, or from one of its own."""

    def __init__(self, samples: int, rng: Any = None) -> None:
        self.data, self.rng = dataset(samples), rng

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        if self.rng is not None:
            return x + 0.1 * self.rng.random(), y
        return x + 0.1 * torch.randn(x.shape, dtype=x.dtype) + 0.1 * random.random() + 0.1 * np.random.rand(), y


class AtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """In as many parts as there are processes; shuffled by a generator of its own where it has one."""

    def __init__(self, samples: int, rng: Any = None, length: bool = False) -> None:
        self.samples, self.rng = samples, rng
        if length:
            self.__class__ = Sized

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        order = [*range(self.samples)]
        if self.rng is not None:
            self.rng.shuffle(order)
        data = dataset(self.samples)
        for index in order[info.id :: info.num_workers] if info else order:
            yield data[index]


class Sized(Stream):
    def __len__(self) -> int:
        return self.samples


class Placed:
    """A loader that says itself where it stands."""

    def __init__(self, samples: int, size: int, length: bool) -> None:
        self.samples, self.size, self.at, self.begins = samples, size, 0, 0
        if length:
            self.__class__ = SizedPlaced

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins = self.begins, 0
        x, y = dataset(self.samples).tensors
        while self.at * self.size < self.samples:
            rows = slice(self.at * self.size, (self.at + 1) * self.size)
            self.at += 1
            yield x[rows], y[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = state["at"]


class SizedPlaced(Placed):
    def __len__(self) -> int:
        return (self.samples + self.size - 1) // self.size


class Buckets(Sampler[list[int]]):
    """Batches of unlike sizes, in an order that is drawn from the global generators, its own, or by the epoch."""

    def __init__(self, samples: int, size: int, how: str, length: bool = True) -> None:
        self.samples, self.size, self.how, self.epoch = samples, size, how, 0
        self.rng = np.random.default_rng(3) if how == "own" else None
        if not length:
            self.__class__ = Unsized

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _cut(self) -> list[list[int]]:
        sizes, found, left = (self.size, max(1, self.size // 2)), [], [*range(self.samples)]
        while left:
            size = sizes[len(found) % 2]
            found.append(left[:size])
            left = left[size:]
        return found

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._cut()
        if self.rng is not None:
            order = self.rng.permutation(len(batches)).tolist()
        elif self.how == "epoch":
            order = np.random.default_rng(self.epoch).permutation(len(batches)).tolist()
        else:
            order = torch.randperm(len(batches)).tolist()
        yield from (batches[index] for index in order)

    def __len__(self) -> int:
        return len(self._cut())


class Unsized(Buckets):
    def __len__(self) -> int:
        raise TypeError


class Sample(NamedTuple):
    x: Any
    y: Any
    names: list[str]
    none: None
    nested: dict[str, Any]


def named(samples: list[Any]) -> Sample:
    x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    names = [f"sample {int(one)}" for one in y]
    return Sample(x, y, names, None, {"inner": [{"again": x + 1}, "all", 3], "count": len(samples)})


def mapped(samples: list[Any]) -> dict[str, Any]:
    return named(samples)._asdict()


def plain(batch: Any) -> Any:
    if isinstance(batch, dict) and "x" in batch:
        assert len(batch["names"]) == len(batch["x"])
        return batch["x"], batch["y"]
    if isinstance(batch, Sample):
        assert torch.allclose(batch.nested["inner"][0]["again"], batch.x + 1)
        return batch.x, batch.y
    if isinstance(batch, dict):
        return tuple(torch.cat(parts) for parts in zip(*batch.values(), strict=True))
    return batch


def unpacking(made: Any) -> Any:
    return type(made.__name__, (made,), {"on_after_batch_transfer": lambda self, batch, loader: plain(batch)})


class Manual(Planned):
    """Two optimizers and a schedule, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2 == 0:
            second.step()
        self.lr_schedulers().step()
        self.log("train/loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        biases = [p for p in self.parameters() if p.ndim == 1]
        first = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        return [first, torch.optim.Adam(biases, lr=0.01)], [torch.optim.lr_scheduler.StepLR(first, 3, 0.8)]


class Measured(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.measures = nn.ModuleDict(
            {
                name: kind().set_dtype(torch.float64)
                for name, kind in {
                    "mean": torchmetrics.MeanMetric,
                    "most": torchmetrics.MaxMetric,
                    "sum": torchmetrics.SumMetric,
                }.items()
            }
        )
        self.evaluated = torchmetrics.MeanMetric().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name, metric in self.measures.items():
            metric.update(batch[0][:, 0])
            self.log(f"train/{name}", metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.update(batch[0][:, 1])
        self.log("val/mean", self.evaluated, on_step=False, on_epoch=True)
        super().validation_step(batch, batch_idx)


WITH = (*MODULES, Manual, Manual, Manual, Measured, Measured, Measured)
READ = (
    *("own", "own, closed over", "own, collated", "own in processes", "augmented in processes", "at once in processes"),
    *("buckets", "own buckets", "buckets by epoch", "buckets without length", "buckets in processes"),
    *(
        "stream",
        "own stream",
        "sized stream",
        "stream in processes",
        "placed",
        "sized placed",
        "list",
        "names",
        "dicts",
    ),
    *("two", "two, least", "parts", "part in processes", "names in processes"),
)
# What each rank draws for itself, or has unlike parts of: held to the undisturbed run of the same place.
APART = frozenset({"own", "own, closed over", "own, collated", "two", "two, least", "at once in processes"})
EVALUATED = (None, "plain", "plain", "two", "shuffled", "stream", "own", "in processes", "dict of two", "list", "empty")


@dataclass(frozen=True)
class DrawnData(Drawn):
    """Attributes:
    evaluated: what is validated on.
    workers, persistent: processes of loaders that have some.
    """

    evaluated: str | None = None
    workers: int = 1
    persistent: bool = False

    @property
    def alone(self) -> bool:
        """Whether it is held to the undisturbed run of the place."""
        return self.read in APART or self.evaluated == "own"

    @property
    def bound(self) -> float:
        return super().bound if self.alone or WITH[self.module] is not Measured else 1e-4  # torchmetrics' are of fp32

    def told_to_differ(self) -> bool:
        return self.module < len(MODULES) and super().told_to_differ()

    def loaders(self) -> dict[str, Any]:
        samples, size = self.samples, self.batch_size
        rng = np.random.default_rng(5)
        data = dataset(samples)
        processes = {"num_workers": self.workers, "persistent_workers": self.persistent}

        def masking(batch: list[Any], rng: Any = rng) -> Any:
            x, y = torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])
            return x * float(rng.random()), y

        def shuffled(data: Any, **more: Any) -> Any:
            return DataLoader(data, size, shuffle=True, **more)

        def batched(how: str, length: bool = True, **more: Any) -> Any:
            return DataLoader(data, batch_sampler=Buckets(samples, size, how, length), **more)

        made: dict[str, Callable[[], Any]] = {
            "own": lambda: shuffled(Augmented(samples, rng)),
            "own, closed over": lambda: shuffled(Subset(ConcatDataset([Augmented(samples, rng)]), range(samples))),
            "own, collated": lambda: shuffled(data, collate_fn=masking),
            "own in processes": lambda: shuffled(Augmented(samples, rng), **processes),
            "augmented in processes": lambda: shuffled(Augmented(samples), **processes),
            "at once in processes": lambda: shuffled(AtOnce(samples), **processes),
            "part in processes": lambda: shuffled(
                Subset(Augmented(samples, rng), range(samples // 2 + 1)), **processes
            ),
            "buckets": lambda: batched("global"),
            "own buckets": lambda: batched("own"),
            "buckets by epoch": lambda: batched("epoch"),
            "buckets without length": lambda: batched("global", length=False),
            "buckets in processes": lambda: batched("own", **processes),
            "stream": lambda: DataLoader(Stream(samples), size),
            "own stream": lambda: DataLoader(Stream(samples, random.Random(5)), size),
            "sized stream": lambda: DataLoader(Stream(samples, length=True), size),
            "stream in processes": lambda: DataLoader(Stream(samples), size, **processes),
            "placed": lambda: Placed(samples, size, length=False),
            "sized placed": lambda: Placed(samples, size, length=True),
            "list": lambda: [*DataLoader(data, size)],
            "names": lambda: shuffled(data, collate_fn=named),
            "dicts": lambda: shuffled(data, collate_fn=mapped),
            "names in processes": lambda: shuffled(data, collate_fn=named, **processes),
            "two": lambda: {"a": shuffled(data), "b": shuffled(Augmented(2 * samples, rng))},
            "two, least": lambda: drawn_together({"a": shuffled(data), "b": DataLoader(dataset(9), 2)}),
            "parts": lambda: shuffled(Subset(ConcatDataset([data, data]), range(samples // 2, samples + 1))),
        }
        return {"data": made[self.read](), "validation": self._validation()}

    def _validation(self) -> Any:
        count, size = self.validation or (23, 5)
        data = dataset(count)
        made: dict[str | None, Callable[[], Any]] = {
            None: lambda: None,
            "plain": lambda: DataLoader(data, size),
            "two": lambda: [DataLoader(data, size), DataLoader(dataset(11), 3)],
            "dict of two": lambda: {"a": DataLoader(data, size), "b": [*DataLoader(dataset(3), 2)]},
            "shuffled": lambda: DataLoader(data, size, shuffle=True),
            "stream": lambda: DataLoader(Stream(count), size),
            "own": lambda: DataLoader(Augmented(count, np.random.default_rng(6)), size),
            "in processes": lambda: DataLoader(data, size, num_workers=self.workers, persistent_workers=True),
            "list": lambda: [*DataLoader(data, size)],
            "empty": lambda: [DataLoader(data, size), DataLoader(dataset(0), 3)],
        }
        return made[self.evaluated]()

    def train(self, place: str, **more: Any) -> Outcome:
        strategy, devices = ("single", 1) if place == "single" else PLACES[place]
        callbacks = [CALLBACKS[name]() for name in self.callbacks] + more.pop("saving", [])
        options = {"timeout": 40, "precision": self.precision, "callbacks": callbacks, **self.options, **more}
        return train(unpacking(WITH[self.module]), strategy, devices, **self.loaders(), **options)


def drawn_together(loaders: dict[str, Any]) -> Any:
    from drivetrain.combined import CombinedLoader

    return CombinedLoader(loaders, "min_size")


def draw(seed: int) -> DrawnData:
    found, rng = drawn.draw(seed), random.Random(f"data {seed}")
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    read, evaluated = rng.choice(READ), rng.choice(EVALUATED)
    if rng.random() < 0.4:
        values["module"] = rng.randrange(len(WITH))
    if not values["step"]:
        values["step"] = rng.randrange(1, 12) if rng.random() < 0.5 else 0
    if read in APART or evaluated == "own":
        values["second"] = values["place"] = rng.choice([values["place"], "single"])
        values["step"] = values["step"] or rng.randrange(1, 8)
    values |= {"read": read, "evaluated": evaluated, "workers": rng.choice([1, 2]), "persistent": rng.random() < 0.5}
    return DrawnData(**values)


judged = partial(drawn.judged, draw=draw)

if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), draw=draw))
