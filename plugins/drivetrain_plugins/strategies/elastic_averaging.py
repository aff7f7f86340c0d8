"""Elastic averaging: replicas that are drawn towards each other without being made equal. Two kinds, named apart.

``mix=weights`` is Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD" (arXiv 1412.6651), in its
synchronous form. ``mix=gradients`` steps with a mixture of this rank's own gradient and that of all ranks.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from drivetrain.launch import Job
from drivetrain_plugins.strategies.local_replicas import LocalReplicas, like


class ElasticAveraging(LocalReplicas):
    """``mix=weights``: every ``period`` steps, with *c* the centre, *x_i* the replicas and *a* the moving rate, all at
    once, ``d_i = a * (x_i - c)``, ``x_i = x_i - d_i`` and ``c = c + sum_i d_i``: the sum of the replicas and the centre
    is preserved. The centre is validated and saved.

    ``mix=gradients``: at every step each rank steps with ``a * local + (1 - a) * global``, where *local* is the
    gradient of its own part of the batch and *global* that of the batch. ``a=0`` is synchronous SGD.
    """

    _centre: dict[str, torch.Tensor] = {}

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.synchronous = self.options.mix == "gradients" and self.options.local == 0
        self.lays_out = self.options.mix == "weights"

    @property
    def moving_rate(self) -> float:
        """``0.9 / ranks`` unless given, so that the centre moves nine tenths of the way to the replicas' mean."""
        return 0.9 / self.data.size if self.options.moving_rate is None else self.options.moving_rate

    @property
    def mixes(self) -> bool:
        return self.options.mix == "weights"

    def begin(self) -> None:
        if self.options.mix == "weights":
            self._centre = like(self.trained())

    # -- mix=weights --------------------------------------------------------------------------------------------
    @torch.no_grad()
    def mix(self) -> None:
        if self.options.mix == "gradients":
            return
        parameters, rate = self.trained(), self.moving_rate
        moves = {name: (p - self._centre[name]).mul_(rate) for name, p in parameters.items()}
        for name, p in parameters.items():
            p.sub_(moves[name])
        self.averaging.sum(list(moves.values()))
        for name, move in moves.items():
            self._centre[name].add_(move)
        self.average_buffers()

    @torch.no_grad()
    def settle(self) -> None:
        """The centre with the replicas' mean buffers, or the replicas' mean."""
        if self.options.mix == "gradients":
            super().settle()
            return
        for name, p in self.trained().items():
            p.copy_(self._centre[name])
        self.average_buffers()

    def is_settled(self) -> bool:
        return super().is_settled() if self.options.mix == "gradients" else False

    def extra(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"centre": self._centre}

    # -- mix=gradients ------------------------------------------------------------------------------------------
    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        share = self.options.local
        if self.options.mix == "weights" or self.data.size == 1:
            return
        if share == 0:
            super().reduce_gradients(optimizer, manual)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        own = {id(p): None if p.grad is None else p.grad.clone() for p in parameters}
        weight = self.weight or 1.0
        self.average_gradients(optimizer)
        # Losses with weights of their own: each side is divided by its own weight.
        total = self.mean_weight()
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(1 - share if total is None else (1 - share) / total)
                local = own[id(p)]
                if local is not None:
                    p.grad.add_(local, alpha=share / weight)
        self.weight = 0.0  # the gradients are divided already

    def normalise(self, optimizer: Optimizer) -> None:
        if self.options.mix == "gradients" and not self.synchronous and self.data.size > 1:
            return  # others' gradients arrive where this rank has none
        super().normalise(optimizer)
