"""What a rank reads: any kind of loader, split so that the number of workers changes nothing."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from drivetrain import DataModule, Trainer, TrainModule
from drivetrain.errors import DrivetrainError
from drivetrain.session import _prepare_data
from drivetrain.sharding import BatchSource, batch_size, part, take
from drivetrain.strategy import Shard
from tests.runs import QUIET, Classifier, dataset, difference, loader, train


class Plain:
    """An iterable without a length that gives the same batches each time."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(loader(shuffle=False)))


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x, y = dataset().tensors
        yield from zip(x, y, strict=True)


def _weighted() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    sampler = WeightedRandomSampler([1.0] * 51, 40, generator=generator)
    return DataLoader(dataset(), batch_sampler=BatchSampler(list(sampler), 8, False))


SIX_BATCHES, FIVE_BATCHES = ("drop_last", "batch sampler"), ("batch sampler of its own",)
LOADERS: dict[str, Any] = {
    "list of batches": lambda: list(loader(shuffle=False)),
    "iterable without len": Plain,
    "stream": lambda: DataLoader(Samples(), batch_size=8),
    "unbatched": lambda: DataLoader(list(loader(shuffle=False)), batch_size=None),
    "batch sampler of its own": _weighted,
    "sampler of its own": lambda: DataLoader(dataset(), batch_size=8, sampler=list(range(50, -1, -1))),
    "distributed sampler": lambda: DataLoader(
        dataset(), batch_size=8, sampler=DistributedSampler(dataset(), 1, 0, shuffle=False)
    ),
    "batch sampler": lambda: DataLoader(
        dataset(), batch_sampler=BatchSampler(SequentialSampler(range(51)), 8, drop_last=True)
    ),
    "drop_last": lambda: DataLoader(dataset(), batch_size=8, shuffle=True, drop_last=True),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_any_loader_gives_the_run_of_one_process(kind: str) -> None:
    make = LOADERS[kind]
    one = train(data=make(), validation=make(), max_epochs=2)
    two = train(strategy="ddp", devices=2, data=make(), validation=make(), max_epochs=2)
    assert one.steps == 2 * (6 if kind in SIX_BATCHES else 5 if kind in FIVE_BATCHES else 7)
    assert max(difference(one, two).values()) < 1e-10


def test_a_generator_serves_one_epoch() -> None:
    assert train(data=(batch for batch in list(loader(shuffle=False))), max_epochs=1).steps == 7
    with pytest.raises(DrivetrainError, match="gave no batch in epoch 1; an iterator that can be read only once"):
        train(data=(batch for batch in list(loader(shuffle=False))), max_epochs=2)


class Augmented(Dataset[Any]):
    """Draws from every generator for each sample, as random augmentation does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x, y = dataset(24)[index]
        return x + 0.1 * torch.randn(6, dtype=torch.float64) + 0.1 * random.random(), y


def test_augmentation_in_loader_processes_is_the_same_for_any_number_of_workers(run_alone: Any) -> None:
    run_alone(_augmented)  # torch's loader leaves a signal handler in the process


def _augmented() -> None:
    def data(processes: int) -> DataLoader[Any]:
        return DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=processes)

    reference = train(data=data(1))
    for strategy, devices, processes in (("single", 1, 2), ("ddp", 2, 1)):
        other = train(strategy=strategy, devices=devices, data=data(processes))
        assert max(difference(reference, other).values()) < 1e-10
    epochs = [[loss for step, loss in reference.curve if (step - 1) // 3 == epoch] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_augmentation_of_a_part_of_a_data_set_is_that_of_its_samples(run_alone: Any) -> None:
    """Torch's subset is asked for a batch at once; where its data set makes one by itself, that is told."""
    said = run_alone(_augmented_part, timeout=60)
    assert said.count("makes the samples of a batch at once, of which each worker has a part") == 1


def _augmented_part() -> str:
    def run(data: Any, *place: Any) -> Any:
        return train(Classifier, *place, data=DataLoader(data, batch_size=8, shuffle=True, num_workers=1), max_epochs=1)

    part = Subset(Subset(Augmented(), range(24)), range(20))
    assert max(difference(run(part, "single", 1), run(part, "ddp", 2)).values()) < 1e-10
    with tempfile.NamedTemporaryFile("a+") as heard, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: print(message, file=heard, flush=True)  # also in what is forked
        run(AugmentedAtOnce(), "ddp", 2)
        run(AugmentedAtOnce(), "single", 1)
        heard.seek(0)
        return heard.read()


class Scaled(Dataset[Any]):
    """What its samples are multiplied by is set in the processes that read it."""

    def __init__(self, at_once: bool) -> None:
        self.factors: list[float] = []
        self.seed = 2.0
        if at_once:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    @property
    def factor(self) -> float:
        return self.factors[-1]

    @factor.setter
    def factor(self, value: float) -> None:
        self.factors.append(value)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x, y = dataset(24)[index]
        return x * self.factor, y


def scales(worker: int) -> None:
    data = torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]
    data.factor = data.seed + len(data.factors)


