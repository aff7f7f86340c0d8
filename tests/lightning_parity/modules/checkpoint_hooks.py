"""State in on_save_checkpoint and on_load_checkpoint, keys mended on load, and training resumed from the last file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIFFERENCES = {
    "1.0.fit.counted.on_fit_start": "the counters of a resumed run are there when its first hook is called",
}


def project(L: Any) -> Any:
    class ExponentialMovingAverage:
        def __init__(self, model: nn.Module, decay: float) -> None:
            self.decay = decay
            self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

        def update(self, model: nn.Module) -> None:
            for n, p in model.named_parameters():
                self.shadow[n].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    class History(L.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.losses.append(float(trainer.callback_metrics["loss_epoch"]))

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["history"] = list(self.losses)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self.losses = list(checkpoint["history"])

    class Model(L.LightningModule):
        def __init__(self, ema_decay: float = 0.9) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
            self.vocabulary: dict[str, int] = {}
            self.ema = ExponentialMovingAverage(self.net, ema_decay)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.ema.update(self.net)
            self.vocabulary[f"w{self.global_step}"] = self.global_step

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["ema"] = self.ema.shadow
            checkpoint["vocabulary"] = self.vocabulary
            checkpoint["state_dict"] = {f"model.{k}": v for k, v in checkpoint["state_dict"].items()}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.ema.shadow = checkpoint["ema"]
            self.vocabulary = checkpoint["vocabulary"]
            checkpoint["state_dict"] = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def script(lab: Any) -> None:
        x = torch.randn(24, 4)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)
        checkpoint = L.callbacks.ModelCheckpoint(save_last=True, save_top_k=0)
        trainer = lab.trainer(max_epochs=2, callbacks=[History(), checkpoint], log_every_n_steps=2)
        trainer.fit(Model(), loader)
        history = History()
        model = Model()
        again = lab.trainer(
            max_epochs=4, callbacks=[history, L.callbacks.ModelCheckpoint(save_last=True)], log_every_n_steps=2
        )
        again.fit(model, loader, ckpt_path=checkpoint.last_model_path)
        lab.note("history", history.losses)
        lab.note("vocabulary", model.vocabulary)
        lab.note("ema", model.ema.shadow)
        loaded = Model.load_from_checkpoint(again.checkpoint_callback.best_model_path)
        lab.note("loaded", [loaded.vocabulary, dict(loaded.state_dict())])
        by_hand = lab.folder / "by_hand.ckpt"
        again.save_checkpoint(by_hand, weights_only=True)

    return script
