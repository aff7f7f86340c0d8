"""Fully sharded data parallelism on torch's FSDP2 (Zhao et al., "PyTorch FSDP", 2023; Rajbhandari et al., ZeRO, 2020).

Every parameter is cut along its first dimension among the ranks. A block's parameters are gathered right before its
forward and backward pass and let go after; gradients are reduce-scattered, so every rank steps its own part only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from drivetrain.declaration import Plan
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.launch import Job
from drivetrain.strategy import Shard
from drivetrain_plugins.strategies import dtensors
from drivetrain_plugins.strategies.complex_numbers import refuse_complex
from drivetrain_plugins.strategies.going_along import StepWithRest
from drivetrain_plugins.strategies.held_in_parts import HeldInParts, gone_back, reduced
from drivetrain_plugins.strategies.lockstep import Lockstep
from drivetrain_plugins.strategies.plain import Original
from drivetrain_plugins.strategies.plain_parameters import refuse_hooks, refuse_hooks_on_parts, refuse_uncuttable
from drivetrain_plugins.strategies.sparse import refuse_sparse

if TYPE_CHECKING:
    from drivetrain.module import TrainModule

# The methods of a module that compute with its parameters: FSDP gathers what no block has before them.
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def blocks_of(module: nn.Module, wrap: str) -> list[nn.Module]:
    """The modules that are gathered one at a time, innermost first.

    Args:
        wrap: class names with commas between, or ``auto``: the classes of the items of every ``ModuleList`` and of
            every ``Sequential`` whose items have children of their own. A module that shares a parameter with one
            outside of it is left to what both are in.

    Raises:
        ConfigurationError: a class that is named is not in ``module``.
    """
    if wrap == "auto":
        classes = {
            type(item)
            for parent in module.modules()
            if isinstance(parent, nn.ModuleList | nn.Sequential)
            for item in parent
            if isinstance(parent, nn.ModuleList) or any(True for _ in item.children())
        }
    else:
        known = {type(one).__name__: type(one) for one in module.modules() if one is not module}
        classes = set()
        for name in (word.strip() for word in wrap.split(",") if word.strip()):
            if name not in known:
                raise ConfigurationError(f"strategy.wrap={name}: the module has no such class; {nearest(name, known)}")
            classes.add(known[name])
    lists = (nn.ModuleList, nn.ModuleDict)  # these are never called, so nothing would be gathered for them
    found = [one for one in module.modules() if type(one) in classes and not isinstance(one, lists)]
    users = _users(module)
    return [one for one in found[::-1] if any(True for _ in one.parameters()) and _keeps_to_itself(one, users)]


def _users(module: nn.Module) -> dict[int, set[int]]:
    """Which modules hold a parameter as their own, by identities."""
    users: dict[int, set[int]] = {}
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(one))
    return users


def _keeps_to_itself(block: nn.Module, users: dict[int, set[int]]) -> bool:
    """Whether no parameter of ``block`` is used outside of it: FSDP2 takes a tied parameter in one group only."""
    inside = {id(one) for one in block.modules()}
    return all(users[id(parameter)] <= inside for parameter in block.parameters())


def shard(
    module: TrainModule, mesh: DeviceMesh, wrap: str, reshard: bool, compute: torch.dtype | None = None
) -> tuple[list[FSDPModule], StepWithRest | None]:
    """Replace the parameters of ``module`` by their shards, in place.

    Args:
        compute: the dtype that the blocks' weights are gathered in, None for their own. Gradients are reduced, and what
            no block has is gathered, in the parameters' dtype: embeddings and norms at the ends lose nothing.

    Returns:
        The parts that gather their weights for a pass, and the module's step where it goes backward when that is over.
    """
    step = _shard(module, mesh, wrap, reshard, compute)
    return [one for one in module.modules() if isinstance(one, FSDPModule)], step


def _shard(
    module: TrainModule, mesh: DeviceMesh, wrap: str, reshard: bool, compute: torch.dtype | None
) -> StepWithRest | None:
    policy = MixedPrecisionPolicy()
    if compute is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks_of(module, wrap):
        if compute is not None and (vectors := _of_vectors(block)):
            fully_shard(vectors, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    if not module.automatic_optimization:  # backward is run within the step, so what is called there is gathered for
        for network in networks_of(module):
            if not isinstance(network, FSDPModule):
                fully_shard(network, mesh=mesh, reshard_after_forward=True)
            note_trained(network)
        return None
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # Else a gradient that is taken within a step (autograd.grad of an input) would take away what it goes on with.
    cast(FSDPModule, module).set_reshard_after_backward(False, recurse=False)
    step = None
    for name in _STEPS:
        if hasattr(module, name):
            signature = inspect.signature(getattr(type(module), name))
            if name == "training_step":
                step = StepWithRest(module, name)
                continue
            register_fsdp_forward_method(module, name)
            # Torch's wrapper is bound over a bound method, so that inspection would leave out the batch too.
            getattr(module, name).__func__.__signature__ = signature
    return step


def note_trained(network: nn.Module) -> None:
    """Let FSDP note what of ``network`` is trained, which it does when it is first called: a module whose optimizers
    take turns may have toggled the network off by then. What is called here computes nothing."""
    caller: Any = network
    caller.noting = lambda nothing: None
    register_fsdp_forward_method(caller, "noting")
    caller.noting(None)  # with an argument: on a GPU torch 2.11 moves the first one, and fails where there is none
    del caller.noting
    caller.reshard()


def _of_vectors(block: nn.Module) -> list[nn.Module]:
    """The modules in ``block`` that have vectors only, such as norms: what these do is not a product of matrices, so
    autocast leaves it in the parameters' dtype, and so must who gathers them."""
    return [
        one
        for one in block.modules()
        if (own := [*one.parameters(recurse=False)])
        and all(parameter.ndim < 2 for parameter in own)
        and not any(isinstance(inner, FSDPModule) for inner in one.modules())
        and one is not block
    ]


