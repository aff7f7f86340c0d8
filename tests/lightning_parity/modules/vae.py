"""A variational autoencoder that logs dictionaries and keeps its step in one helper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def project(L: Any) -> Any:
    class VAE(L.LightningModule):
        def __init__(
            self,
            input_dim: int = 12,
            enc_out_dim: int = 8,
            kl_coeff: float = 0.1,
            latent_dim: int = 3,
            lr: float = 1e-2,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.lr = lr
            self.kl_coeff = kl_coeff
            self.encoder = nn.Sequential(nn.Linear(input_dim, enc_out_dim), nn.ReLU())
            self.decoder = nn.Sequential(
                nn.Linear(latent_dim, enc_out_dim), nn.ReLU(), nn.Linear(enc_out_dim, input_dim)
            )
            self.fc_mu = nn.Linear(enc_out_dim, latent_dim)
            self.fc_var = nn.Linear(enc_out_dim, latent_dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x)
            _, _, z = self.sample(self.fc_mu(x), self.fc_var(x))
            return self.decoder(z)

        def _run_step(self, x: torch.Tensor) -> Any:
            x = self.encoder(x)
            p, q, z = self.sample(self.fc_mu(x), self.fc_var(x))
            return z, self.decoder(z), p, q

        def sample(self, mu: torch.Tensor, log_var: torch.Tensor) -> Any:
            std = torch.exp(log_var / 2)
            p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(std))
            q = torch.distributions.Normal(mu, std)
            return p, q, q.rsample()

        def step(self, batch: Any, batch_idx: int) -> Any:
            (x,) = batch
            _z, x_hat, p, q = self._run_step(x)
            recon_loss = F.mse_loss(x_hat, x, reduction="mean")
            kl = torch.distributions.kl_divergence(q, p).mean() * self.kl_coeff
            loss = kl + recon_loss
            return loss, {"recon_loss": recon_loss, "kl": kl, "loss": loss}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss, logs = self.step(batch, batch_idx)
            self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            loss, logs = self.step(batch, batch_idx)
            self.log_dict({f"val_{k}": v for k, v in logs.items()})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    def script(lab: Any) -> None:
        L.seed_everything(1234)
        train, val = random_split(TensorDataset(torch.randn(50, 12)), [36, 14])
        model = VAE()
        trainer = lab.trainer(max_epochs=3, log_every_n_steps=2)
        trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=8))
        lab.note("reconstruction", model(torch.ones(2, 12)))

    return script
