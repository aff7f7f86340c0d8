"""A run as one file in Lightning's layout, and a run that goes on from such a file, whoever wrote it.

Under ``drivetrain.lightning`` this is what a checkpoint is. The first rank writes it whole: shards are put together,
and what belongs to each rank (random generators, compression memory) is sent to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from drivetrain.checkpoint import layout, single
from drivetrain.checkpoint.agreement import agree
from drivetrain.checkpoint.convert import from_safe, own_tensor
from drivetrain.checkpoint.directory import Loaded
from drivetrain.errors import CheckpointError
from drivetrain.loops import saved as loop_state

if TYPE_CHECKING:
    from drivetrain.checkpoint.io import CheckpointIO
    from drivetrain.comm.communicator import Communicator
    from drivetrain.trainer import Trainer


def tell(trainer: Trainer, content: dict[str, Any], callbacks: bool = True, gradients: bool = True) -> None:
    """Show ``content`` to the hooks that may change it before it is written.

    Args:
        callbacks: to those of callbacks, too.
        gradients: whether gradients were recorded where the checkpoint was asked for, and so are within the hooks.
    """
    with torch.set_grad_enabled(gradients):
        if callbacks:
            trainer.hooks.of_callbacks("on_save_checkpoint", content)
        trainer.lightning_module.on_save_checkpoint(content)


def write(
    trainer: Trainer,
    shared: dict[str, Any],
    own: dict[str, Any],
    path: Path,
    weights_only: bool,
    tell: Callable[..., None],
) -> Path:
    """Write the run as one file; every training rank calls it with its own ``shared`` and ``own``. ``tell`` shows the
    content to hooks.

    Raises:
        CheckpointError: on every rank, when the first could not write.
    """
    communicator = trainer.strategy.communicator
    first = communicator.rank == 0
    # Every rank takes part in putting shards together; only the first keeps the result.
    whole = layout.replace_tensors(
        {key: shared[key] for key in ("state_dict", "optimizer_states") if key in shared},
        lambda tensor: _whole(tensor, keep=first),
    )
    left = trainer.left_state if trainer.handed_over else None
    owns = [] if weights_only else _gathered(communicator, own) if left is None else left.owns
    if weights_only:  # Lightning keeps the counters with the weights
        if left is not None:
            whole |= {name: left.shared[name] for name in ("loops", "run")}
        elif trainer.loop is not None:
            whole |= {"loops": loop_state.state_of(trainer.loop), "run": facts(trainer)}
    content = layout.compose({**shared, **whole}, owns, trainer.strategy_name)
    tell(content, callbacks=not weights_only)
    problem = None
    if first:
        try:
            trainer.checkpoint_io.save_checkpoint(content, path)
        except CheckpointError as error:
            problem = error
    if problem is not None and communicator.world_size == 1:
        raise problem
    agree(communicator, "saving a checkpoint", None, problem)
    return path


def write_alone(
    trainer: Trainer, shared: dict[str, Any], own: dict[str, Any], path: Path, tell: Callable[..., None]
) -> Path:
    """Write what this rank has, without a word to the others."""
    content = layout.compose(shared, [layout.pack(own)], trainer.strategy_name)
    tell(content)
    trainer.checkpoint_io.save_checkpoint(content, path)
    return path


def contents(
    trainer: Trainer, shared: dict[str, Any], own: dict[str, Any], weights_only: bool, tell: Callable[..., None]
) -> dict[str, Any]:
    """What a file of this rank alone would hold; nothing is written, and nothing exchanged with other ranks."""
    if weights_only and trainer.loop is not None:
        shared = shared | {"loops": loop_state.state_of(trainer.loop), "run": facts(trainer)}
    content = layout.compose(shared, [] if weights_only else [layout.pack(own)], trainer.strategy_name)
    tell(content, callbacks=not weights_only)
    return content


def facts(trainer: Trainer) -> dict[str, Any]:
    """What Lightning's counters need to know of a run besides where it stands."""
    length, validation = trainer.num_training_batches, sum(n for n in trainer.num_val_batches if n != float("inf"))
    data = trainer.datamodule
    return {
        "automatic": trainer.lightning_module.automatic_optimization,
        "length": 0 if length == float("inf") else int(length),
        "validation": int(validation),
        "window": trainer.accumulate_grad_batches,
        "datamodule": None if data is None else type(data).__qualname__,
    }


