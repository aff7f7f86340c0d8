"""Where the steps of an evaluation come to their end: on a pipeline's last rank, or on all of them.

The last rank has what the network makes of a batch, and what it logs is brought to all. That is enough unless the
project looks at what a step returns (``on_validation_batch_end(outputs)``) or what it keeps on the module
(``self.outputs.append(loss)``): then the network's output goes to all ranks, which end the step alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.comm.communicator import Communicator
from drivetrain.module import TrainModule
from drivetrain_plugins.strategies.kept_on_module import KeptOnModule

_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]
_DIMENSIONS = 16  # of an output at most


class Answers:
    """Ends the steps of one stage on the ranks of ``line``.

    Args:
        line: the ranks that one batch flows through.
        device: where the network's output lies.
        shown: whether a hook of the project's own is given what steps return.

    Attributes:
        everywhere: whether all ranks end the step; None as long as no step has shown whether it keeps anything.
    """

    def __init__(self, line: Communicator, device: torch.device, shown: bool) -> None:
        self.line, self.device = line, device
        self._last = line.world_size - 1
        self.everywhere: bool | None = False if line.world_size == 1 else True if shown else None
        self._told = False  # of what is kept on the last rank only

    def begin(self) -> None:
        """The first batch of a loader is next: what no step kept before, such as in the check before training, may be
        kept from now on."""
        if self.everywhere is False and self.line.world_size > 1:
            self.everywhere = None

    def of(self, output: Tensor | None, module: TrainModule, finish: Callable[[Tensor], Any]) -> Any:
        """What the step returns on the last rank and, where they end it, on the others; there None otherwise.

        Args:
            output: what the network makes of the batch, on the last rank.
            finish: the step with that output.
        """
        watched = not self.everywhere and not self._told and self.line.world_size > 1
        # Later batches are looked at without a copy of a tensor and without waiting for the device.
        kept = KeptOnModule(module, values=self.everywhere is None) if watched and output is not None else None
        answer = None if output is None else finish(output)
        if self.everywhere is False and kept is not None:
            self._tell(module, kept.changed(draws=False))
        if self.everywhere is None:
            flag = torch.tensor([float(bool(kept is not None and kept.changed()))], device=self.line.device)
            self.everywhere = bool(self.line.broadcast(flag, self._last).item())
        if self.everywhere and self.line.world_size > 1:
            brought = self._brought(output)
            if output is None:
                answer = finish(brought)
        return answer

    def _tell(self, module: TrainModule, names: list[str]) -> None:
        """That is known of later batches when it is too late for the others."""
        if names:
            self._told = True
            warnings.warn(
                f"an evaluation step of {type(module).__name__} keeps something on the module ({', '.join(names)}), but"
                " kept nothing of its loader's first batch: under a pipeline it is there on the last rank only. Keep"
                " something of every batch, log it, or use strategy=ddp.",
                stacklevel=2,
            )

    def _brought(self, output: Tensor | None) -> Tensor:
        """The last rank's ``output``, on every rank."""
        form = torch.zeros(2 + _DIMENSIONS, dtype=torch.int64, device=self.line.device)
        if output is not None:
            form[: 2 + output.ndim] = torch.tensor([_DTYPES.index(output.dtype), output.ndim, *output.shape])
        dtype, dimensions, *shape = self.line.broadcast(form, self._last).tolist()
        if output is None:
            output = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self.line.device)
            return self.line.broadcast(output, self._last).to(self.device)
        self.line.broadcast(output.detach().contiguous().to(self.line.device), self._last)
        return output
