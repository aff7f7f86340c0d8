"""Sums and means over the ranks of many tensors at once, in place; says how many bytes that took."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drivetrain.comm.communicator import Communicator

_HALF = (torch.float16, torch.bfloat16)


def has_mean(tensor: torch.Tensor) -> bool:
    """Whether replicas that differ in ``tensor`` meet in their mean: real and complex numbers do, counts do not."""
    return tensor.is_floating_point() or tensor.is_complex()


class Averaging:
    """One all-reduce for each dtype, in the order of ``tensors``; every rank calls with the same shapes.

    Half precision travels and is added as fp32: a mean of many bf16 weights would else lose most of their bits.

    Attributes:
        communicator: the strategy's; its statistics know what does not count as traffic of the training.
        statistics: of what counts.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._counting = communicator.child(communicator.group, "averaging")
        self.statistics = self._counting.statistics

    def traffic(self, dense: int | None = None) -> dict[str, int]:
        """For :meth:`drivetrain.strategy.Strategy.traffic`; ``dense`` where less is sent than there was to send."""
        sent = {"bytes_sent": self.statistics.bytes_sent, "messages": self.statistics.messages}
        return {**sent, "bytes_dense": sent["bytes_sent"] if dense is None else dense}

    def volume(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that a rank sends for the mean of ``tensors``: 2(N-1)/N of them."""
        size = sum(t.numel() * (4 if t.dtype in _HALF else t.element_size()) for t in tensors)
        return 2 * size * (self.communicator.world_size - 1) // self.communicator.world_size

    def mean(self, tensors: Sequence[torch.Tensor], counts: bool = True) -> None:
        """Replace ``tensors`` that have one by their mean over the ranks. ``counts``: as traffic of the training."""
        self._reduce(tensors, counts, self.communicator.world_size)

    def sum(self, tensors: Sequence[torch.Tensor], counts: bool = True) -> None:
        """Replace ``tensors`` by their sum over the ranks."""
        self._reduce(tensors, counts, 1)

    @torch.no_grad()
    def _reduce(self, tensors: Sequence[torch.Tensor], counts: bool, divisor: int) -> None:
        if self.communicator.world_size == 1:
            return
        exchange = self.communicator.device
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            group = [t for t in tensors if t.dtype == dtype]
            # NCCL takes tensors of its GPU only (optimizers keep step counts on the host), Gloo takes both.
            target = exchange if exchange.type != "cpu" else group[0].device
            flat = torch.cat([t.detach().to(target).reshape(-1) for t in group])
            if dtype in _HALF:
                flat = flat.float()
            (self._counting if counts else self.communicator).all_reduce(flat)
            if divisor != 1:
                flat.div_(divisor)
            offset = 0
            for t in group:
                t.copy_(flat[offset : offset + t.numel()].view(t.shape))
                offset += t.numel()
