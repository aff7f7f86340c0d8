"""What ranks do that hold the same parameters, whole or the same part of them, and saw other samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from drivetrain.comm.communicator import Communicator
from drivetrain_plugins.strategies.averaging import has_mean
from drivetrain_plugins.strategies.dtensors import local


def reduce_gradients(
    replicas: Communicator, parameters: Iterable[nn.Parameter], known: Sequence[float] = (), divisor: float = 1.0
) -> Tensor:
    """Replace the gradients by their sum over ``replicas`` over ``divisor``, in one message per dtype.

    Ahead of the gradients goes which of them there are, so that a replica which lacks some, or all, need not ask; only
    such a one waits to read it. What no replica has stays None.

    Returns:
        ``known`` reduced in the same way, on the gradients' device.
    """
    trained = [p for p in parameters if p.requires_grad]
    absent = [p for p in trained if p.grad is None]
    present = [float(p.grad is not None) for p in trained]
    for p in absent:
        p.grad = torch.zeros_like(p)
    gradients = [local(p.grad) for p in trained if p.grad is not None]
    exact = torch.float64 if any(g.dtype.to_real() == torch.float64 for g in gradients) else torch.float32
    device = gradients[0].device if gradients else replicas.device
    head = on_device([*known, *present], exact, device)
    reduce(replicas, [head, *gradients], divisor)
    if absent:  # nobody has a gradient for some of them: the optimizer leaves them alone
        for p, count in zip(trained, head[len(known) :].tolist(), strict=True):
            if count == 0:
                p.grad = None
    return head[: len(known)]


def on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` as a tensor on ``device``, which is not waited for: it may still be at the backward pass."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def reduce(replicas: Communicator, tensors: Sequence[Tensor], divisor: float) -> None:
    """Replace ``tensors`` by their sums over ``replicas`` over ``divisor``, in one message per dtype."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        group = [t for t in tensors if t.dtype == dtype]
        flat = replicas.all_reduce(torch.cat([t.reshape(-1) for t in group]))
        if divisor != 1.0:
            flat.div_(divisor)
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def average_buffers(replicas: Communicator, buffers: Iterable[Tensor]) -> None:
    """Each replica saw other batches, so running statistics (BatchNorm) differ: replace them by their mean."""
    averaged = [b.detach() for b in buffers if has_mean(b)]
    if averaged and replicas.world_size > 1:
        with torch.no_grad():
            reduce(replicas, averaged, replicas.world_size)
