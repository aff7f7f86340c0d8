"""Loaders that a hook puts in the places of those that a fit reads, as diffusion models do for their samplers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

import drivetrain.lightning as ours
from tests.lightning_parts.both import classifier, compare, loader, trainer, weights


class Counting(RandomSampler):
    """A shuffle with a generator of its own."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(self.data_source), generator=self.generator).tolist()


def given(L: Any, form: str) -> Any:
    if form == "one":
        return loader(12)
    if form == "a list":
        return [loader(12), loader(8)]
    if form == "a mapping":
        return {"a": loader(12), "b": loader(8)}
    return L.utilities.CombinedLoader([loader(12), loader(8)], "min_size")


@pytest.mark.parametrize("form", ["one", "a list", "a mapping", "combined"])
@pytest.mark.parametrize("moment", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("reload", [0, 1])
def test_others_are_read_in_the_epochs_to_come(tmp_path: Path, form: str, moment: str, reload: int) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []

        def replace(module: Any) -> None:
            if moment == "on_train_epoch_start" and module.trainer.current_epoch != 1:
                return
            held = module.trainer.fit_loop._combined_loader
            seen.append([len(one) for one in held.flattened])
            held.flattened = [
                DataLoader(
                    one.dataset,
                    batch_size=3 if form == "one" else 4,
                    sampler=Counting(one.dataset, generator=torch.Generator().manual_seed(7)),
                )
                for one in held.flattened
            ]
            seen.append([type(one.sampler).__name__ for one in module.trainer.fit_loop._combined_loader.flattened])

        def step(module: Any, batch: Any, batch_idx: int) -> Any:
            parts = batch.values() if isinstance(batch, dict) else [batch] if form == "one" else batch
            losses = [torch.nn.functional.cross_entropy(module(x), y) for x, y in parts]
            seen.append((module.current_epoch, batch_idx, [float(loss) for loss in losses]))
            return sum(losses)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            module = classifier(L, training_step=step, **{moment: replace})
            trainer(L, tmp_path, max_epochs=3, reload_dataloaders_every_n_epochs=reload).fit(module, given(L, form))
        return {"seen": seen, "weights": weights(module)}

    compare(run)


def test_as_many_as_there_were(tmp_path: Path) -> None:
    both = ours.utilities.CombinedLoader([loader(), loader()], "min_size")
    with pytest.raises(ValueError, match="1 loaders do not stand in the places of 2"):
        both.flattened = [loader()]
    both.flattened = others = [loader(8), loader(4)]
    assert both.iterables == others
    assert len(both) == 1


@pytest.mark.parametrize(("strategy", "distributed"), [("auto", False), ("ddp", True)])
def test_whether_the_strategy_is_a_distributed_one(tmp_path: Path, strategy: str, distributed: bool) -> None:
    def run(L: Any) -> dict[str, Any]:
        connector = trainer(L, tmp_path, strategy=strategy, use_distributed_sampler=False)._accelerator_connector
        return {"is": connector.is_distributed, "sampler": connector.use_distributed_sampler}

    assert compare(run) == {"is": distributed, "sampler": False}


class Numbers(ours.LightningModule):
    """Has no gradient worth the name: it notes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.read.append(batch.tolist())
        return self.weight * batch.sum()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def in_batches(shuffled: bool, drop_last: bool) -> DataLoader[Any]:
    """Batches of four of ten numbers, by a sampler of torch's that a project gives."""
    order = RandomSampler(range(10)) if shuffled else SequentialSampler(range(10))
    return DataLoader(range(10), batch_sampler=BatchSampler(order, 4, drop_last))  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_a_given_batch_sampler_are_dealt_out(
    shuffled: bool, drop_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a loader has no batch size of its own. As Lightning, in one that a hook makes; one that is given to ``fit``
    breaks there."""
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # which it sets
        monkeypatch.setenv(variable, "0")
    ours.seed_everything(3)
    module = Numbers()
    trainer(ours, tmp_path, strategy="ddp", max_epochs=2).fit(module, in_batches(shuffled, drop_last))
    sampler: DistributedSampler[Any] = DistributedSampler(range(10), 1, 0, shuffle=True, seed=3)  # type: ignore[arg-type]
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += list(BatchSampler(sampler, 4, drop_last))
    assert module.read == expected
    several = trainer(ours, tmp_path, strategy="ddp", devices=2)
    found = several.predict(Numbers(), in_batches(shuffled, drop_last))
    assert sorted(torch.cat(found).tolist()) == list(range(10)) and max(map(len, found)) == 4
