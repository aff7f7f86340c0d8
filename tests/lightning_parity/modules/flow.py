"""A normalising flow whose forward pass draws noise, also for summary and graph; a rate warmed up after each step; a
batch sampler with an epoch of its own; evaluation with a limit of zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Pairs(Sampler[list[int]]):
    """Batches of two in an order of the epoch; ``set_epoch`` is for whoever wants to call it."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.told = size, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.told = epoch, self.told + 1

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([order[i : i + 2] for i in range(0, self.size, 2)])

    def __len__(self) -> int:
        return self.size // 2


def project(L: Any) -> Any:
    class Flow(L.LightningModule):
        def __init__(self, lr: float = 0.05, warmup: int = 5) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.scale = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
            self.prior = torch.distributions.Normal(0.0, 1.0)
            self.example_input_array = torch.rand(2, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = (x + torch.rand_like(x) / 16).chunk(2, 1)
            log_scale = self.scale(a)
            z = torch.cat([a, b * log_scale.exp()], 1)
            return -(self.prior.log_prob(z).sum(1) + log_scale.sum(1)).mean()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self(batch[0])
            self.log("nll", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_nll", self(batch[0]))

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            if self.trainer.global_step < self.hparams.warmup:
                for group in optimizer.param_groups:
                    group["lr"] = self.hparams.lr * min(1.0, (self.trainer.global_step + 1) / self.hparams.warmup)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def script(lab: Any) -> None:
        data = TensorDataset(torch.randn(14, 6))
        pairs, model = Pairs(14), Flow()
        board = L.loggers.TensorBoardLogger(str(lab.folder), name="board", version="flow", log_graph=True)
        trainer = lab.trainer(max_epochs=2, logger=board, enable_model_summary=True, log_every_n_steps=3)
        trainer.fit(model, DataLoader(data, batch_sampler=pairs), DataLoader(data, batch_size=5))
        lab.note("told", pairs.told)
        bare = lab.trainer(max_epochs=1, limit_val_batches=0, limit_test_batches=0, log_every_n_steps=3)
        bare.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=5))
        bare.validate(model, DataLoader(data, batch_size=5))
        for path in lab.folder.rglob("events.out*"):
            path.unlink()  # they are named after the moment
        lab.note("stage", [str(bare.state.fn), f"{bare.state.status}"])

    return script
