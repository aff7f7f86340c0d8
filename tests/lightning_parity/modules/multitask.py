"""Two tasks of one encoder, dictionaries as batches, losses weighed by learned uncertainties, metrics by prefix."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset[Any]):
    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, generator=g)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        x = self.x[i]
        return {
            "inputs": {"x": x},
            "targets": {"depth": x.sum(), "label": (x[0] > 0).long()},
            "meta": {"name": f"s{i}"},
        }


def project(L: Any) -> Any:
    class MultiTask(L.LightningModule):
        TASKS = ("depth", "label")

        def __init__(self, lr: float = 0.02, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.heads = nn.ModuleDict({"depth": nn.Linear(8, 1), "label": nn.Linear(8, 2)})
            self.log_vars = nn.ParameterDict({task: nn.Parameter(torch.zeros(())) for task in self.TASKS})

        @property
        def num_params(self) -> int:
            return sum(p.numel() for p in self.parameters())

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.encoder(x)
            return {task: head(h) for task, head in self.heads.items()}

        def losses(self, out: Any, targets: Any) -> dict[str, torch.Tensor]:
            return {
                "depth": nn.functional.l1_loss(out["depth"].squeeze(-1), targets["depth"]),
                "label": nn.functional.cross_entropy(out["label"], targets["label"]),
            }

        def _step(self, batch: Any, prefix: str) -> dict[str, Any]:
            out = self(batch["inputs"]["x"])
            losses = self.losses(out, batch["targets"])
            total = sum(torch.exp(-self.log_vars[t]) * loss + self.log_vars[t] for t, loss in losses.items())
            size = len(batch["meta"]["name"])
            train = prefix == "train"
            self.log_dict(
                {f"{prefix}/{t}_loss": loss for t, loss in losses.items()},
                on_step=train,
                on_epoch=not train,
                batch_size=size,
            )
            self.log(f"{prefix}/total", total, prog_bar=True, batch_size=size, on_epoch=True, on_step=False)
            self.log(f"{prefix}/worst", losses["depth"], reduce_fx="max", on_step=False, on_epoch=True, batch_size=size)
            return {"loss": total, "losses": losses, "n": size}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self._step(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self._step(batch, "val")

        def on_train_epoch_end(self) -> None:
            metrics = self.trainer.callback_metrics
            self.log("gap", metrics.get("val/total", 0.0))
            self.log_dict({f"weight/{t}": torch.exp(-v).item() for t, v in self.log_vars.items()})

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(
                [
                    {"params": [*self.encoder.parameters(), *self.heads.parameters()]},
                    {"params": self.log_vars.values(), "lr": 0.1},
                ],
                lr=self.hparams.lr,
            )
            return (
                {
                    "optimizer": optimizer,
                    "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e),
                },
            )

    def script(lab: Any) -> None:
        model = MultiTask(tasks=["depth", "label"])
        lab.note("parameters", model.num_params)
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=2, val_check_interval=0.5)
        trainer.fit(
            model, DataLoader(Scenes(42, 0), batch_size=8, shuffle=True), DataLoader(Scenes(13, 1), batch_size=8)
        )

    return script
