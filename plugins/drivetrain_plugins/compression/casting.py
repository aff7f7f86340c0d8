"""Gradients rounded to a 16-bit format and summed in it, on whatever all-reduce the strategy has.

Each addition on the way rounds once more, by at most half a unit in the last place (2^-11 of the sum in fp16, 2^-8 in
bfloat16) and 2 (N - 1) times at most; this part no rank knows of, so error feedback does not make up for it.
"""

from __future__ import annotations

import math

import torch

from drivetrain.compressor import Averaged, Bucket, Compressor, Transport


class Cast(Compressor):
    """Sends ``dtype``. Entries beyond 1/N of the format's range are sent as that bound, so that no sum of N ranks can
    overflow; with error feedback the rest follows in later steps. Entries that are not finite stay so."""

    dtype: torch.dtype

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        flat, ranks = bucket.flat, transport.world_size
        bound = self.largest(ranks)
        narrow = torch.where(flat.isfinite(), flat.clamp(-bound, bound), flat).to(self.dtype)
        sent = narrow.to(flat.dtype)
        mean = transport.all_reduce(narrow).to(flat.dtype).div_(ranks)
        return Averaged(mean, sent)

    def largest(self, ranks: int) -> float:
        """A power of two of which ``ranks`` can be added in the format, in any order."""
        return 2.0 ** math.floor(math.log2(torch.finfo(self.dtype).max / ranks))


class Fp16(Cast):
    """11 bits of precision from 6e-5 to 65504; smaller entries lose bits and wait, with error feedback."""

    dtype = torch.float16


class Bf16(Cast):
    """8 bits of precision over the range of fp32."""

    dtype = torch.bfloat16