def networks_of(module: TrainModule) -> list[nn.Module]:
    """The children of ``module`` that have parameters, those within lists and dictionaries one by one.

    Raises:
        ConfigurationError: some parameters are in none of them alone.
    """
    found, waiting = [], [*module.children()]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, nn.ModuleList | nn.ModuleDict):
            waiting += [*one.children()]
        elif any(True for _ in one.parameters()):
            found.append(one)
    users = _users(module)
    shared = [type(one).__name__ for one in found if not _keeps_to_itself(one, users)]
    loose = [name for name, _ in module.named_parameters(recurse=False)]
    if shared or loose:
        raise ConfigurationError(
            f"{type(module).__name__} steps its optimizer itself, so strategy=fsdp gathers each of its networks when it"
            f" is called, and {' and '.join(loose or shared)} belong{'s' * (len(loose or shared) == 1)} to none of them"
            " alone: hold what shares parameters in one network, or use strategy=ddp."
        )
    return found


class FullySharded(HeldInParts):
    """With one worker nothing is cut."""

    mesh: DeviceMesh | None = None

    def connect(self, job: Job) -> None:
        super().connect(job)
        size = self.communicator.world_size
        self.data, self.replicas = Shard(self.communicator.rank, size, lockstep=size > 1), self.communicator
        if size > 1:
            self.mesh = init_device_mesh(self.device.type, (size,), mesh_dim_names=("shard",))

    def check_module(self, module: TrainModule, plan: Plan) -> None:
        if plan.world_size > 1 and "fit" in plan.stages:
            refuse_sparse(module, f"strategy={plan.strategy}")
        if plan.world_size > 1:
            refuse_complex(module, f"strategy={plan.strategy}")
        if plan.world_size > 1 and any(True for _ in module.parameters()):  # else configure_model makes them
            blocks_of(module, self.options.wrap)
            if not module.automatic_optimization:
                networks_of(module)
            self._check_parameters(module, "fit" in plan.stages)

    def _check_parameters(self, module: TrainModule, fits: bool) -> None:
        """Refuse parameters that cannot be cut as they are."""
        refuse_uncuttable(module.named_parameters(), f"strategy={self.name}")
        if fits:
            refuse_hooks(module.named_parameters(), f"strategy={self.name}")

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        if self.mesh is None or any(isinstance(one, FSDPModule) for one in module.modules()):
            return
        self._check_parameters(module, self._fits)
        self.agree_on_weights()
        self.original = Original(module, None if self._fits else self.original)
        dtensors.refuse_new_data()
        options = self.options
        compute = self.precision.compute_dtype if options.narrow_gather else None
        self._cut, training_step = shard(module, self.mesh, options.wrap, options.reshard_after_forward, compute)
        if self._fits:
            self._passes = Lockstep(module, self._cut, None if compute else training_step, self.job, self.device, ())
        self.original.noted()

    # -- a step -------------------------------------------------------------------------------------------------
    def forward(self, call: Callable[[Any], Any], batch: Any) -> Any:
        """Where a module optimises by hand all of its step is in here, backward passes of its own, too."""
        if self.mesh is None or self.module.automatic_optimization:
            return super().forward(call, batch)
        with dtensors.computing():
            return super().forward(call, batch)

    def forward_backward(self, step: Any) -> torch.Tensor | None:
        if self.mesh is not None and not self._begun:
            refuse_hooks_on_parts(self.module.named_parameters(), f"strategy={self.name}")
            self._begun = True
        if self.mesh is not None and not self.options.reduce_every_micro_batch:
            assert isinstance(self.module, FSDPModule)
            self.module.set_requires_gradient_sync(step.last)
        if self._passes is None:
            with dtensors.computing():
                return super().forward_backward(step)
        with self._passes.step(), dtensors.computing():
            loss = super().forward_backward(step)
            if loss is None:
                self._without_loss(self._passes, step)
                gone_back(self.module, self._cut, False, f"strategy={self.name}")  # with the others, who have a loss
        return loss

    def _without_loss(self, passes: Lockstep, step: Any) -> None:
        """This rank's ``training_step`` returned None: it brings zeros to what the others have."""
        every = self.options.reduce_every_micro_batch
        found = passes.without_loss(step.last or every, step.last and self.contributed and not every)
        if found is not None:
            self.contributed, self.weighted = self.contributed or found[0], self.weighted or found[1]
            self._reductions += step.last or every

    def backward(self, loss: torch.Tensor, share: float, sync: bool, *, weighted: bool = False, **options: Any) -> None:
        reduces = sync or self.options.reduce_every_micro_batch
        with self._passes.backward(reduces, weighted) if self._passes else nullcontext():
            super().backward(loss, share, sync, weighted=weighted, **options)
        gone_back(self.module, self._cut, reduces, f"strategy={self.name}")
        self._reductions += reduces

    def normalise(self, optimizer: Optimizer) -> None:
        if self.mesh is not None and self.weighted:
            self.sum_weights()
        super().normalise(optimizer)

    def traffic(self) -> dict[str, int]:
        """Of the gradients' reduce-scatters; the weights that are gathered for a pass are not counted."""
        return {} if self.mesh is None else reduced(self.module, self.data.size, self._reductions)
