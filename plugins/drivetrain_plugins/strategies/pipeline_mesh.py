"""Pipelines side by side: each reads its part of every batch, and gradients are summed over equal stages.

Neighbouring ranks form a pipeline. Ranks at the same place of their pipelines hold the same stages and form a replica
group; what they sum is weighted by samples (or by the losses' own weights), so uneven parts of a batch count rightly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.declaration import Plan
from drivetrain.launch import Job
from drivetrain.module import TrainModule
from drivetrain.strategy import Shard
from drivetrain_plugins.strategies.declared.mesh import sizes
from drivetrain_plugins.strategies.pipeline import Pipeline
from drivetrain_plugins.strategies.replicas import average_buffers, reduce_gradients


class PipelineMesh(Pipeline):
    """``data`` times ``pipeline``."""

    replicas: Communicator  # the ranks at this one's place of their pipelines
    _fits = False  # whether the replicas' running statistics part

    def check_module(self, module: TrainModule, plan: Plan) -> None:
        super().check_module(module, replace(plan, world_size=sizes(self.options, plan.world_size).pipeline))

    def connect(self, job: Job) -> None:
        super().connect(job)
        world, rank = self.communicator.world_size, self.communicator.rank
        found = sizes(self.options, world)
        self.data = Shard(rank // found.pipeline, found.data, lockstep=True)
        self.lines = [range(first, first + found.pipeline) for first in range(0, world, found.pipeline)]
        for number, ranks in enumerate(self.lines):
            self.line = self.communicator.sub(ranks, f"pipeline {number}") or self.line
        for place in range(found.pipeline):
            group = self.communicator.sub(range(place, world, found.pipeline), f"replicas of stage {place}")
            if group is not None:
                self.replicas = group
        self.predicts = self.line.rank == self.line.world_size - 1
        self.alike = self.lines

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self._fits = stage == "fit"

    def align(self) -> None:
        for tensor in self.sources[self.line.rank].values():  # every pipeline begins with the first one's weights
            self.replicas.broadcast(tensor.detach())
        super().align()

    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        # Before tied weights are summed within a pipeline: sums of the same numbers in the same order stay equal bits.
        reduce_gradients(self.replicas, [p for group in optimizer.param_groups for p in group["params"]])
        super().reduce_gradients(optimizer, manual)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._fits:
            own = {name for name, _ in self.module.named_buffers()}
            average_buffers(self.replicas, [t for name, t in self.sources[self.line.rank].items() if name in own])
        with super().consensus():
            yield

    def traffic(self) -> dict[str, int]:
        """Activations and their gradients within the pipeline, and what replicas of a stage exchange."""
        within, between = super().traffic(), self.replicas.statistics
        return {
            "bytes_sent": within["bytes_sent"] + between.bytes_sent,
            "bytes_dense": within["bytes_dense"] + between.bytes_sent,
            "messages": within["messages"] + between.messages,
        }
