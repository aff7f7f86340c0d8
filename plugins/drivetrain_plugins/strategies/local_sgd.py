"""Local SGD: replicas step by themselves and their weights are averaged every ``period`` steps.

``outer=average`` is Stich, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767).
``outer=nesterov`` is Douillard et al., "DiLoCo" (arXiv 2311.08105).
"""

from __future__ import annotations

import torch

from drivetrain.launch import Job
from drivetrain_plugins.strategies.local_replicas import LocalReplicas, like


class LocalSGD(LocalReplicas):
    """Averages after the steps ``period``, ``2 * period``, ...

    With ``period=1`` and ``outer=average`` gradients are averaged instead of weights. For SGD, with or without
    momentum, that is the same (its step is linear in the gradient); for adaptive optimizers and clipping it is what
    makes one local step equal to one step on the whole batch.

    ``outer=nesterov`` keeps the weights *a* of the last average and a momentum *m*. With *x* the mean of the replicas:
    ``g = a - x``, ``m = outer_momentum * m + g``, ``a = a - outer_lr * (g + outer_momentum * m)``; all go on from *a*.
    """

    _anchor: dict[str, torch.Tensor] = {}
    _momentum: dict[str, torch.Tensor] = {}

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.synchronous = self.options.period == 1 and self.options.outer == "average"
        self.lays_out = self.options.outer == "nesterov"

    def begin(self) -> None:
        if self.options.outer == "nesterov":
            self._anchor = like(self.trained())
            self._momentum = like(self.trained(), zero=True)

    @torch.no_grad()
    def mix(self) -> None:
        parameters = self.trained()
        self.averaging.mean([p.detach() for p in parameters.values()])
        self.average_buffers()
        if self.options.outer == "nesterov":
            momentum, rate = self.options.outer_momentum, self.options.outer_lr
            for name, p in parameters.items():
                anchor, velocity = self._anchor[name], self._momentum[name]
                gradient = anchor - p
                velocity.mul_(momentum).add_(gradient)
                anchor.sub_(gradient.add_(velocity, alpha=momentum), alpha=rate)
                p.copy_(anchor)
        self._equal = True

    def extra(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"anchor": self._anchor, "momentum": self._momentum}
