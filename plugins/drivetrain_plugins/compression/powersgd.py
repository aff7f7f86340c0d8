"""Low-rank gradients (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", 2019).

A matrix M is approximated by one step of the power method from where the last step ended:
P = orthonormal(mean of M Q), Q = mean of M^T P, and M is taken as P Q^T. Both products are linear in M, so they are
summed by any all-reduce: two small ones for a bucket, the first of which also carries what is sent whole.
"""

from __future__ import annotations

import math
import zlib

import torch

from drivetrain.compressor import Averaged, Bucket, Compressor, Memory, Segment, Transport

_FACTOR = "powersgd.q"


class PowerSGD(Compressor):
    """Own code, since torch's hook has its own error feedback, state file and all-reduce, and composes with no other
    transport. What a rank sent is P (M^T P)^T of its own M, so what it owes is orthogonal to P."""

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        flat, ranks = bucket.flat, transport.world_size
        low = [segment for segment in bucket.segments if self.rank_of(segment, bucket.step) > 0]
        if not low:
            return Averaged(transport.all_reduce(flat.clone()).div_(ranks), flat)
        matrices = [_matrix(flat, segment) for segment in low]
        factors = [self._start(bucket.memory, segment, flat) for segment in low]
        whole = _outside(flat.numel(), low)
        products = [matrix @ q for matrix, q in zip(matrices, factors, strict=True)]
        first = torch.cat([*(flat[start:stop] for start, stop in whole), *(p.reshape(-1) for p in products)])
        transport.all_reduce(first).div_(ranks)

        mean, sent = torch.empty_like(flat), torch.empty_like(flat)
        offset = 0
        for start, stop in whole:
            mean[start:stop] = first[offset : offset + stop - start]
            sent[start:stop] = flat[start:stop]
            offset += stop - start
        bases = [_orthonormal(p) for p in _split(first[offset:], products)]
        own = [matrix.T @ p for matrix, p in zip(matrices, bases, strict=True)]
        second = transport.all_reduce(torch.cat([q.reshape(-1) for q in own])).div_(ranks)
        for segment, p, mine, q in zip(low, bases, own, _split(second, own), strict=True):
            _matrix(mean, segment).copy_(p @ q.T)
            _matrix(sent, segment).copy_(p @ mine.T)
            bucket.memory.put(_FACTOR, segment.name, q.clone())
        return Averaged(mean, sent)

    def rank_of(self, segment: Segment, step: int) -> int:
        """The rank that the gradient is cut to; 0 where it is sent whole."""
        if step < self.options.warmup_steps or len(segment.shape) < 2:
            return 0
        rows, columns = segment.shape[0], math.prod(segment.shape[1:])
        rank = min(self.options.rank, rows, columns)
        pays = rows * columns > self.options.min_compression_rate * rank * (rows + columns)
        return rank if pays else 0

    def _start(self, memory: Memory, segment: Segment, like: torch.Tensor) -> torch.Tensor:
        """The last step's Q; at first a random one, which all ranks draw alike."""
        rank = self.rank_of(segment, self.options.warmup_steps)
        columns = math.prod(segment.shape[1:])
        last = memory.get(_FACTOR, segment.name)
        if last is not None and last.shape == (columns, rank):
            return last.to(like)
        generator = torch.Generator().manual_seed(zlib.crc32(segment.name.encode()))
        drawn = torch.randn(columns, rank, generator=generator, dtype=torch.float64)
        return _orthonormal(drawn.to(like))


def _matrix(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat[segment.start : segment.stop].view(segment.shape[0], -1)


def _outside(length: int, segments: list[Segment]) -> list[tuple[int, int]]:
    """The stretches of a bucket of ``length`` that no segment covers."""
    found, at = [], 0
    for start, stop in sorted((segment.start, segment.stop) for segment in segments):
        if start > at:
            found.append((at, start))
        at = stop
    return [*found, (at, length)] if at < length else found


def _split(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns that span those of ``matrix``, and more where these are dependent, of unit length and at right angles."""
    return torch.linalg.qr(matrix).Q
