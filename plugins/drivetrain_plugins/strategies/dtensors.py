"""What every strategy needs that holds parameters as DTensors: state in and out, clipping over shards.

A DTensor is a tensor of which each rank holds a part and knows the rest by its placements; several meshes and plain
tensors may meet in one module.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import TrainingError
from drivetrain.named_optimizer import load_named_state, named_state
from drivetrain.precision import Precision
from drivetrain_plugins.strategies import slopes
from drivetrain_plugins.strategies.own_parts import refuse_shards, refuse_whole
from drivetrain_plugins.strategies.plain import Original


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: no copy, nothing is exchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, model: Tensor, keep: bool = False) -> Tensor:
    """``whole``, which every rank has, held as ``model`` is held; nothing is exchanged. Its kind of number becomes that
    of ``model``, unless it is to be ``keep``-t."""
    whole = whole.detach().to(device=model.device, dtype=whole.dtype if keep else model.dtype)
    if not isinstance(model, DTensor) or isinstance(whole, DTensor):
        return whole
    mesh, part = model.device_mesh, whole
    # The innermost dimension of a mesh cuts first (tensor parallelism), what is left of it is cut by the outer one.
    for dimension in reversed(range(mesh.ndim)):
        along = _cut_along(model.placements[dimension])
        if along is not None:
            part = _chunk(part, mesh.size(dimension), mesh.get_local_rank(dimension), along)
    return DTensor.from_local(
        part.contiguous(), mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def put_together(part: DTensor, ranks: Communicator) -> Tensor:
    """The whole tensor, from all ``ranks``, which are those of the mesh or of several like it, whose own groups may be
    gone."""
    mesh = part.device_mesh.mesh
    place = (mesh == ranks.rank).nonzero()[0].tolist()
    index = torch.arange(part.numel()).view(part.shape)
    counts = bool((mesh == 0).any())  # of ranks that hold the same the first one's is taken
    for dimension in reversed(range(mesh.ndim)):
        along = _cut_along(part.placements[dimension])
        if along is not None:
            index = _chunk(index, mesh.shape[dimension], place[dimension], along)
        counts = counts and (along is not None or place[dimension] == 0)
    whole = torch.zeros(part.numel(), dtype=part.dtype, device=ranks.device)
    if counts:
        whole[index.flatten().to(whole.device)] = part.to_local().flatten().to(whole.device)
    return ranks.all_reduce(whole).view(part.shape)


def without_values(part: DTensor) -> Tensor:
    """A tensor of its whole shape, which is to be loaded."""
    return torch.zeros(part.shape, dtype=part.dtype)


def _cut_along(placement: Placement) -> int | None:
    """The tensor's dimension that ``placement`` cuts, also where a second cut follows another (``_StridedShard``)."""
    dimension: int | None = getattr(placement, "dim", None)
    return dimension


def _chunk(tensor: Tensor, count: int, index: int, dimension: int) -> Tensor:
    """Part ``index`` of ``count``, of equal size but for the last ones, which may be smaller or empty."""
    chunks = tensor.chunk(count, dimension)
    return chunks[index] if index < len(chunks) else tensor.narrow(dimension, 0, 0)


