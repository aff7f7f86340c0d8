"""The Trainer's flags for a first look: one batch, few batches, overfitting, parts of loaders, fewest epochs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)
            self.seen: list[Any] = []

        def step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            self.seen.append(float(x.sum()))
            return nn.functional.cross_entropy(self.net(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.step(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.step(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.step(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "frequency": 2}]

    def script(lab: Any) -> None:
        x = torch.randn(40, 4)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        train, val = DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=10)
        cases: dict[str, dict[str, Any]] = {
            "fast": {"fast_dev_run": True, "max_epochs": 5},
            "fast three": {"fast_dev_run": 3},
            "overfit": {"overfit_batches": 2, "max_epochs": 3},
            "overfit part": {"overfit_batches": 0.25, "max_epochs": 2},
            "parts": {
                "limit_train_batches": 0.5,
                "limit_val_batches": 0.5,
                "max_epochs": 3,
                "check_val_every_n_epoch": 2,
            },
            "none": {"limit_val_batches": 0, "max_epochs": 1},
            "steps": {"max_steps": 5, "min_epochs": 1},
            "sanity": {"num_sanity_val_steps": -1, "max_epochs": 1, "val_check_interval": 3},
            "deterministic": {"deterministic": True, "max_epochs": 1, "detect_anomaly": True},
            "barebones": {"barebones": True, "max_epochs": 1, "logger": False},
        }
        for name, options in cases.items():
            if name == "barebones":
                continue
            model = Net()
            trainer = lab.trainer(log_every_n_steps=1, enable_checkpointing=False, **options)
            trainer.fit(model, train, val)
            if name in ("fast", "parts"):
                trainer.test(model, val, verbose=False)
            lab.note(f"seen {name}", model.seen)

    return script
