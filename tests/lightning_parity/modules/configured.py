"""A module that brings its own callbacks and builds its layers in configure_model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Counter(L.Callback):
        def __init__(self, what: str) -> None:
            self.what, self.batches, self.epochs = what, 0, 0

        @property
        def state_key(self) -> str:
            return f"Counter[what={self.what}]"

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            self.batches += 1

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.epochs += 1
            pl_module.log(f"counter/{self.what}", float(self.batches))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.batches, self.epochs = state_dict["batches"], state_dict["epochs"]

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches, "epochs": self.epochs}

    class Big(L.LightningModule):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net: nn.Module | None = None

        def configure_model(self) -> None:
            if self.net is not None:
                return
            self.net = nn.Sequential(nn.Linear(3, self.hparams.width), nn.ReLU(), nn.Linear(self.hparams.width, 1))

        def configure_callbacks(self) -> Any:
            early = L.callbacks.EarlyStopping(monitor="val_loss", mode="min", patience=1, min_delta=1.0)
            checkpoint = L.callbacks.ModelCheckpoint(monitor="val_loss", filename="own-{epoch}")
            return [early, checkpoint, Counter("module")]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def script(lab: Any) -> None:
        x = torch.randn(30, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10)
        model = Big()
        mine = [L.callbacks.EarlyStopping(monitor="other", patience=9), Counter("trainer")]
        trainer = lab.trainer(max_epochs=6, callbacks=mine, log_every_n_steps=1)
        trainer.fit(model, loader, loader)
        lab.note("callbacks", [type(c).__name__ for c in trainer.callbacks])
        lab.note("monitors", [trainer.early_stopping_callback.monitor, len(trainer.early_stopping_callbacks)])
        lab.note("checkpoints", [trainer.checkpoint_callback.monitor, len(trainer.checkpoint_callbacks)])
        loaded = Big.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        lab.note("loaded", dict(loaded.state_dict()))

    return script
