"""Two optimizers by hand over two ranks, where each step leaves the other network's parameters unused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class GAN(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
            self.critic = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            (real,) = batch
            opt_g, opt_c = self.optimizers()
            z = torch.ones(len(real), 2) * real[:, :1]
            self.toggle_optimizer(opt_g)
            g_loss = nn.functional.softplus(-self.critic(self.generator(z))).mean()
            opt_g.zero_grad()
            self.manual_backward(g_loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.toggle_optimizer(opt_c)
            fake = self.generator(z).detach()
            c_loss = (nn.functional.softplus(-self.critic(real)) + nn.functional.softplus(self.critic(fake))).mean()
            opt_c.zero_grad()
            self.manual_backward(c_loss)
            opt_c.step()
            self.untoggle_optimizer(opt_c)
            self.log_dict({"g": g_loss, "c": c_loss}, sync_dist=True, prog_bar=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.generator.parameters(), lr=0.01), torch.optim.Adam(
                self.critic.parameters(), lr=0.02
            )

    def script(lab: Any) -> None:
        L.seed_everything(3)
        loader = DataLoader(TensorDataset(torch.randn(32, 3)), batch_size=4, shuffle=True)
        trainer = lab.trainer(max_epochs=2, strategy="ddp_find_unused_parameters_true", log_every_n_steps=2)
        trainer.fit(GAN(), loader)

    return script
