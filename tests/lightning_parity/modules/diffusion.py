"""A small denoising diffusion model: schedule in buffers, an EMA scope in validation, samples at an epoch's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitEma(nn.Module):
    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        super().__init__()
        self.m_name2s_name: dict[str, str] = {}
        self.register_buffer("decay", torch.tensor(decay))
        self.register_buffer("num_updates", torch.tensor(0, dtype=torch.int))
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.m_name2s_name[name] = name.replace(".", "")
                self.register_buffer(self.m_name2s_name[name], p.clone().detach().data)
        self.collected_params: list[torch.Tensor] = []

    def forward(self, model: nn.Module) -> None:
        self.num_updates += 1
        decay = min(float(self.decay), (1 + float(self.num_updates)) / (10 + float(self.num_updates)))
        with torch.no_grad():
            shadow = dict(self.named_buffers())
            for name, p in model.named_parameters():
                target = shadow[self.m_name2s_name[name]]
                target.sub_((1 - decay) * (target - p))

    def copy_to(self, model: nn.Module) -> None:
        shadow = dict(self.named_buffers())
        for name, p in model.named_parameters():
            p.data.copy_(shadow[self.m_name2s_name[name]].data)

    def store(self, parameters: Any) -> None:
        self.collected_params = [p.clone() for p in parameters]

    def restore(self, parameters: Any) -> None:
        for c, p in zip(self.collected_params, parameters, strict=True):
            p.data.copy_(c.data)


def project(L: Any) -> Any:
    class DDPM(L.LightningModule):
        def __init__(
            self, timesteps: int = 20, use_ema: bool = True, learning_rate: float = 1e-2, log_every_t: int = 5
        ) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))
            self.use_ema = use_ema
            if self.use_ema:
                self.model_ema = LitEma(self.model)
            self.learning_rate, self.num_timesteps = learning_rate, timesteps
            betas = torch.linspace(1e-2, 0.3, timesteps)
            self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0))
            self.logvar = nn.Parameter(torch.zeros(timesteps), requires_grad=False)
            self.samples: list[float] = []

        @contextmanager
        def ema_scope(self) -> Iterator[None]:
            if self.use_ema:
                self.model_ema.store(self.model.parameters())
                self.model_ema.copy_to(self.model)
            try:
                yield None
            finally:
                if self.use_ema:
                    self.model_ema.restore(self.model.parameters())

        def p_losses(self, x: torch.Tensor, t: torch.Tensor) -> Any:
            noise = torch.randn_like(x)
            a = self.alphas_cumprod[t][:, None]
            x_noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            out = self.model(torch.cat([x_noisy, t[:, None] / self.num_timesteps], 1))
            loss = (out - noise).pow(2).mean(1)
            prefix = "train" if self.training else "val"
            loss_dict = {
                f"{prefix}/loss_simple": loss.mean(),
                f"{prefix}/loss_vlb": (loss / torch.exp(self.logvar[t])).mean(),
            }
            total = loss.mean()
            loss_dict[f"{prefix}/loss"] = total
            return total, loss_dict

        def shared_step(self, batch: Any) -> Any:
            (x,) = batch
            return self.p_losses(x, torch.randint(0, self.num_timesteps, (x.shape[0],), device=self.device).long())

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss, loss_dict = self.shared_step(batch)
            self.log_dict(loss_dict, prog_bar=True, logger=True, on_step=True, on_epoch=True)
            self.log("global_step", float(self.global_step), prog_bar=True, logger=True, on_step=True, on_epoch=False)
            self.log(
                "lr_abs",
                self.optimizers().param_groups[0]["lr"],
                prog_bar=True,
                logger=True,
                on_step=True,
                on_epoch=False,
            )
            return loss

        @torch.no_grad()
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            _, loss_dict_no_ema = self.shared_step(batch)
            with self.ema_scope():
                _, loss_dict_ema = self.shared_step(batch)
                loss_dict_ema = {key + "_ema": value for key, value in loss_dict_ema.items()}
            self.log_dict(loss_dict_no_ema, prog_bar=False, logger=True, on_step=False, on_epoch=True)
            self.log_dict(loss_dict_ema, prog_bar=False, logger=True, on_step=False, on_epoch=True)

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            if self.use_ema:
                self.model_ema(self.model)

        def configure_optimizers(self) -> Any:
            params = [*self.model.parameters(), self.logvar]
            opt = torch.optim.AdamW(params, lr=self.learning_rate)
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, lr_lambda=lambda n: min(1.0, (n + 1) / 5))
            return [opt], [{"scheduler": schedule, "interval": "step", "frequency": 1}]

        @torch.no_grad()
        def on_train_epoch_end(self) -> None:
            with self.ema_scope():
                x = torch.randn(4, 2, device=self.device)
                for i in reversed(range(self.num_timesteps)):
                    t = torch.full((4, 1), i / self.num_timesteps, device=self.device)
                    x = x - 0.1 * self.model(torch.cat([x, t], 1))
            self.samples.append(float(x.mean()))

    def script(lab: Any) -> None:
        L.seed_everything(23)
        x = torch.randn(40, 2) * 0.2 + 1
        model = DDPM()
        checkpoint = L.callbacks.ModelCheckpoint(
            monitor="val/loss_simple_ema", save_top_k=1, filename="{epoch:06}", verbose=False
        )
        trainer = lab.trainer(max_epochs=3, callbacks=[checkpoint], log_every_n_steps=2, limit_val_batches=2)
        trainer.fit(
            model, DataLoader(TensorDataset(x), batch_size=8, shuffle=True), DataLoader(TensorDataset(x), batch_size=8)
        )
        lab.note("samples", model.samples)

    return script
