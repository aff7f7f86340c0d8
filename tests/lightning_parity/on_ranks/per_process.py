"""A loader's batch size is each process's; what the Trainer and its strategy say of the ranks; schedules by steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)
            self.seen: list[Any] = []

        def setup(self, stage: str) -> None:
            self.lr = 0.05 * self.trainer.world_size

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            self.seen.append((self.current_epoch, batch_idx, self.global_step, len(x), float(x.sum())))
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log_dict({"loss": loss, "lr": self.optimizers().param_groups[0]["lr"]}, prog_bar=True)
            return loss

        def on_train_epoch_end(self) -> None:
            total = self.trainer.strategy.reduce(torch.tensor(float(self.global_rank + 1)), reduce_op="sum")
            self.log("ranks", total, rank_zero_only=True)
            self.trainer.strategy.barrier()
            strategy = self.trainer.strategy
            self.seen.append(["places", strategy.num_processes, strategy.num_nodes, strategy.node_rank])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("test", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def script(lab: Any) -> None:
        L.seed_everything(4)
        x = torch.randn(40, 3)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        model = Net()
        trainer = lab.trainer(max_epochs=2, accumulate_grad_batches=5, gradient_clip_val=0.5, log_every_n_steps=1)
        lab.note("before", [trainer.world_size, trainer.num_devices, trainer.num_nodes])
        trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
        lab.note("steps", trainer.estimated_stepping_batches)
        lab.note("ranks", [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.is_global_zero])
        trainer.test(model, DataLoader(data, batch_size=5), verbose=False)
        lab.note("seen", model.seen)

    return script