@pytest.mark.parametrize(("context", "at_once"), [("fork", False), ("fork", True), ("spawn", False)])
def test_a_worker_init_fn_finds_the_data_set(context: str, at_once: bool, run_alone: Any) -> None:
    run_alone(_scaled, context, at_once, timeout=120)


def _scaled(context: str, at_once: bool) -> None:
    def run(data: Any, **processes: Any) -> Any:
        read = DataLoader(data, batch_size=8, shuffle=True, **processes)
        return train(strategy="single", devices=1, data=read, max_epochs=1)

    doubled = Scaled(False)
    doubled.factor = 2.0
    options = {"num_workers": 1, "worker_init_fn": scales, "multiprocessing_context": context}
    assert max(difference(run(doubled), run(Scaled(at_once), **options)).values()) == 0.0


def test_per_process_batches_are_global_ones_of_as_many_times_the_size() -> None:
    joined = train(data=loader(51, 8))
    for strategy, devices in (("ddp", 2), ("ring", 4)):
        several = train(strategy=strategy, devices=devices, data=loader(51, 8 // devices), batch="per_process")
        assert max(difference(joined, several).values()) < 1e-10


class Own(IterableDataset[Any]):
    """A stream of its own on every rank; they end at different times."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        x, y = dataset(100).tensors
        rank = dist.get_rank()
        for i in range(self.lengths[rank]):
            yield x[50 * rank + i], y[50 * rank + i]


class ByEpoch(Classifier):
    """Its schedule and its validation hang on the end of the epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_train_end(self) -> None:
        rate = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"], dtype=torch.float64)
        weights = torch.cat([p.detach().reshape(-1) for p in self.parameters()])
        for both in (self.all_gather(rate), self.all_gather(weights)):
            assert torch.equal(both[0], both[1])
        assert float(rate) == 0.05


@pytest.mark.parametrize("lengths", [(24, 24), (24, 40), (40, 24), (24, 30)])
def test_streams_of_their_own_end_with_the_shortest(lengths: tuple[int, int]) -> None:
    data = DataLoader(Own(lengths), batch_size=8)
    outcome = train(ByEpoch, "ddp", 2, data=data, validation=loader(10), batch="per_process")
    assert outcome.steps == 6
    assert "val/loss" in outcome.metrics


def test_sized_loaders_of_their_own_end_with_the_shortest() -> None:
    class OfRank(Classifier):
        def train_dataloader(self) -> Any:
            return list(loader(24 + 16 * self.global_rank, shuffle=False))

    with_data = type("WithData", (ByEpoch,), {"train_dataloader": OfRank.train_dataloader})
    trainer = Trainer(**QUIET, strategy="ddp", devices=2, batch="per_process", max_epochs=2, precision="64-true")
    trainer.fit(with_data(), val_dataloaders=loader(10))
    assert trainer.global_step == 6


def test_a_distributed_sampler_can_be_left_alone() -> None:
    class Given(Classifier):
        def train_dataloader(self) -> Any:
            sampler = DistributedSampler(dataset(48), 2, self.global_rank, shuffle=False)
            return DataLoader(dataset(48), batch_size=4, sampler=sampler)

    trainer = Trainer(
        **QUIET, strategy="ddp", devices=2, use_distributed_sampler=False, max_epochs=1, precision="64-true"
    )
    module = Given()
    trainer.fit(module)
    x, y = dataset(48).tensors
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)]  # the two ranks' samples, in turn
    one = train(data=batches, max_epochs=1)
    for a, b in zip(module.parameters(), one.module.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10, rtol=0)


