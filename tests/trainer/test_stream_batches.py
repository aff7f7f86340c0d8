"""Batches of streams in every shape that projects collate them to: each rank trains on its own samples, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import errors
from drivetrain.errors import TrainingError
from drivetrain.sharding import take
from tests.runs import Classifier, difference, train


def _samples() -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """Features, a class and some boxes: 1 to 4 of them, so that a batch of them is ragged."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [(drawn(6), number % 4, drawn(1 + number % 4, 6)) for number in range(23)]


SAMPLES = _samples()


class Known(Dataset[Any]):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        return SAMPLES[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES


class Sized(Stream):
    def __len__(self) -> int:
        return len(SAMPLES)


class Named(NamedTuple):
    x: Any
    y: Any
    boxes: Any


@dataclass
class Record:
    x: Any
    y: Any
    boxes: Any


def lists(samples: list[Any]) -> tuple[Any, Any, Any]:
    return [x for x, _, _ in samples], [y for _, y, _ in samples], [{"boxes": boxes} for _, _, boxes in samples]


def time_first(samples: list[Any]) -> tuple[Any, Any, Any]:
    _, y, boxes = lists(samples)
    return torch.stack([torch.stack([x, x]) for x, _, _ in samples], dim=1), torch.tensor(y), boxes


def packed(samples: list[Any]) -> tuple[Any, Any, Any]:
    """All boxes in one tensor, with the number of each sample's."""
    x, y, _ = lists(samples)
    boxes = [boxes for *_, boxes in samples]
    return torch.stack(x), torch.tensor(y), (torch.cat(boxes), [len(one) for one in boxes])


COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "lists": lists,
    "dict": lambda samples: dict(zip(("x", "y", "boxes"), lists(samples), strict=True)),
    "named tuple": lambda samples: Named(*lists(samples)),
    "dataclass": lambda samples: Record(*lists(samples)),
    "time first": time_first,
    "packed": packed,
}


class Detector(Classifier):
    """Takes any of these; each sample's boxes shift its features."""

    def loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, dict):
            x, y, boxes = batch["x"], batch["y"], batch["boxes"]
        else:
            x, y, boxes = (batch.x, batch.y, batch.boxes) if isinstance(batch, Record) else batch
        if isinstance(x, torch.Tensor):
            x = list(x[0] if x.ndim == 3 else x)
        if isinstance(boxes, tuple):
            boxes = [{"boxes": one} for one in boxes[0].split(boxes[1])]
        rows = [one + found["boxes"].mean(0) for one, found in zip(x, boxes, strict=True)]
        return nn.functional.cross_entropy(self.net(torch.stack(rows)), torch.as_tensor(y))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("stream", [Stream, Sized])
@pytest.mark.parametrize("kind", COLLATES)
def test_a_stream_is_the_run_of_a_data_set_that_is_known(kind: str, stream: type[Stream], devices: int) -> None:
    def run(data: Dataset[Any], **place: Any) -> Any:
        def loader() -> DataLoader[Any]:
            return DataLoader(data, batch_size=5, collate_fn=COLLATES[kind])

        return train(Detector, data=loader(), validation=loader(), accumulate_grad_batches=2, **place)

    one = run(Known())
    strategy = "single" if devices == 1 else "ddp"
    assert max(difference(one, run(stream(), strategy=strategy, devices=devices)).values()) < 1e-10


def _collated(kind: str) -> list[Any]:
    return [COLLATES[kind](SAMPLES[start : start + 5]) for start in range(0, 20, 5)]


@pytest.mark.parametrize("kind", ["lists", "time first", "packed"])
def test_a_batch_that_was_collated_and_shows_not_what_its_samples_are_is_refused(kind: str) -> None:
    with pytest.raises(errors.DrivetrainError, match=r"does not show how to split it .* let the DataLoader make"):
        train(Detector, "ddp", 2, data=_collated(kind), max_epochs=1)


def test_lists_of_a_collated_batch() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    boxes = [{"boxes": torch.zeros(n, 4), "name": str(n)} for n in (1, 3, 5)]
    batch = [x, boxes, [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], [["a"], ["b", "c"], []], ("mean", 2)]
    cut = take(batch, 3, slice(1, 3))
    assert torch.equal(cut[0], x[1:]) and cut[1] == boxes[1:] and cut[2] == batch[2][1:]
    assert cut[3] == [["b", "c"], []] and cut[4] == ("mean", 2)
    # Two columns of two samples: what default_collate makes of pairs.
    pairs = take([x[:2], [("a", "b"), ("c", "d")]], 2, slice(0, 1))
    assert torch.equal(pairs[0], x[:1]) and pairs[1] == [("a",), ("c",)]
    assert [len(column) for column in take([x[:2], x[:2]], 2, slice(0, 1))] == [1, 1]


@pytest.mark.parametrize(
    "unclear", [torch.zeros(5), [torch.zeros(3), torch.zeros(4)], [torch.zeros(3), torch.zeros(3), torch.zeros(3)]]
)
def test_what_may_be_samples_or_columns(unclear: Any) -> None:
    with pytest.raises(TrainingError, match=r"a batch of 3 samples, .* give what all replicas share in a dict"):
        take([torch.zeros(3, 2), unclear], 3, slice(0, 1))
