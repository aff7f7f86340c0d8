"""A step that looks at the module's weights beside its layers' forward pass, where other ranks may hold them."""

from __future__ import annotations

from typing import Any

import torch

from tests.runs import Classifier


class ReadsWeights(Classifier):
    """``where``: for a number that is logged in ``"training"`` or ``"validation"``; for a ``"factor"`` of the loss, or
    a part of it that comes to ``"zero"``; only for their ``"kinds"``; of a ``"layer"``; or not at all."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.where == "training":
            self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())
        if self.where == "factor":
            loss = loss * (1 + 0.01 * sum(p.data.abs().sum() for p in self.parameters()))
        if self.where == "zero":
            loss = loss + 0.0 * sum(p.sum() for p in self.parameters())
        if self.where == "kinds":
            first = next(self.parameters())
            loss = loss + (first.new_zeros(3) + torch.zeros(3).to(first)).sum() + first.numel() * 0
        if self.where == "layer":
            loss = loss * (1 + 0.01 * self.net[0].weight.detach().abs().sum())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.where == "validation":
            self.log("mean", self.net[0].weight.mean())
