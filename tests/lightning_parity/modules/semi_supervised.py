"""FixMatch: labelled and unlabelled loaders at once as a CombinedLoader, pseudo-labels above a threshold."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    CombinedLoader = import_module(f"{L.__name__}.utilities").CombinedLoader

    class FixMatch(L.LightningModule):
        def __init__(self, threshold: float = 0.4, mu: float = 0.5, mode: str = "max_size_cycle") -> None:
            super().__init__()
            self.save_hyperparameters()
            g = torch.Generator().manual_seed(0)
            x = torch.randn(80, 4, generator=g)
            self.x, self.y = x, (x[:, 0] * 2).long().clamp(-1, 1) + 1
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            self.sizes: list[Any] = []

        def train_dataloader(self) -> Any:
            labelled = DataLoader(TensorDataset(self.x[:20], self.y[:20]), batch_size=5, shuffle=True)
            unlabelled = DataLoader(TensorDataset(self.x[20:66]), batch_size=7, shuffle=True)
            return CombinedLoader({"labelled": labelled, "unlabelled": unlabelled}, self.hparams.mode)

        def val_dataloader(self) -> Any:
            parts = (self.x[66:74], self.y[66:74]), (self.x[74:], self.y[74:])
            return CombinedLoader([DataLoader(TensorDataset(*part), batch_size=4) for part in parts], "sequential")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch["labelled"]
            (u,) = batch["unlabelled"]
            self.sizes.append((len(x), len(u)))
            supervised = F.cross_entropy(self.net(x), y)
            with torch.no_grad():
                probs = self.net(u).softmax(-1)
                confidence, pseudo = probs.max(-1)
            mask = (confidence > self.hparams.threshold).float()
            strong = u + 0.1 * torch.randn_like(u)
            unsupervised = (F.cross_entropy(self.net(strong), pseudo, reduction="none") * mask).mean()
            loss = supervised + self.hparams.mu * unsupervised
            self.log_dict({"loss": loss, "mask": mask.mean(), "supervised": supervised}, batch_size=len(x))
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            self.log("val/acc", (self.net(x).argmax(-1) == y).float().mean(), prog_bar=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def script(lab: Any) -> None:
        for mode in ("max_size_cycle", "min_size"):
            model = FixMatch(mode=mode)
            trainer = lab.trainer(max_epochs=2, log_every_n_steps=3, enable_checkpointing=False)
            trainer.fit(model)
            lab.note(f"sizes {mode}", model.sizes)

    return script