def load_weights(module: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors into a module that holds shards."""
    own = module.state_dict()
    held = {name: like(value, own[name]) if _fits(value, own.get(name)) else value for name, value in weights.items()}
    module.load_state_dict(held, strict=strict)


def load_optimizer(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the named state of whole tensors into an optimizer of shards. What has its parameter's shape is held as the
    parameter is, also within dictionaries and lists of a state; the rest (step counts) as it is."""
    own = dict(module.named_parameters(remove_duplicate=False))
    if any(isinstance(parameter, DTensor) for parameter in own.values()):
        refuse_whole(optimizer, saved, (parameter.shape for parameter in own.values()))
    state = {name: _held(values, own.get(name)) for name, values in saved["state"].items()}
    load_named_state(module, optimizer, {**saved, "state": state})


def _held(value: Any, model: Tensor | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _held(one, model) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_held(one, model) for one in value)
    if model is None or not _fits(value, model):
        return value
    return like(value, model, keep=not value.is_floating_point())


def _fits(value: Any, model: Tensor | None) -> bool:
    return isinstance(value, Tensor) and isinstance(model, Tensor) and value.shape == model.shape


def state(
    rest: dict[str, Any], module: nn.Module, optimizers: Sequence[Optimizer], original: Original | None
) -> dict[str, Any]:
    """``rest`` of a strategy's state with that of ``optimizers``, also after the module has been given back."""
    names = None if original is None else original.names
    states = [named_state(module, optimizer, names) for optimizer in optimizers]
    for optimizer, named in zip(optimizers, states, strict=True):
        refuse_shards(optimizer, named)
    return {**rest, "optimizers": states}


def load_state(
    module: nn.Module, precision: Precision, state: Mapping[str, Any], optimizers: Sequence[Optimizer], strict: bool
) -> None:
    """Restore what any strategy's ``state_dict`` gave."""
    load_weights(module, state["module"], strict)
    for optimizer, saved in zip(optimizers, state.get("optimizers", []), strict=False):
        load_optimizer(module, optimizer, saved)
    if "precision" in state:
        precision.load_state_dict(state["precision"])


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """What ``optimizer`` steps, of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def scale(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient; each rank sees to its own part."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip(parameters: Iterable[nn.Parameter], bound: float, algorithm: str) -> Tensor | None:
    """Clip by the global ``"norm"``, which is returned, or each entry by ``"value"``."""
    if algorithm == "norm":
        return clip_by_norm(parameters, bound)
    clip_by_value(parameters, bound)
    return None


@contextmanager
def stepping(optimizer: Optimizer) -> Iterator[None]:
    """Around an optimizer's own step over DTensors: says so where it has operations that these do not know.

    Raises:
        TrainingError: it has; the first cause is attached.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _of_dtensor(error):
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise TrainingError(
            f"{type(optimizer).__name__} cannot step parameters of which each rank holds a part ({reason}): use an"
            " optimizer that works on each entry by itself, such as AdamW or SGD, or strategy=ddp."
        ) from error


@contextmanager
def computing() -> Iterator[None]:
    """Around a module's step: says so where it computes with the part of a parameter that a rank holds as if it were a
    whole tensor (a penalty on weights, a layer's weight in a function), which no layer has gathered for it, and where
    it asks for slopes by such a part, for which there are none.

    Raises:
        TrainingError: it does; the first cause is attached.
    """
    try:
        with slopes.watched(_is_part, "a rank holds a part of, for a step computes with the whole ones"):
            yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TrainingError(
            "a step computes with parameters beside their layers' own forward pass, where a rank holds a part of each:"
            " call the layer, let the optimizer see to a penalty on weights (weight_decay), or use strategy=ddp."
        ) from error


def _is_part(one: Any) -> bool:
    return isinstance(one, DTensor)


def _of_dtensor(error: BaseException) -> bool:
    """Whether ``error`` comes from torch's dispatch of DTensors, and not from what interrupted that: when a loader's
    process has died, the handler of the signal raises wherever this process is."""
    if str(error).startswith("DataLoader worker"):
        return False
    places = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "DTensor" in str(error) or any("torch.distributed.tensor" in place for place in places)


class _Gathers(logging.Filter):
    """Drops torch's advice on what is cut along both dimensions of a mesh (shard x tensor): it is put together by two
    gathers instead of one, for checkpoints only, and norms by two sums, where they are logged. What it warns of, other
    orders of summation, is not there: a gather sums nothing, and sums go along one dimension after the other."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(f"sequential {kind} operations" in message for kind in ("all_gather", "all_reduce"))


def quiet_gathers() -> None:
    """Install the filter in this process, once."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(one, _Gathers) for one in logger.filters):
        logger.addFilter(_Gathers())


def refuse_new_data() -> None:
    """Refuse ``parameter.data = values`` of a DTensor in this process, until :func:`accept_new_data`.

    torch gives the values to the outer tensor, which nobody reads: what is computed with is the part within, so weights
    that a hook puts there (averages, clipped ones) were lost without an error.
    """
    setattr(DTensor, "data", property(_DATA.__get__, _refuse))  # noqa: B010  # torch's stub has a plain attribute


def accept_new_data() -> None:
    """``data`` of a DTensor is torch's own again."""
    if "data" in vars(DTensor):
        delattr(DTensor, "data")


_DATA: Any = vars(torch._C.TensorBase)["data"]


def _refuse(held: DTensor, values: Tensor) -> None:
    same = values.shape == held.shape and values.device == held.device and values.dtype == held.dtype
    if same and isinstance(held, nn.Parameter):
        raise TrainingError(
            "parameter.data = ... does not reach the part of a parameter that a rank holds: write"
            " parameter.data.copy_(values), of a copy of what it held where that is to come back, or use strategy=ddp."
        )
    _DATA.__set__(held, values)


def clip_by_norm(parameters: Iterable[nn.Parameter], bound: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most ``bound``; returns the norm before.

    Each mesh's gradients are a group of their own, for DTensors of two meshes do not go through one operation.
    """
    groups: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            key = (p.grad.device_mesh, p.grad.placements) if isinstance(p.grad, DTensor) else None
            groups.setdefault(key, []).append(p.grad)
    if not groups:
        return torch.zeros(())
    squares = []
    for key, gradients in groups.items():
        square = torch.stack(torch._foreach_norm([local(g) for g in gradients])).square().sum()
        if key is not None:
            mesh, placements = key
            for dimension, placement in enumerate(placements):
                if _cut_along(placement) is not None:
                    torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    factor = torch.clamp(bound / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local(g) for gradients in groups.values() for g in gradients], factor)
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], bound: float) -> None:
    """Bring every entry of every gradient into ``[-bound, bound]``; each rank sees to its own part."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -bound)
        torch._foreach_clamp_max_(gradients, bound)
