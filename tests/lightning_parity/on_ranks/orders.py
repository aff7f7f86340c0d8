"""The order of the samples under a distributed strategy, on one device as well, and what is drawn beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class OwnWay(DataLoader[Any]):
    """Iterates in a way of its own, as torchdata's does."""

    def __iter__(self) -> Any:
        self.begun = True
        return super().__iter__()


class WholeBatches(DataLoader[Any]):
    """Asks the data set for the samples of a batch at once, as loaders of time series over a graph do."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, collate_fn=tuple, **{k: v for k, v in options.items() if k != "collate_fn"})

    @property
    def _auto_collation(self) -> bool:
        return False

    @property
    def _index_sampler(self) -> Any:
        return self.batch_sampler


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.seen.append(batch[0].flatten().tolist())
            dropping = self.trainer.world_size == 1  # replicas draw random numbers of their own
            (self.net.train if dropping else self.net.eval)()
            return self.net(batch[0]).pow(2).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(["validation", *batch[0].flatten().tolist()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def script(lab: Any) -> None:
        data = TensorDataset(torch.arange(12.0)[:, None])
        for number, (options, flags) in enumerate(
            [
                ({"shuffle": True}, {}),
                ({"shuffle": False}, {}),
                ({"shuffle": True, "drop_last": True, "num_workers": 1}, {"reload_dataloaders_every_n_epochs": 1}),
                ({"shuffle": True}, {"overfit_batches": 2}),
                ({"shuffle": True, "kind": OwnWay}, {}),
                ({"shuffle": False, "kind": OwnWay}, {}),
                ({"shuffle": False}, {"use_distributed_sampler": False}),
                ({"shuffle": True, "kind": WholeBatches}, {}),
                ({"shuffle": False, "num_workers": 1, "kind": WholeBatches}, {}),
            ]
        ):
            L.seed_everything(4 + number)
            model = Net()
            trainer = lab.trainer(max_epochs=2, num_sanity_val_steps=0, logger=False, **flags)
            shuffled = "use_distributed_sampler" not in flags  # else each rank draws from its own random numbers
            kind: Any = options.pop("kind", DataLoader)
            evaluated = WholeBatches if kind is WholeBatches else DataLoader
            held_out = evaluated(data, batch_size=6, shuffle=shuffled)
            trainer.fit(model, kind(data, batch_size=5, **options), held_out)
            lab.note(f"seen.{number}", model.seen)
            lab.note(f"dealt.{number}", trainer.distributed_sampler_kwargs)

    return script
