"""Gradients rounded to a 16-bit format and summed in it, on whatever all-reduce the strategy has.

Each addition on the way rounds once more, by at most half a unit in the last place of the sum (2^-12 of it in fp16,
2^-9 in bfloat16), N - 1 times; this part no rank knows of, so error feedback does not make up for it.
"""

from __future__ import annotations

import math

import torch

from drivetrain.compressor import Averaged, Bucket, Compressor, Transport


class Cast(Compressor):
    """Sends ``dtype``, multiplied by a power of two that all ranks share: the largest entry of any rank comes just
    below 1/N of the format's range. So no sum can overflow, small gradients keep their bits, and numbers of the
    format's own precision arrive as they are. An entry that is not finite makes the whole bucket NaN."""

    dtype: torch.dtype

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        flat, ranks = bucket.flat, transport.world_size
        factor = self.factor(torch.stack(transport.all_gather(flat.abs().amax())).amax(), ranks)
        narrow = (flat * factor).to(self.dtype)
        sent = narrow.to(flat.dtype).div_(factor)
        mean = transport.all_reduce(narrow).to(flat.dtype).div_(factor).div_(ranks)
        return Averaged(mean, sent)

    def factor(self, largest: torch.Tensor, ranks: int) -> torch.Tensor:
        """The power of two for ``largest``, the greatest magnitude; NaN where that is not finite."""
        room = math.floor(math.log2(torch.finfo(self.dtype).max / ranks))
        most = math.floor(math.log2(torch.finfo(largest.dtype).max)) - 1
        exponent = (room - torch.frexp(largest).exponent).clamp(-most, most)
        factor = torch.ldexp(torch.ones_like(largest), exponent)
        return torch.where(largest.isfinite(), factor, math.nan)


class Fp16(Cast):
    """11 bits of precision; entries 10^8 times smaller than the largest of their bucket have fewer."""

    dtype = torch.float16


class Bf16(Cast):
    """8 bits of precision over nearly the range of fp32."""

    dtype = torch.bfloat16
