"""Loaders that a hook puts in the places of those that a fit reads, as diffusion models do for their samplers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

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
