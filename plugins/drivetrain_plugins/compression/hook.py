"""The communication hook in which a topology and a compressor meet: buckets become small, travel, become whole."""

# No postponed annotations: torch compares the hook's annotations with its own classes.
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from drivetrain.comm.bucket_hook import BucketAverage, summation
from drivetrain.comm.communicator import Communicator
from drivetrain.compressor import Bucket, Compressor, Segment, Transport
from drivetrain_plugins.compression.error_feedback import add_owed, keep_owed
from drivetrain_plugins.compression.memory import StepMemory


class ScheduledTransport:
    """Sums by the algorithm named; gathers by the backend, whose all-gather is a ring already."""

    def __init__(self, communicator: Communicator, algorithm: str) -> None:
        self.world_size = communicator.world_size
        self.all_reduce = summation(algorithm, communicator)
        self.all_gather = communicator.all_gather


class _Layout(NamedTuple):
    segments: tuple[Segment, ...]
    exact: int | None  # where the scalar lies that is summed as it is


class CompressedAverage(BucketAverage):
    """Averages buckets through ``compressor``. Register with ``model.register_comm_hook(hook, CompressedAverage.hook)``
    and call :meth:`settle` after each optimizer step.

    Args:
        compressor: what makes the buckets smaller.
        communicator: as :class:`BucketAverage` takes it.
        parameters: by name, those whose gradients come.
        exact: a scalar parameter whose gradient is summed as it is, in a message of its own.
        algorithm: the all-reduce that sums: ``"native"`` for the backend's own, ``"auto"``, or a topology.

    Attributes:
        loss_scale: what the gradients that come are multiplied by; None for 1.
        bytes_dense: what the backend's all-reduce would have sent of the buckets as they are.
    """

    def __init__(
        self,
        compressor: Compressor,
        communicator: Communicator,
        parameters: dict[str, nn.Parameter],
        *,
        exact: nn.Parameter | None = None,
        algorithm: str = "native",
    ) -> None:
        super().__init__(communicator)
        self.compressor = compressor
        self.memory = StepMemory()
        self.loss_scale: torch.Tensor | None = None
        self.bytes_dense = 0
        self._transport: Transport = ScheduledTransport(self.communicator, algorithm)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._exact = exact
        self._layouts: dict[int, _Layout] = {}

    def take(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        index = bucket.index()
        if index not in self._layouts:
            self._layouts[index] = self._layout(bucket.parameters())
        return self.submit(index, bucket.buffer())

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of ``parameters``, one bucket per dtype; waits until it is done. All ranks pass the
        same parameters, each with a gradient."""
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            group = [p for p in parameters if p.dtype == dtype]
            gradients = [p.grad for p in group if p.grad is not None]
            self._layouts[-1] = self._layout(group)
            flat = self.submit(-1, torch.cat([g.reshape(-1) for g in gradients])).wait()
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def settle(self, stepped: bool) -> None:
        """The optimizer has stepped, or skipped the step: only then what was sent has left this rank's debt."""
        self.memory.settle(stepped)

    def average(self, index: int, bucket: torch.Tensor) -> torch.Tensor:
        if bucket.numel():  # one of empty parameters only holds nothing that a compressor could look at
            # To compressors a complex number is two entries: their formats, and products of matrices, are of real ones.
            self._average(self._layouts[index], torch.view_as_real(bucket).view(-1) if bucket.is_complex() else bucket)
        return bucket

    def _average(self, layout: _Layout, bucket: torch.Tensor) -> None:
        ranks = self.communicator.world_size
        self.bytes_dense += 2 * bucket.nbytes * (ranks - 1) // ranks
        place = layout.exact
        exact = None if place is None else bucket[place : place + 1].clone()
        # 16-bit gradients and debts would lose to rounding what the debt is there to keep.
        flat = bucket.to(torch.promote_types(bucket.dtype, torch.float32))
        if place is not None:
            flat[place] = 0.0
        if layout.segments:
            mean = self._compressed(flat, layout.segments)
            bucket.copy_(mean)
        if exact is not None and place is not None:
            bucket[place : place + 1] = self._transport.all_reduce(exact).div_(ranks)

    def _compressed(self, flat: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
        scale, memory = self.loss_scale, self.memory
        if scale is not None:
            flat.div_(scale)
        if self.compressor.error_feedback:
            add_owed(flat, segments, memory)
        mean, sent = self.compressor.average(Bucket(flat, segments, memory.step, memory), self._transport)
        if self.compressor.error_feedback:
            keep_owed(flat, sent, segments, memory)
        return mean if scale is None else mean.mul_(scale)

    def _layout(self, parameters: list[Any]) -> _Layout:
        segments, exact, at = [], None, 0
        for parameter in parameters:
            shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
            stop = at + math.prod(shape)
            if parameter is self._exact:
                exact = at
            else:
                segments.append(Segment(self._names[id(parameter)], at, stop, shape))
            at = stop
        return _Layout(tuple(segments), exact)
