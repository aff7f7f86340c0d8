"""A student learns from a frozen teacher that is left out of checkpoints and loaded without strictness."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

DIFFERENCES = {
    "2.0.fit.counted.on_fit_start": "the counters of a resumed run are there when its first hook is called",
}


def project(L: Any) -> Any:
    class Teacher(L.LightningModule):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02)

    class Student(L.LightningModule):
        strict_loading = False

        def __init__(self, teacher_path: str, temperature: float = 2.0, alpha: float = 0.5) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="teacher_path")
            self.teacher = Teacher.load_from_checkpoint(teacher_path)
            self.teacher.freeze()
            self.net = nn.Linear(5, 3)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            assert not any(p.requires_grad for p in self.teacher.parameters())
            t = self.hparams.temperature
            with torch.no_grad():
                soft = F.softmax(self.teacher(x) / t, dim=-1)
            logits = self.net(x)
            kd = F.kl_div(F.log_softmax(logits / t, dim=-1), soft, reduction="batchmean") * t * t
            loss = self.hparams.alpha * kd + (1 - self.hparams.alpha) * F.cross_entropy(logits, y)
            self.log_dict({"kd": kd, "loss": loss, "teacher_trains": float(self.teacher.training)}, prog_bar=True)
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            kept = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("teacher.")}
            checkpoint["state_dict"] = kept

        def configure_optimizers(self) -> Any:
            trainable = [p for p in self.parameters() if p.requires_grad]
            return {"optimizer": torch.optim.SGD(trainable, lr=0.1, momentum=0.9)}

    def script(lab: Any) -> None:
        x = torch.randn(40, 5)
        loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)
        first = lab.trainer(max_epochs=2, logger=False, default_root_dir=str(lab.folder / "teacher"))
        first.fit(Teacher(), loader)
        path = first.checkpoint_callback.best_model_path
        student = Student(path)
        second = lab.trainer(max_epochs=2, log_every_n_steps=2)
        second.fit(student, loader)
        third = lab.trainer(max_epochs=3, log_every_n_steps=2)
        third.fit(Student(path), loader, ckpt_path=second.checkpoint_callback.best_model_path)
        again = Student.load_from_checkpoint(second.checkpoint_callback.best_model_path, teacher_path=path)
        lab.note("again", dict(again.state_dict()))

    return script
