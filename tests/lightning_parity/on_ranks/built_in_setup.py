"""A model and a split of the data made in ``setup``, training data without ``shuffle``, a sampler of the project."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def project(L: Any) -> Any:
    class Data(L.LightningDataModule):
        def setup(self, stage: str) -> None:
            if stage == "fit":
                x = torch.randn(40, 4)
                self.train, self.val = random_split(TensorDataset(x, x.sum(1, keepdim=True)), [32, 8])

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=4)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val, batch_size=2)

    class OwnOrder(Data):
        def train_dataloader(self) -> Any:
            place = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
            return DataLoader(self.train, batch_size=4, sampler=DistributedSampler(self.train, **place, seed=3))

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[float] = []

        def setup(self, stage: str) -> None:
            if not hasattr(self, "net"):
                self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.batches.append(float(batch[0].sum()))
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def script(lab: Any) -> None:
        L.seed_everything(23)
        for data in (Data(), OwnOrder()):
            torch.randn(5)  # whatever a script draws before
            model = Net()
            trainer = lab.trainer(max_epochs=2, enable_checkpointing=False)
            trainer.fit(model, datamodule=data)
            name = type(data).__name__
            lab.note(f"batches of {name}", model.batches)
            lab.note(f"weights of {name}", [value.tolist() for value in model.state_dict().values()])

    return script