def read(source: CheckpointIO, path: Path, rank: int, world_size: int, weights_only: bool | None = None) -> Loaded:
    """The file's dictionary as it is, for the hooks that may change it; :func:`native` says what is made of it."""
    content = _of_weights(source.load_checkpoint(path, map_location="cpu", weights_only=weights_only), path)
    ours = content.get(layout.OURS)
    meta: dict[str, Any] = {"layout": "file", "epoch": content.get("epoch"), "global_step": content.get("global_step")}
    own = first = None
    packed: list[Any] = []
    if isinstance(ours, dict) and "own" in ours:
        packed = ours["own"]
        meta["world_size"] = ours["world_size"]
        if ours["world_size"] == world_size:
            own = layout.unpack(ours["own"][rank])
        elif ours["own"]:
            first = layout.unpack(ours["own"][0])
    return Loaded(content, own, meta, first, lambda: [layout.unpack(one) for one in packed])


def outline(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """The file's dictionary with tensors on the meta device, of which nothing is read."""
    return _of_weights(single.read(path, weights_only=weights_only, map_location="meta", check=False), path)


def _of_weights(content: dict[str, Any], path: Path) -> dict[str, Any]:
    if not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path} holds no 'state_dict'; name a checkpoint that a Trainer wrote")
    return content


def native(trainer: Trainer, content: dict[str, Any]) -> dict[str, Any]:
    """What a directory checkpoint would hold of the same moment, as far as the file has it.

    Raises:
        CheckpointError: the file lacks what training goes on from, or its optimizers are other ones.
    """
    ours = content.get(layout.OURS)
    ours = ours if isinstance(ours, dict) and "parameters" in ours else {}
    shared: dict[str, Any] = {
        "state_dict": content["state_dict"],
        "precision": {"scaler": content[layout.SCALER]} if layout.SCALER in content else {},
        "lr_schedulers": content.get("lr_schedulers", []),
        "callbacks": dict(content.get("callbacks", {})),
    }
    try:
        shared["loops"] = from_safe(ours["loops"]) if ours else layout.position(content)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint does not say where training stood ({error} is missing in its loops): load the weights only"
        ) from error
    if ours:
        shared["metrics"] = from_safe(ours["metrics"])
    packed = content["optimizer_states"]
    orders = ours["parameters"] if ours else _orders(trainer)
    shared["optimizer_states"] = (
        packed
        if len(packed) != len(orders)  # the caller refuses it by their number
        else [layout.by_name(state, order) for state, order in zip(packed, orders, strict=True)]
    )
    data = trainer.datamodule
    if data is not None and type(data).__qualname__ in content:
        shared["datamodule"] = content[type(data).__qualname__]
    return shared


def _orders(trainer: Trainer) -> list[list[str]]:
    """The names of the parameters of each optimizer in the order in which the module gave them."""
    packed = trainer.strategy.state_dict(trainer.fit_loop.optimizers)["optimizers"]
    return [[name for group in state["param_groups"] for name in group["params"]] for state in packed]


def _whole(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        full: torch.Tensor = tensor.full_tensor()
        return full.detach().cpu() if keep else tensor
    return own_tensor((), tensor) if keep else tensor


def _gathered(communicator: Communicator, own: dict[str, Any]) -> list[torch.Tensor]:
    """Every rank's part, in the order of ranks."""
    mine = layout.pack(own)
    if communicator.world_size == 1:
        return [mine]
    sizes = communicator.all_gather_plain(len(mine))
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts = communicator.all_gather(padded.to(communicator.device))
    return [part[:size].cpu().clone() for size, part in zip(sizes, parts, strict=True)]
