"""optimizer_step with a linear warm-up, lr_scheduler_step for a schedule of its own kind, zeroed gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CosineByUpdates:
    """Counts updates itself, as schedules of model libraries do."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_initial: int) -> None:
        self.optimizer, self.t_initial, self.num_updates = optimizer, t_initial, 0
        self.base = [group["lr"] for group in optimizer.param_groups]

    def step(self, epoch: int, metric: Any = None) -> None:
        factor = 0.5 * (1 + torch.cos(torch.tensor(3.14159 * epoch / self.t_initial)).item())
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * factor

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base, "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base = state["base"]


def project(L: Any) -> Any:
    class LitModel(L.LightningModule):
        def __init__(self, lr: float = 0.1, warmup: int = 6) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            self.zeroed = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if self.trainer.global_step < self.hparams.warmup:
                lr_scale = min(1.0, float(self.trainer.global_step + 1) / self.hparams.warmup)
                for pg in optimizer.param_groups:
                    pg["lr"] = lr_scale * self.hparams.lr
            optimizer.step(closure=optimizer_closure)
            self.log("lr", optimizer.param_groups[0]["lr"], on_step=True, on_epoch=False)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)
            self.zeroed += 1

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.current_epoch + 1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [{"scheduler": CosineByUpdates(optimizer, 5), "interval": "epoch"}]

    def script(lab: Any) -> None:
        x = torch.randn(40, 6)
        model = LitModel()
        trainer = lab.trainer(max_epochs=4, log_every_n_steps=1)
        trainer.fit(model, DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=12, shuffle=True))
        lab.note("zeroed", model.zeroed)

    return script
