"""configure_gradient_clipping that clips more in the first epoch; gradient norms logged before each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    from importlib import import_module

    grad_norm = import_module(f"{L.__name__}.utilities").grad_norm

    class RNNClassifier(L.LightningModule):
        def __init__(self, clip_val: float = 0.5, algorithm: str = "norm") -> None:
            super().__init__()
            self.clip_val, self.algorithm = clip_val, algorithm
            self.rnn = nn.LSTM(4, 6, batch_first=True)
            self.head = nn.Linear(6, 2)
            self.example_input_array = torch.zeros(1, 5, 4)
            self.skipped = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, _ = self.rnn(x)
            return self.head(out[:, -1])

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y) * 20
            return {"loss": loss, "accuracy": (self(x).argmax(1) == y).float().mean()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("train/accuracy", outputs["accuracy"], on_step=False, on_epoch=True)
            self.log("train/loss", outputs["loss"], on_step=True, on_epoch=True, prog_bar=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = grad_norm(self.rnn, norm_type=2)
            self.log_dict(norms)
            self.log("max_grad", max(p.grad.abs().max() for p in self.parameters() if p.grad is not None))

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            gradient_clip_val = self.clip_val / 2 if self.current_epoch == 0 else self.clip_val
            total = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            self.skipped += int(total <= gradient_clip_val)
            self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=self.algorithm)
            self.log("clipped_norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.RMSprop(self.parameters(), lr=5e-3)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                    "interval": "step",
                    "frequency": 2,
                },
            }

    def script(lab: Any) -> None:
        x = torch.randn(36, 5, 4)
        loader = DataLoader(TensorDataset(x, (x.sum((1, 2)) > 0).long()), batch_size=8)
        for algorithm in ("norm", "value"):
            model = RNNClassifier(0.5, algorithm)
            trainer = lab.trainer(max_epochs=2, log_every_n_steps=2, enable_checkpointing=False)
            trainer.fit(model, loader)
            lab.note(f"skipped {algorithm}", model.skipped)

    return script
