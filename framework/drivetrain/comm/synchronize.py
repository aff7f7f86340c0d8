"""Making ranks equal: tensors, or a whole module, of one rank overwrite those of the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.world import world_communicator

_CHUNK = 2**26  # elements of a message at most, unless one tensor has more


def synchronize_model(module: nn.Module, communicator: Communicator | None = None, source: int = 0) -> None:
    """Overwrite parameters and buffers of ``module`` on every rank with those of ``source``, in place.

    All ranks call it; tensors stay where they are, so optimizers and views keep their hold on them. Tensors travel
    together, one message for each dtype and 2^26 elements.

    Args:
        module: a module of the same structure on all ranks, on any device.
        communicator: the ranks; those of torch's default process group by default, and nothing happens without one.
        source: the rank of ``communicator`` whose values count.

    Raises:
        CommunicationError: ``source`` is no rank, or the modules differ in names, shapes or dtypes; on every rank.
    """
    ranks = world_communicator() if communicator is None else communicator
    if not 0 <= source < ranks.world_size:
        raise CommunicationError(
            f"source={source} is no rank of group {ranks.label!r}: use one from 0 to {ranks.world_size - 1}."
        )
    if ranks.world_size == 1:
        return
    # Names of parameters and buffers are distinct; a tensor that has two names is sent once.
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mine = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in sorted(tensors.items())]
    described = ranks.all_gather_plain(mine)
    for rank, theirs in enumerate(described):
        if theirs != described[source]:
            differing = [a[0] for a in theirs if a not in described[source]]
            differing += [b[0] for b in described[source] if b not in theirs and b[0] not in differing]
            raise CommunicationError(
                f"the module on rank {rank} differs from that on rank {source} in {', '.join(sorted(differing)[:3])}: "
                "build the same module on every rank before it is synchronised."
            )
    broadcast_tensors(ranks, tensors, source)


def broadcast_tensors(communicator: Communicator, tensors: Mapping[str, Tensor], source: int) -> None:
    """Overwrite ``tensors``, of the same names, shapes and dtypes on all ranks, with those of ``source``."""
    for group in _groups(tensors):
        flat = torch.empty(sum(t.numel() for t in group), dtype=group[0].dtype, device=communicator.device)
        if communicator.rank == source:
            torch.cat([t.detach().reshape(-1).to(flat.device) for t in group], out=flat)
        communicator.broadcast(flat, source)
        if communicator.rank != source:
            offset = 0
            with torch.no_grad():
                for tensor in group:
                    tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
                    offset += tensor.numel()


def _groups(tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype, in the order of their names, in portions."""
    portions: dict[torch.dtype, list[list[Tensor]]] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.numel() == 0:
            continue
        known = portions.setdefault(tensor.dtype, [[]])
        if known[-1] and sum(t.numel() for t in known[-1]) + tensor.numel() > _CHUNK:
            known.append([])
        known[-1].append(tensor)
    return [group for dtype in sorted(portions, key=str) for group in portions[dtype] if group]