# -- data modules and hooks -------------------------------------------------------------------------------------
class Backwards(DistributedSampler[Any]):
    """A project's own rule of who gets what."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas)[::-1][: self.num_samples])  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [DistributedSampler, Backwards])
def test_a_projects_distributed_sampler_deals_as_it_says(kind: Any, drop_last: bool) -> None:
    """With batches of each process: by the sampler's seed, not the run's, and by its own rule where it has one."""
    for rank in range(2):
        options: dict[str, Any] = {"num_replicas": 2, "rank": rank, "seed": 3, "drop_last": drop_last}
        samples = list(range(13 if drop_last else 12))
        data = DataLoader(samples, batch_size=2, sampler=kind(samples, **options))  # type: ignore[arg-type]
        shard = Shard(rank, 2)
        source = BatchSource(data, shard, mode="per_process", seed=1, training=True, order="torch")
        by_hand = kind(samples, **options)
        for epoch in range(2):
            source.set_epoch(epoch)
            by_hand.set_epoch(epoch)
            assert [int(number) for micro in source for number in micro.batch] == list(by_hand)


def test_the_order_of_a_distributed_strategy_on_one_device_goes_on_in_a_run_of_another_seed() -> None:
    def order(source: BatchSource) -> list[int]:
        source.set_epoch(1)
        return [int(number) for micro in source for number in micro.batch]

    data = DataLoader(list(range(9)), batch_size=2)  # type: ignore[arg-type]
    options: dict[str, Any] = {"mode": "per_process", "training": True, "order": "sampler"}
    first, again = (BatchSource(data, Shard(0, 1), seed=seed, **options) for seed in (1, 2))
    by_hand = DistributedSampler(range(9), num_replicas=1, rank=0, seed=1)  # type: ignore[arg-type]
    by_hand.set_epoch(1)
    assert order(first) == list(by_hand) != order(again)
    again.load_state_dict({**first.state_dict(), "drawn_from": []})
    assert order(again) == list(by_hand)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_global_batches_is_that_of_any_number_of_devices(shuffle: bool) -> None:
    """Of a distributed strategy under Lightning's Trainer with ``batch="global"``; some have one replica on any number
    of ranks (a pipeline)."""
    data = DataLoader(list(range(9)), batch_size=4, shuffle=shuffle)  # type: ignore[arg-type]
    options: dict[str, Any] = {"mode": "global", "training": True, "order": "sampler", "seed": 1}
    lone, *several = (BatchSource(data, Shard(rank, size), **options) for rank, size in ((0, 1), (0, 2), (1, 2)))
    order = [int(number) for micro in lone for number in micro.batch]
    parts = zip(*([micro.batch.tolist() for micro in source] for source in several), strict=True)
    # Both have the last sample, which is one.
    assert order == list(dict.fromkeys(number for both in parts for part in both for number in part))
    assert (order == list(range(9))) is not shuffle


def test_data_module_from_datasets() -> None:
    data = DataModule.from_datasets(dataset(24), [dataset(8), dataset(6)], dataset(6), dataset(5), batch_size=4)
    trainer = Trainer(**QUIET, max_epochs=1, precision="64-true")
    module: Any = Classifier()
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: module.log("v", batch[0].mean())
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 6 and "v/dataloader_idx_1" in trainer.callback_metrics
    assert trainer.test(module, data, verbose=False)[0]["val/accuracy"] >= 0
    assert sum(len(batch) for batch in trainer.predict(module, datamodule=data) or []) == 5


def test_data_module_hooks_in_order_and_its_transfer_hooks() -> None:
    calls: list[str] = []

    class Data(DataModule):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(f"setup {stage}")

        def teardown(self, stage: str) -> None:
            calls.append(f"teardown {stage}")

        def train_dataloader(self) -> Any:
            calls.append("train_dataloader")
            return loader(16)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("before")
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("after")
            return batch[0] * 0.0, batch[1]

    class Sees(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not batch[0].any()
            return self.loss(batch)

    Trainer(**QUIET, max_epochs=1, precision="64-true").fit(Sees(), datamodule=Data())
    assert calls == ["prepare_data", "setup fit", "train_dataloader", *["before", "after"] * 2, "teardown fit"]


# -- splitting --------------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


@dataclass
class Record:
    x: torch.Tensor
    label: str = "same"


def test_take_cuts_every_part_of_a_nested_batch() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    batch = {
        "x": x,
        "pair": Pair(x + 1, list("abcdef")),
        "list": [x, (x, 3)],
        "record": Record(x),
        "scalar": torch.tensor(1.0),
        "other": torch.zeros(2),
        "numbers": [1, 2, 3, 4, 5, 6],
        "array": x.numpy(),
    }
    cut = take(batch, 6, slice(2, 5))
    assert torch.equal(cut["x"], x[2:5]) and torch.equal(cut["pair"].x, x[2:5] + 1)
    assert isinstance(cut["pair"], Pair) and cut["pair"].names == list("cde")
    assert torch.equal(cut["list"][0], x[2:5]) and cut["list"][1][1] == 3
    assert torch.equal(cut["record"].x, x[2:5]) and cut["record"].label == "same"
    assert cut["scalar"].shape == () and cut["other"].shape == (2,) and cut["numbers"] == [3, 4, 5]
    assert cut["array"].shape == (3, 2)
    assert batch_size(batch) == 6 and batch_size(["a", "b"]) is None


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [1, 2, 3, 4, 8, 11])
def test_parts_cover_a_batch_once(total: int, size: int) -> None:
    for whole_tail in (True, False):
        rows, weight = [], 0.0
        for rank in range(size):
            mine, copies = part(total, Shard(rank, size), whole_tail)
            rows += list(range(total))[mine] if copies == 1 or rank == 0 else []
            weight += (mine.stop - mine.start) / copies
        assert sorted(rows) == list(range(total)) and weight == pytest.approx(total)


@pytest.mark.parametrize("start", [0, 1, 6])
def test_a_source_goes_on_from_any_batch(start: int) -> None:
    for made in (loader(), list(loader(shuffle=False)), Plain(), DataLoader(Samples(), batch_size=8)):
        source = BatchSource(made, Shard(), mode="global", seed=1, training=True)
        source.set_epoch(2)
        whole, rest = list(source), list(source.read(start))
        assert [m.index for m in rest] == list(range(start, 7)) and rest[-1].last and not whole[0].last
        for a, b in zip(whole[start:], rest, strict=True):
            assert torch.equal(a.batch[0], b.batch[0])


def test_a_loader_that_is_shorter_than_it_says() -> None:
    class Short(list[Any]):
        def __len__(self) -> int:
            return 9

    with pytest.raises(DrivetrainError, match="the loader ended after 7 of 9 batches in epoch 0"):
        train(data=Short(loader(shuffle=False)))


def test_the_users_own_data_set_stays_as_it_is() -> None:
    data = loader()
    before = (data.dataset, data.sampler, data.batch_sampler)
    train(data=data, max_epochs=1)
    assert before == (data.dataset, data.sampler, data.batch_sampler)
    assert isinstance(data.dataset, TensorDataset)


def test_a_loader_may_have_attributes_of_any_name() -> None:
    """Several loaders that are read at once are known by who joined them, not by names of attributes."""

    class OfProject(DataLoader[Any]):
        sources = ("left", "right")
        combined = "both"

    data = OfProject(dataset(16), batch_size=8)
    assert train(data=data, validation=data, max_epochs=1).steps == 2


@pytest.mark.parametrize("of_module", [True, False])
def test_data_are_prepared_once_on_each_node_or_once_of_all(of_module: bool) -> None:
    """Nodes that share a file system would download over each other."""

    def processes_that_prepare(per_node: bool) -> list[tuple[int, int]]:
        called: list[tuple[int, int]] = []

        class Prepares(TrainModule if of_module else DataModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.prepare_data_per_node = per_node

            def prepare_data(self) -> None:
                called.append((node, local))

        owner = Prepares()
        request = SimpleNamespace(module=owner if of_module else TrainModule(), datamodule=None if of_module else owner)
        for node, local in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            everyone = SimpleNamespace(barrier=lambda: None)
            strategy = SimpleNamespace(node_rank=node, everyone=everyone)
            _prepare_data(SimpleNamespace(local_rank=local, strategy=strategy), request)  # type: ignore[arg-type]
        return called

    assert TrainModule().prepare_data_per_node and DataModule().prepare_data_per_node
    assert processes_that_prepare(True) == [(0, 0), (1, 0)]
    assert processes_that_prepare(False) == [(0, 0)]
