"""BYOL: a target network that a callback moves after each batch, with a momentum that follows the run's length."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class MLP(nn.Module):
    def __init__(self, input_dim: int, hidden_size: int, output_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_dim, hidden_size, bias=False),
            nn.BatchNorm1d(hidden_size),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_size, output_dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class SiameseArm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = MLP(4, 8, 6)
        self.predictor = MLP(6, 8, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.encoder(x)
        z = self.projector(y)
        return y, z, self.predictor(z)


def project(L: Any) -> Any:
    class BYOLMAWeightUpdate(L.Callback):
        def __init__(self, initial_tau: float = 0.9) -> None:
            super().__init__()
            self.initial_tau = initial_tau
            self.current_tau = initial_tau

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.update_weights(pl_module.online_network, pl_module.target_network)
            self.current_tau = self.update_tau(pl_module, trainer)

        def update_tau(self, pl_module: Any, trainer: Any) -> float:
            max_steps = len(trainer.train_dataloader) * trainer.max_epochs
            return 1 - (1 - self.initial_tau) * (math.cos(math.pi * pl_module.global_step / max_steps) + 1) / 2

        def update_weights(self, online_net: nn.Module, target_net: nn.Module) -> None:
            for (_name, online_p), (_, target_p) in zip(
                online_net.named_parameters(), target_net.named_parameters(), strict=True
            ):
                target_p.data = self.current_tau * target_p.data + (1 - self.current_tau) * online_p.data

        def state_dict(self) -> dict[str, Any]:
            return {"current_tau": self.current_tau}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.current_tau = state_dict["current_tau"]

    class BYOL(L.LightningModule):
        def __init__(self, learning_rate: float = 0.1, weight_decay: float = 1.5e-6, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.online_network = SiameseArm()
            self.target_network = deepcopy(self.online_network)
            self.target_network.requires_grad_(False)
            self.weight_callback = BYOLMAWeightUpdate()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.weight_callback.on_train_batch_end(self.trainer, self, outputs, batch, batch_idx)
            self.log("tau", self.weight_callback.current_tau)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _, _ = self.online_network(x)
            return y

        def cosine_similarity(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return -2 * (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(dim=-1).mean()

        def shared_step(self, batch: Any, batch_idx: int) -> Any:
            imgs, _ = batch
            img_1, img_2 = imgs + 0.1 * torch.randn_like(imgs), imgs.flip(-1)
            _, _, h1 = self.online_network(img_1)
            _, _, h2 = self.online_network(img_2)
            with torch.no_grad():
                _, z2, _ = self.target_network(img_2)
                _, z1, _ = self.target_network(img_1)
            loss_a, loss_b = self.cosine_similarity(h1, z2), self.cosine_similarity(h2, z1)
            return loss_a, loss_b, loss_a + loss_b

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss_a, loss_b, total_loss = self.shared_step(batch, batch_idx)
            self.log_dict({"1_2_loss": loss_a, "2_1_loss": loss_b, "train_loss": total_loss})
            return total_loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            _loss_a, _loss_b, total_loss = self.shared_step(batch, batch_idx)
            self.log_dict({"val_loss": total_loss})
            return total_loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(
                [p for p in self.parameters() if p.requires_grad],
                lr=self.hparams.learning_rate,
                weight_decay=self.hparams.weight_decay,
                momentum=0.9,
            )
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
            return [optimizer], [scheduler]

    def script(lab: Any) -> None:
        L.seed_everything(7, workers=True)
        images = TensorDataset(torch.randn(30, 3, 6, 6), torch.zeros(30))
        train = DataLoader(images, batch_size=8, shuffle=True, drop_last=True)
        val = DataLoader(images, batch_size=10)
        trainer = lab.trainer(max_epochs=3, callbacks=[BYOLMAWeightUpdate(0.99)], log_every_n_steps=1)
        trainer.fit(BYOL(comment="x"), train, val)

    return script
