"""Segmentation with a small U-Net: a mixed loss, metrics put together at an epoch's end, test with the best weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset[Any]):
    """Noisy images with a bright square; the mask is the square."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.image = 0.3 * torch.randn(n, 1, 8, 8, generator=g)
        self.mask = torch.zeros(n, 1, 8, 8)
        for i in range(n):
            r, c = torch.randint(0, 5, (2,), generator=g).tolist()
            self.mask[i, :, r : r + 3, c : c + 3] = 1
        self.image += self.mask

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.image[i], "mask": self.mask[i], "id": i}


class DoubleConv(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down, self.up = DoubleConv(1, 4), DoubleConv(4, 8), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge, self.out = DoubleConv(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.inc(x)
        b = self.down(F.max_pool2d(a, 2))
        return self.out(self.merge(torch.cat([a, self.up(b)], 1)))


def dice_loss(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    p = logits.sigmoid().flatten(1)
    m = mask.flatten(1)
    return (1 - (2 * (p * m).sum(1) + 1) / (p.sum(1) + m.sum(1) + 1)).mean()


def project(L: Any) -> Any:
    class SegmentationModel(L.LightningModule):
        def __init__(self, lr: float = 1e-2, T_max: int = 50) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = UNet()
            self.register_buffer("std", torch.tensor([0.5]).view(1, 1, 1, 1))
            self.training_step_outputs: list[Any] = []
            self.validation_step_outputs: list[Any] = []
            self.test_step_outputs: list[Any] = []

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.model(image / self.std)

        def shared_step(self, batch: dict[str, Any], stage: str) -> dict[str, torch.Tensor]:
            image, mask = batch["image"], batch["mask"]
            assert mask.ndim == 4 and mask.max() <= 1.0
            logits = self.forward(image)
            loss = dice_loss(logits, mask) + F.binary_cross_entropy_with_logits(logits, mask)
            pred = (logits.sigmoid() > 0.5).float()
            tp = (pred * mask).sum((1, 2, 3))
            fp, fn = (pred * (1 - mask)).sum((1, 2, 3)), ((1 - pred) * mask).sum((1, 2, 3))
            return {"loss": loss, "tp": tp, "fp": fp, "fn": fn}

        def shared_epoch_end(self, outputs: list[Any], stage: str) -> None:
            tp, fp, fn = (torch.cat([x[k] for x in outputs]) for k in ("tp", "fp", "fn"))
            per_image_iou = ((tp + 1e-7) / (tp + fp + fn + 1e-7)).mean()
            dataset_iou = tp.sum() / (tp + fp + fn).sum()
            self.log_dict({f"{stage}_per_image_iou": per_image_iou, f"{stage}_dataset_iou": dataset_iou}, prog_bar=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            info = self.shared_step(batch, "train")
            self.training_step_outputs.append({k: v.detach() for k, v in info.items()})
            return info

        def on_train_epoch_end(self) -> None:
            self.shared_epoch_end(self.training_step_outputs, "train")
            self.training_step_outputs.clear()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            info = self.shared_step(batch, "valid")
            self.validation_step_outputs.append(info)
            return info

        def on_validation_epoch_end(self) -> None:
            self.shared_epoch_end(self.validation_step_outputs, "valid")
            self.validation_step_outputs.clear()

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            info = self.shared_step(batch, "test")
            self.test_step_outputs.append(info)
            return info

        def on_test_epoch_end(self) -> None:
            self.shared_epoch_end(self.test_step_outputs, "test")
            self.test_step_outputs.clear()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.T_max, eta_min=1e-5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
            }

    def script(lab: Any) -> None:
        model = SegmentationModel(T_max=12)
        checkpoint = L.callbacks.ModelCheckpoint(
            monitor="valid_dataset_iou", mode="max", save_last=True, filename="{epoch:02d}-{valid_dataset_iou:.3f}"
        )
        trainer = lab.trainer(max_epochs=3, log_every_n_steps=1, callbacks=[checkpoint])
        loaders = [
            DataLoader(Squares(n, seed), batch_size=8, shuffle=n == 32) for n, seed in ((32, 0), (10, 1), (10, 2))
        ]
        trainer.fit(model, train_dataloaders=loaders[0], val_dataloaders=loaders[1])
        trainer.validate(model, dataloaders=loaders[1], verbose=False)
        trainer.test(model, dataloaders=loaders[2], verbose=False)
        lab.note("best", checkpoint.best_model_path.rpartition("/")[2])

    return script
