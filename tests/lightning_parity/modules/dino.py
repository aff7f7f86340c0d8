"""DINO: student and teacher, gradients of the last layer dropped in the first epoch, schedules by hand per step."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class MultiCrop(Dataset[Any]):
    def __init__(self, n: int, crops: int = 4) -> None:
        self.data, self.crops = torch.randn(n, 10, generator=torch.Generator().manual_seed(5)), crops

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        views = [self.data[index] + 0.1 * torch.randn(10) for _ in range(self.crops)]
        return views, index % 3, f"{index}.jpg"


def cosine_schedule(base: float, final: float, epochs: int, niter: int) -> Any:
    steps = np.arange(epochs * niter)
    return final + 0.5 * (base - final) * (1 + np.cos(np.pi * steps / len(steps)))


class DINOLoss(nn.Module):
    def __init__(self, out_dim: int, center_momentum: float = 0.9) -> None:
        super().__init__()
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))
        self.center: torch.Tensor

    def forward(self, teacher_out: list[torch.Tensor], student_out: list[torch.Tensor]) -> torch.Tensor:
        t = torch.stack([F.softmax((o - self.center) / 0.04, dim=-1) for o in teacher_out]).detach()
        s = torch.stack([F.log_softmax(o / 0.1, dim=-1) for o in student_out])
        pairs = [-(t[i] * s[j]).sum(-1).mean() for i in range(len(t)) for j in range(len(s)) if i != j]
        self.update_center(torch.cat(teacher_out))
        return torch.stack(pairs).mean()

    @torch.no_grad()
    def update_center(self, teacher_out: torch.Tensor) -> None:
        mean = teacher_out.mean(dim=0, keepdim=True)
        self.center = self.center * self.center_momentum + mean * (1 - self.center_momentum)


def project(L: Any) -> Any:
    class DINO(L.LightningModule):
        def __init__(self, freeze_last_layer: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.student_backbone = nn.Sequential(nn.Linear(10, 8), nn.GELU())
            self.student_head = nn.ModuleDict({"mlp": nn.Linear(8, 8), "last_layer": nn.Linear(8, 6, bias=False)})
            self.teacher_backbone = copy.deepcopy(self.student_backbone)
            self.teacher_head = copy.deepcopy(self.student_head)
            for module in (self.teacher_backbone, self.teacher_head):
                for p in module.parameters():
                    p.requires_grad = False
            self.criterion = DINOLoss(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            head = self.student_head
            return head["last_layer"](F.gelu(head["mlp"](self.student_backbone(x))))

        def forward_teacher(self, x: torch.Tensor) -> torch.Tensor:
            head = self.teacher_head
            return head["last_layer"](F.gelu(head["mlp"](self.teacher_backbone(x))))

        def on_train_start(self) -> None:
            niter = self.trainer.num_training_batches
            self.momentum_schedule = cosine_schedule(0.9, 1.0, self.trainer.max_epochs, niter)
            self.lr_schedule = cosine_schedule(0.05, 0.001, self.trainer.max_epochs, niter)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] = self.lr_schedule[self.trainer.global_step]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            views, _, names = batch
            teacher_out = [self.forward_teacher(view) for view in views[:2]]
            student_out = [self.forward(view) for view in views]
            loss = self.criterion(teacher_out, student_out)
            self.log("train_loss_ssl", loss, sync_dist=True, batch_size=len(views[0]))
            return {"loss": loss, "names": names}

        def on_after_backward(self) -> None:
            if self.current_epoch < self.hparams.freeze_last_layer:
                for p in self.student_head["last_layer"].parameters():
                    p.grad = None

        def on_before_zero_grad(self, *args: Any) -> None:
            step = min(self.global_step, len(self.momentum_schedule) - 1)
            m = float(self.momentum_schedule[step])
            pairs = [(self.student_backbone, self.teacher_backbone), (self.student_head, self.teacher_head)]
            with torch.no_grad():
                for student, teacher in pairs:
                    for a, b in zip(student.parameters(), teacher.parameters(), strict=True):
                        b.mul_(m).add_(a.detach(), alpha=1 - m)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05)

    def script(lab: Any) -> None:
        L.seed_everything(0)
        loader = DataLoader(MultiCrop(26), batch_size=8, shuffle=True, drop_last=True)
        trainer = lab.trainer(max_epochs=3, gradient_clip_val=0.3, log_every_n_steps=2)
        model = DINO()
        trainer.fit(model, loader)
        lab.note("schedule", [float(x) for x in model.lr_schedule])

    return script
