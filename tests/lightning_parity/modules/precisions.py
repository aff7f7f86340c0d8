"""Formats: mixed bfloat16, double, and modules and data whose format is their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
            self.kinds: set[str] = set()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            out = self.net(x).squeeze(-1)
            self.kinds |= {
                str(out.dtype),
                str(x.dtype),
                str(y.dtype),
                str(self.scale.dtype),
                str(self.dtype),
                str(torch.zeros(1).dtype),
            }
            loss = nn.functional.mse_loss(out.float() * self.scale, y)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss.to(self.dtype)

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    def script(lab: Any) -> None:
        x = torch.randn(24, 4)
        loader = DataLoader(TensorDataset(x, x.double().sum(1)), batch_size=8)
        for precision in ("32-true", "bf16-mixed", "64-true", 64, "bf16"):
            model = Net()
            trainer = lab.trainer(
                max_epochs=2,
                precision=precision,
                log_every_n_steps=1,
                gradient_clip_val=0.5,
                enable_checkpointing=False,
            )
            trainer.fit(model, loader)
            trainer.predict(model, loader)
            lab.note(f"kinds {precision}", sorted(model.kinds))
            lab.note(f"name {precision}", trainer.precision)
            lab.note(f"after {precision}", sorted({str(p.dtype) for p in model.parameters()}))

    return script
