"""LBFGS, which calls its closure several times a step, and an optimizer whose closure a module looks into."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Fitted(L.LightningModule):
        def __init__(self, which: str) -> None:
            super().__init__()
            self.which = which
            self.net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
            self.called = 0
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            self.called += 1
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.which == "looking":
                loss = optimizer_closure()
                self.losses.append(float(loss))
                if loss < 100:
                    optimizer.step()
            else:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def configure_optimizers(self) -> Any:
            if self.which == "lbfgs":
                return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
            return torch.optim.Rprop(self.parameters(), lr=0.01)

    def script(lab: Any) -> None:
        x = torch.randn(24, 2, dtype=torch.float64)
        loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=12)
        for which in ("lbfgs", "looking"):
            model = Fitted(which)
            trainer = lab.trainer(max_epochs=2, log_every_n_steps=1, enable_checkpointing=False)
            trainer.fit(model, loader)
            lab.note(f"called {which}", model.called)
            lab.note(f"losses {which}", model.losses)

    return script
