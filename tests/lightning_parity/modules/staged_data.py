"""A data module that minds its stages, keeps its own state in checkpoints, and serves all four calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def project(L: Any) -> Any:
    class Staged(L.LightningDataModule):
        def __init__(self, data_dir: str = "data", batch_size: int = 8, splits: tuple[int, int] = (40, 12)) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.calls: list[str] = []
            self.seen = 0
            self.batch_size_per_device = batch_size

        @property
        def num_classes(self) -> int:
            return 2

        def prepare_data(self) -> None:
            self.calls.append("prepare_data")

        def setup(self, stage: str | None = None) -> None:
            self.calls.append("setup fit" if stage == "fit" else "setup")
            if self.trainer is not None:
                if self.hparams.batch_size % self.trainer.world_size != 0:
                    raise RuntimeError("not divisible")
                self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
            x = torch.randn(64, 4, generator=torch.Generator().manual_seed(8))
            full = TensorDataset(x, (x.sum(1) > 0).long())
            self.data_train, self.data_val, self.data_test = random_split(
                full, [*self.hparams.splits, 12], generator=torch.Generator().manual_seed(42)
            )

        def train_dataloader(self) -> Any:
            return DataLoader(self.data_train, batch_size=self.batch_size_per_device, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.data_val, batch_size=self.batch_size_per_device)

        def test_dataloader(self) -> Any:
            return DataLoader(self.data_test, batch_size=5)

        def predict_dataloader(self) -> Any:
            return [DataLoader(self.data_test, batch_size=5), DataLoader(self.data_val, batch_size=6)]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            if self.trainer.training:
                self.seen += len(x)
                x = x + 0.01 * torch.randn_like(x)
            return x, y

        def teardown(self, stage: str | None = None) -> None:
            self.calls.append("teardown fit" if stage == "fit" else "teardown")

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = state_dict["seen"]

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def setup(self, stage: str) -> None:
            self.num_classes = self.trainer.datamodule.num_classes
            if stage == "fit":
                self.total = self.trainer.max_epochs

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).softmax(-1)

        def step(self, batch: Any, stage: str) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log(f"{stage}_loss", loss, batch_size=len(x))
            return loss

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.step(batch, "train")

        def validation_step(self, batch: Any) -> torch.Tensor:
            return self.step(batch, "val")

        def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.step(batch, "test")

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
            x, y = batch
            return {"probs": self(x), "target": y, "loader": dataloader_idx}

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    def script(lab: Any) -> None:
        dm, model = Staged(), Net()
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=3)
        trainer.fit(model, dm)
        trainer.validate(model, dm, verbose=False)
        trainer.test(model, datamodule=dm, verbose=False)
        trainer.predict(model, dm)
        lab.note("calls", dm.calls)
        lab.note("seen", dm.seen)
        again = Staged.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        lab.note("again", [again.seen, dict(again.hparams)])

    return script
