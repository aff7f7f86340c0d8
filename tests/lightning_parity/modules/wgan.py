"""WGAN-GP: several critic steps to one of the generator, schedulers stepped by hand, gradients summed over batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class WGANGP(L.LightningModule):
        def __init__(self, n_critic: int = 3, accumulate: int = 2, lambda_gp: float = 10.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
            self.critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

        def gradient_penalty(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
            alpha = torch.rand(real.size(0), 1, device=self.device)
            inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
            (grads,) = torch.autograd.grad(self.critic(inter).sum(), inter, create_graph=True)
            return ((grads.norm(2, dim=1) - 1) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            (real,) = batch
            opt_g, opt_c = self.optimizers(use_pl_optimizer=True)
            fake = self.generator(torch.randn(len(real), 3, device=self.device))
            with opt_c.toggle_model():
                loss = self.critic(fake.detach()).mean() - self.critic(real).mean()
                loss = loss + self.hparams.lambda_gp * self.gradient_penalty(real, fake.detach())
                opt_c.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(opt_c, gradient_clip_val=1.0, gradient_clip_algorithm="value")
                opt_c.step()
            self.log("critic_loss", loss, prog_bar=True)
            if (batch_idx + 1) % self.hparams.n_critic == 0:
                self.toggle_optimizer(opt_g)
                g_loss = -self.critic(fake).mean() / self.hparams.accumulate
                self.manual_backward(g_loss)
                self.untoggle_optimizer(opt_g)
                if (batch_idx + 1) % (self.hparams.n_critic * self.hparams.accumulate) == 0:
                    opt_g.step()
                    opt_g.zero_grad()
                self.log("g_loss", g_loss, on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            sch_g, sch_c = self.lr_schedulers()
            sch_g.step()
            if isinstance(sch_c, torch.optim.lr_scheduler.ReduceLROnPlateau):
                sch_c.step(self.trainer.callback_metrics["critic_loss"])

        def configure_optimizers(self) -> Any:
            opt_g = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.0, 0.9))
            opt_c = torch.optim.Adam(self.critic.parameters(), lr=1e-2, betas=(0.0, 0.9))
            return (
                {"optimizer": opt_g, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.5)},
                {
                    "optimizer": opt_c,
                    "lr_scheduler": {
                        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(opt_c, patience=0, factor=0.5),
                        "monitor": "critic_loss",
                    },
                },
            )

    def script(lab: Any) -> None:
        L.seed_everything(31)
        loader = DataLoader(TensorDataset(torch.randn(52, 2) + 2), batch_size=8, shuffle=True)
        trainer = lab.trainer(max_epochs=3, log_every_n_steps=3)
        trainer.fit(WGANGP(), loader)

    return script
