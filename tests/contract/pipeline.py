"""Probe of the contract: a two-stage pipeline. Each rank trains half of ``module.net``; batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import Optimizer

from drivetrain import Declaration, Strategy, Support

PIPELINE = Declaration(
    name="probe_pipeline",
    summary="two stages",
    implementation="tests.contract.pipeline:Pipeline",
    support=Support(min_world_size=2, max_world_size=2, clipping=frozenset({"norm"}), several_optimizers=False),
)


class Pipeline(Strategy):
    def prepare(self, module: Any, stage: str) -> None:
        super().prepare(module, stage)
        self.halves = [module.net[:2], module.net[2:]]
        self.part = self.halves[self.job.rank]
        self.schedules: dict[int, ScheduleGPipe] = {}

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        optimizers = make()
        mine = {id(p) for p in self.part.parameters()}
        for group in optimizers[0].param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
        return optimizers

    def forward_backward(self, step: Any) -> torch.Tensor | None:
        step.zero_grad()
        x, y = step.batch
        pieces = max(d for d in (1, 2, 3, 4) if len(x) % d == 0)
        if len(x) not in self.schedules:  # a stage's shapes are frozen: one for each size of batch
            stage = PipelineStage(self.part, self.job.rank, 2, self.device)
            self.schedules[len(x)] = ScheduleGPipe(stage, pieces, loss_fn=self._loss, scale_grads=False)
        self.step, self.pieces = step, pieces
        if self.job.rank == 0:
            self.schedules[len(x)].step(x)
            return None
        losses: list[torch.Tensor] = []
        self.schedules[len(x)].step(target=y, losses=losses)
        return torch.stack(losses).sum().detach() / step.share

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The module's own step; its network answers with what came out of the pipeline."""
        net, self.module.net = self.module.net, nn.Identity()
        try:
            loss = self.step.call((output, target), 1 / self.pieces)
        finally:
            self.module.net = net
        assert loss is not None
        return loss * (self.step.share / self.pieces)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor:
        square = torch.stack([p.grad.pow(2).sum() for p in self.part.parameters() if p.grad is not None]).sum()
        norm = self.communicator.all_reduce(square).sqrt()
        self.scale_gradients(optimizer, torch.clamp(value / (norm + 1e-6), max=1.0))
        return norm

    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        return call(batch) if self.job.rank == 1 else None

    @contextmanager
    def consensus(self) -> Iterator[None]:
        for rank, half in enumerate(self.halves):
            for parameter in half.parameters():
                self.communicator.broadcast(parameter.data, rank)
        yield
