"""Fully sharded data parallelism on torch's FSDP2 (Zhao et al., "PyTorch FSDP", 2023; Rajbhandari et al., ZeRO, 2020).

Every parameter is cut along its first dimension among the ranks. A block's parameters are gathered right before its
forward and backward pass and let go after; gradients are reduce-scattered, so every rank steps its own part only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from drivetrain.declaration import Plan
from drivetrain.errors import ConfigurationError, TrainingError, nearest
from drivetrain.launch import Job
from drivetrain.named_optimizer import parameter_names
from drivetrain.strategy import Shard, Strategy
from drivetrain_plugins.strategies import dtensors
from drivetrain_plugins.strategies.complex_numbers import refuse_complex
from drivetrain_plugins.strategies.dtensors import parameters_of
from drivetrain_plugins.strategies.first_step import FirstStep
from drivetrain_plugins.strategies.going_along import StepWithRest
from drivetrain_plugins.strategies.lockstep import Lockstep
from drivetrain_plugins.strategies.plain import Original
from drivetrain_plugins.strategies.plain_parameters import refuse_hooks, refuse_hooks_on_parts, refuse_uncuttable
from drivetrain_plugins.strategies.replicas import average_buffers
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


def let_go(parts: Iterable[FSDPModule]) -> None:
    """Before weights change: what is still gathered, of a forward pass that no backward pass followed, would be taken
    for the new weights in the next."""
    for part in parts:
        part.reshard()


def gone_back(module: TrainModule, parts: Sequence[FSDPModule], reduced: bool, way: str) -> None:
    """A backward pass from a loss is over, in which gradients were ``reduced`` or not."""
    if isinstance(module, FSDPModule):
        module.reshard()
    if reduced:
        refuse_late_gradients(module, parts, way)


def refuse_late_gradients(module: TrainModule, parts: Iterable[FSDPModule], way: str) -> None:
    """Refuse a gradient that an optimizer would step without, and have in its next step, also where the module zeroed
    gradients in between: it came to whole weights when the ranks had brought theirs together, as where a loss has a
    gradient of a gradient in it. Call it when a backward pass that reduces gradients is over."""
    late = []
    for part in parts:
        state: Any = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # the one of earlier versions
        for one in [one for group in groups if group is not None for one in group.fsdp_params]:
            whole = getattr(one, "_unsharded_param", None)  # made when it is gathered for the first time
            if whole is not None and whole.grad is not None:
                late.append(id(one.sharded_param))
    if late:
        stepped = {id(p) for optimizer in module.trainer.optimizers for p in parameters_of(optimizer)}
        names = parameter_names(module)
        for name in [names.get(one, "a parameter") for one in late if one in stepped]:
            raise TrainingError(
                f"a gradient of {name} came when {way} had brought together those of its block: a loss"
                " with a gradient of a gradient in it (create_graph=True) needs strategy=ddp."
            )


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


class FullySharded(Strategy):
    """With one worker nothing is cut."""

    mesh: DeviceMesh | None = None
    original: Original | None = None  # of the module that is held in shards
    _passes: Lockstep | None = None
    _cut: Sequence[FSDPModule] = ()  # what gathers its weights for a pass
    _fits = False  # whether the ranks' running statistics part
    _begun = False  # whether a step of this fit was made
    _reductions = 0

    def connect(self, job: Job) -> None:
        super().connect(job)
        size = self.communicator.world_size
        self.data = Shard(self.communicator.rank, size, lockstep=size > 1)
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
        self._fits, self._begun = stage == "fit", False
        names = parameter_names
        self._first = FirstStep(self.communicator, f"strategy={self.name}", lambda _: names(module), of_all=True)
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

    def agree_on_weights(self) -> None:
        """Every rank begins with the first one's weights."""
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            self.communicator.broadcast(tensor.detach())

    # -- a step -------------------------------------------------------------------------------------------------
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
        # The weights of the other ranks' losses are not known here. All ranks ask, also one whose own weigh nothing.
        if self.mesh is not None and self.weighted:
            weight = torch.tensor(self.weight, dtype=torch.float64, device=self.communicator.device)
            self.weight = float(self.communicator.all_reduce(weight)) / self.data.size
        super().normalise(optimizer)

    def scale_gradients(self, optimizer: Optimizer, factor: float | torch.Tensor) -> None:
        dtensors.scale(parameters_of(optimizer), factor)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> torch.Tensor | None:
        return dtensors.clip(parameters_of(optimizer), value, algorithm)

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        let_go(self._cut)
        if not self.module.automatic_optimization:  # it may have gone backward by itself
            refuse_late_gradients(self.module, self._cut, f"strategy={self.name}")

        def step() -> bool:
            with dtensors.stepping(optimizer):
                return super(FullySharded, self)._step(optimizer, closure)

        return self._first.step(optimizer, step)

    # -- evaluation and state -----------------------------------------------------------------------------------
    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        # What is gathered under inference mode could not be used in training any more.
        with torch.inference_mode(False), torch.no_grad(), dtensors.computing():
            output = super().evaluation_step(call, batch)
        let_go(self._cut)  # no backward pass follows, and a hook may write to the weights
        return output

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._fits:
            average_buffers(self.communicator, self.module.buffers())
        yield

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        return dtensors.state(super().state_dict([]), self.module, optimizers, self.original)

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        dtensors.load_state(self.module, self.precision, state, optimizers, strict)

    def load_optimizer(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        dtensors.load_optimizer(self.module, optimizer, saved)

    def without_batch(self) -> None:
        if self._passes is not None:
            self._passes.without_batch()

    def own_state(self) -> dict[str, Any]:
        """What a step with a loss goes through, by which this rank goes along without one."""
        return {} if self._passes is None else self._passes.own_state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self._passes is not None:
            self._passes.load_own_state(state)

    def load_first_state(self, state: dict[str, Any]) -> None:
        self.load_own_state(state)  # all ranks go through the same

    def traffic(self) -> dict[str, int]:
        """Of the gradients' reduce-scatters; the weights that are gathered for a pass are not counted."""
        return {} if self.mesh is None else reduced(self.module, self.data.size, self._reductions)

    def finish(self) -> None:
        """The caller's module has its whole weights again."""
        if self.original is not None and self.module.trainer.return_weights:
            if self._passes is not None:
                self._passes.let_go()
            with self.consensus():
                self.original.give_back()
            self._fits = False  # the statistics are settled, and may be where the ranks' group cannot read them

    def close(self, error: BaseException | None = None) -> None:
        if self._passes is not None:
            self._passes.close()
        dtensors.accept_new_data()
        super().close(error)


def reduced(module: nn.Module, ranks: int, times: int) -> dict[str, int]:
    """What a rank sends when the gradients of a sharded ``module`` are reduce-scattered so many ``times``: to each of
    the others the part of the gradients that is theirs, block by block."""
    parts = [dtensors.local(p) for p in module.parameters() if p.requires_grad]
    sent = times * (ranks - 1) * sum(part.nbytes for part in parts)
    blocks = sum(isinstance(one, FSDPModule) for one in module.modules())
    return {"bytes_sent": sent, "bytes_dense": sent, "messages": times * (ranks - 1) * blocks}
