"""A mesh of ranks: tensor parallelism in one dimension, replicas or shards in the other, on torch's DTensor and FSDP2.

Neighbouring ranks form a tensor group: they read the same samples and each computes with its part of every matrix.
Ranks at the same place of their groups form a replica group, among which gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from drivetrain.declaration import Plan
from drivetrain.errors import TrainingError
from drivetrain.launch import Job
from drivetrain.optimizer import is_torchs
from drivetrain.strategy import Shard, SkipStep
from drivetrain_plugins.strategies import dtensors
from drivetrain_plugins.strategies.complex_numbers import refuse_complex
from drivetrain_plugins.strategies.declared.mesh import Sizes, sizes
from drivetrain_plugins.strategies.dtensors import parameters_of
from drivetrain_plugins.strategies.fsdp import shard
from drivetrain_plugins.strategies.held_in_parts import HeldInParts, gone_back, reduced
from drivetrain_plugins.strategies.lockstep import Lockstep
from drivetrain_plugins.strategies.plain import Original
from drivetrain_plugins.strategies.plain_parameters import refuse_hooks, refuse_hooks_on_parts, refuse_uncuttable
from drivetrain_plugins.strategies.replicas import reduce_gradients
from drivetrain_plugins.strategies.tensor_plan import check_plan, cut_parameters, plan_of

if TYPE_CHECKING:
    from drivetrain.module import TrainModule


class Mesh(HeldInParts):
    """``data`` or ``shard`` times ``tensor``. Its replicas are the ranks at this one's place of their tensor groups."""

    mesh: DeviceMesh

    def sizes(self, world_size: int) -> Sizes:
        return sizes(self.options, world_size)

    def check_module(self, module: TrainModule, plan: Plan) -> None:
        if self.sizes(plan.world_size).shard > 1:
            refuse_complex(module, "strategy=mesh with shard above 1")
        if any(True for _ in module.parameters()):  # else configure_model builds it, and prepare sees it
            self._check_parameters(module, self.sizes(plan.world_size), "fit" in plan.stages)

    def _check_parameters(self, module: TrainModule, sizes: Sizes, fits: bool) -> None:
        """Refuse a plan that does not fit, and parameters that cannot be cut as they are."""
        check_plan(module, sizes.tensor)
        if sizes.shard > 1:
            refuse_uncuttable(module.named_parameters(), "strategy=mesh with shard above 1")
        if fits and sizes.shard > 1:
            refuse_hooks(module.named_parameters(), "strategy=mesh with shard above 1")
        elif fits and sizes.tensor > 1:
            refuse_hooks(cut_parameters(module), f"strategy={self.name}, which cuts its layer,")

    def connect(self, job: Job) -> None:
        super().connect(job)
        world, rank = self.communicator.world_size, self.communicator.rank
        data, sharded, tensor, _ = self.sizes(world)
        self.sharded = sharded > 1
        copies = data * sharded
        self.data = Shard(rank // tensor, copies, lockstep=True)
        # A tensor group logs and predicts the same on all its ranks: one of them speaks.
        self.counts = self.predicts = rank % tensor == 0
        inside = self.communicator.split(rank // tensor, None, "tensor")
        replicas = self.communicator.split(rank % tensor, None, "replicas")
        assert inside and replicas and inside.group and replicas.group
        self.replicas = replicas
        # Of groups of our own: those that torch would split off (init_device_mesh) end in a segmentation fault where
        # the process had joined another job's NCCL group before (PyTorch 2.11), as a second fit under torchrun does.
        ranks = torch.arange(world).reshape(copies, tensor)
        self.mesh = DeviceMesh.from_group(
            [replicas.group, inside.group], self.device.type, ranks, mesh_dim_names=("replica", "tensor")
        )

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        if any(isinstance(p, DTensor) for p in module.parameters()):
            return
        tensor = self.mesh["tensor"]
        self._check_parameters(module, self.sizes(self.communicator.world_size), self._fits)
        self.agree_on_weights()
        self.original = Original(module, None if self._fits else self.original)
        dtensors.refuse_new_data()
        if tensor.size() > 1:  # a part that is the whole would be another parameter, which layers do not share
            styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
            plan = {name: styles[style]() if style in styles else style for name, style in plan_of(module).items()}
            parallelize_module(module, tensor, plan)
        if self.sharded:
            dtensors.quiet_gathers()
            options = self.options
            compute = self.precision.compute_dtype if options.narrow_gather else None
            self._cut, training_step = shard(
                module, self.mesh["replica"], options.wrap, options.reshard_after_forward, compute
            )
        if self._fits and self.sharded:
            first = self.job.rank // tensor.size() * tensor.size()
            group = range(first, first + tensor.size())
            self._passes = Lockstep(module, self._cut, None if compute else training_step, self.job, self.device, group)
        self.original.noted()

    # -- a step -------------------------------------------------------------------------------------------------
    def forward_backward(self, step: Any) -> Tensor | None:
        if self.sharded and not self._begun:
            refuse_hooks_on_parts(self.module.named_parameters(), "strategy=mesh with shard above 1")
            self._begun = True
        every = not self.sharded or self.options.reduce_every_micro_batch
        if not every:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(step.last)
        reduces = self.sharded and (every or step.last)
        with self._passes.step() if self._passes else nullcontext(), dtensors.computing():
            loss = super().forward_backward(step)
            made = loss is not None
            if loss is None and self._passes is not None:
                found = self._passes.without_loss(reduces, step.last and self.contributed and not every)
                if found is not None:
                    made = True
                    self.contributed, self.weighted = self.contributed or found[0], self.weighted or found[1]
                gone_back(self.module, self._cut, False, f"strategy={self.name}")  # with the others, who have a loss
        self._reductions += reduces and made
        return loss

    def backward(self, loss: Tensor, share: float, sync: bool, *, weighted: bool = False, **options: Any) -> None:
        passes = self._passes
        reduces = passes is None or sync or self.options.reduce_every_micro_batch
        with passes.backward(reduces, weighted) if passes else nullcontext():
            super().backward(loss, share, sync, weighted=weighted, **options)
        gone_back(self.module, self._cut, reduces, f"strategy={self.name}")

    def _grouped(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return _uniform_groups(optimizer)

    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        """Average over the replicas, with what this one weighed and whether it had any loss."""
        if self.data.size == 1:
            return
        if self.sharded:  # FSDP did the gradients
            if self.weighted:
                self.sum_weights()
            return
        known = [self.weight, float(self.contributed)]
        head = reduce_gradients(self.replicas, parameters_of(optimizer), known, self.data.size)
        if self.weighted or not self.contributed:
            self.weight, self.contributed = float(head[0]), bool(head[1] > 0)

    def normalise(self, optimizer: Optimizer) -> None:
        if not self.contributed:
            raise SkipStep
        if self.weight:
            self.scale_gradients(optimizer, 1.0 / self.weight)

    def traffic(self) -> dict[str, int]:
        """Of the gradients; what a tensor group exchanges within a pass is not counted."""
        if self.sharded:
            return reduced(self.module, self.data.size, self._reductions)
        sent = self.replicas.statistics
        return {"bytes_sent": sent.bytes_sent, "bytes_dense": sent.bytes_sent, "messages": sent.messages}


class TensorParallel(Mesh):
    """All ranks are one tensor group."""

    def sizes(self, world_size: int) -> Sizes:
        return Sizes(data=1, shard=1, tensor=world_size, pipeline=1)


@contextmanager
def _uniform_groups(optimizer: Optimizer) -> Iterator[None]:
    """While it lasts no group holds parameters of two kinds (plain, or of two meshes), which optimizers that work on
    lists of tensors do not take; what a step changes in a group is kept.

    Raises:
        TrainingError: the step made one number of a group of parameters of one kind, and another of the other kind.
    """
    whole = optimizer.param_groups
    parts: list[list[dict[str, Any]]] = []
    for group in whole:
        kinds: dict[Any, list[nn.Parameter]] = {}
        for p in group["params"]:
            kinds.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        parts.append([{**group, "params": params} for params in kinds.values()] or [group])
    own = is_torchs(optimizer)
    for _, *others in () if own else parts:  # what a step counts in place would be counted once for each
        for one in others:
            one.update({key: value.clone() for key, value in one.items() if isinstance(value, Tensor)})
    before = [] if own else [[_marks(one) for one in group] for group in parts]
    optimizer.param_groups = [part for group in parts for part in group]
    try:
        yield
        for index, marks in enumerate(before):
            _join(type(optimizer).__name__, index, parts[index], marks)
    finally:
        for group, pieces in zip(whole, parts, strict=True):
            group.update({key: value for key, value in pieces[0].items() if key != "params"})
        optimizer.param_groups = whole


def _marks(group: dict[str, Any]) -> dict[str, Any]:
    """By which it shows that a step changed something in ``group``; a tensor's count of changes, as reading waits."""
    return {
        key: (id(value), value._version) if isinstance(value, Tensor) else repr(value)
        for key, value in group.items()
        if isinstance(value, (int, float, Tensor))
    }


def _join(kind: str, index: int, parts: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Bring into the first part of a group what the step changed in the others: it leaves alone what has no gradients.

    Raises:
        TrainingError: two parts changed the same number to something else.
    """
    first: dict[str, Any] = {}
    for part, marks in zip(parts, before, strict=True):
        for key in [key for key, mark in _marks(part).items() if marks.get(key) != mark]:
            value = part[key]
            known = first.setdefault(key, value)
            if not isinstance(value, Tensor) and repr(known) != repr(value):
                raise TrainingError(
                    f"{kind} makes one number of all parameters of a group (param_groups[{index}][{key!r}] is {known}"
                    f" for those that are cut, or not, and {value} for the others), and here these are stepped one"
                    " kind after the other: use strategy=ddp."
                )
    parts[0].update(first)
