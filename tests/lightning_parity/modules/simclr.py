"""SimCLR, then a linear probe on the frozen encoder of its best checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


class ContrastiveTransformations:
    def __init__(self, n_views: int = 2) -> None:
        self.n_views = n_views

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x * (1 + 0.1 * torch.randn(1)) + 0.1 * torch.randn_like(x) for _ in range(self.n_views)]


class Images(Dataset[Any]):
    def __init__(self, n: int, transform: Any) -> None:
        g = torch.Generator().manual_seed(3)
        self.y = torch.randint(3, (n,), generator=g)
        self.x = torch.randn(n, 3, 5, 5, generator=g) + self.y.view(-1, 1, 1, 1)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.x[i]), self.y[i]


def project(L: Any) -> Any:
    class SimCLR(L.LightningModule):
        def __init__(
            self, hidden_dim: int, lr: float, temperature: float, weight_decay: float, max_epochs: int = 500
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            assert self.hparams.temperature > 0.0, "The temperature must be a positive float!"
            self.convnet = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )
            self.head = nn.Sequential(
                nn.Linear(4, 4 * hidden_dim), nn.ReLU(inplace=True), nn.Linear(4 * hidden_dim, hidden_dim)
            )

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
            lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=self.hparams.max_epochs, eta_min=self.hparams.lr / 50
            )
            return [optimizer], [lr_scheduler]

        def info_nce_loss(self, batch: Any, mode: str = "train") -> torch.Tensor:
            imgs, _ = batch
            imgs = torch.cat(imgs, dim=0)
            feats = self.head(self.convnet(imgs))
            cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
            self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
            cos_sim.masked_fill_(self_mask, -9e15)
            pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
            cos_sim = cos_sim / self.hparams.temperature
            nll = (-cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)).mean()
            self.log(mode + "_loss", nll)
            comb_sim = torch.cat([cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)], dim=-1)
            sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
            self.log(mode + "_acc_top1", (sim_argsort == 0).float().mean())
            self.log(mode + "_acc_mean_pos", 1 + sim_argsort.float().mean())
            return nll

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.info_nce_loss(batch, mode="train")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.info_nce_loss(batch, mode="val")

    class LogisticRegression(L.LightningModule):
        def __init__(self, feature_dim: int, num_classes: int, lr: float, max_epochs: int = 100) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = nn.Linear(feature_dim, num_classes)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            milestones = [int(self.hparams.max_epochs * 0.6), int(self.hparams.max_epochs * 0.8)]
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=milestones, gamma=0.1)]

        def _calculate_loss(self, batch: Any, mode: str = "train") -> torch.Tensor:
            feats, labels = batch
            preds = self.model(feats)
            loss = F.cross_entropy(preds, labels)
            self.log(mode + "_loss", loss)
            self.log(mode + "_acc", (preds.argmax(dim=-1) == labels).float().mean())
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._calculate_loss(batch, mode="train")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self._calculate_loss(batch, mode="val")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self._calculate_loss(batch, mode="test")

    def script(lab: Any) -> None:
        L.seed_everything(42)
        callbacks = [
            L.callbacks.ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc_top1"),
            L.callbacks.LearningRateMonitor("epoch"),
        ]
        trainer = lab.trainer(max_epochs=2, callbacks=callbacks, log_every_n_steps=3)
        data = Images(32, ContrastiveTransformations())
        train = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
        model = SimCLR(max_epochs=2, hidden_dim=4, lr=5e-3, temperature=0.07, weight_decay=1e-4)
        trainer.fit(model, train, DataLoader(data, batch_size=8))
        model = SimCLR.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        model.eval()
        model.freeze()
        lab.note("loaded", {**model.state_dict()})
        plain = Images(32, lambda x: x)
        with torch.no_grad():
            features = TensorDataset(model.convnet(plain.x), plain.y)
        L.seed_everything(42)
        probe = lab.trainer(
            max_epochs=4, check_val_every_n_epoch=2, log_every_n_steps=3, default_root_dir=str(lab.folder / "probe")
        )
        head = LogisticRegression(feature_dim=4, num_classes=3, lr=1e-2, max_epochs=4)
        probe.fit(head, DataLoader(features, batch_size=8, shuffle=True), DataLoader(features, batch_size=8))
        head = LogisticRegression.load_from_checkpoint(probe.checkpoint_callback.best_model_path)
        probe.test(head, DataLoader(features, batch_size=8), verbose=False)

    return script
