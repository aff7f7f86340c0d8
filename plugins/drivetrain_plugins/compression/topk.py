"""The largest entries of each bucket, with their places (Aji and Heafield, "Sparse Communication for Distributed
Gradient Descent", 2017; the warm-up is that of Lin et al., "Deep Gradient Compression", 2018).

Ranks choose different entries, so a sum on the way would fill up: every rank reads every other's choice.
"""

from __future__ import annotations

import math

import torch

from drivetrain.compressor import Averaged, Bucket, Compressor, Transport


class TopK(Compressor):
    """Sends values in the bucket's dtype and places as 32-bit integers, in one message. Where all entries are to be
    sent their places say nothing, so they are summed as they are. NaN counts as larger than every number."""

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        flat, ranks = bucket.flat, transport.world_size
        count = self.count(flat.numel(), bucket.step)
        if count == flat.numel():
            return Averaged(transport.all_reduce(flat.clone()).div_(ranks), flat)
        places = flat.abs().topk(count, sorted=False).indices
        values = flat[places]
        payload = torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])
        mean = torch.zeros_like(flat)
        for part in transport.all_gather(payload):
            split = count * flat.element_size()
            theirs, where = part[:split].clone().view(flat.dtype), part[split:].clone().view(torch.int32)
            # No rank sends a place twice, so the order of the additions is that of the ranks.
            mean.index_add_(0, where.long(), theirs)
        sent = torch.zeros_like(flat)
        sent[places] = values
        return Averaged(mean.div_(ranks), sent)

    def count(self, entries: int, step: int) -> int:
        """How many of ``entries`` are sent at ``step``; at least one."""
        ratio, warmup = self.options.ratio, self.options.warmup_steps
        if step < warmup:
            ratio = ratio ** (step / warmup)
        return min(entries, max(1, math.ceil(ratio * entries)))
