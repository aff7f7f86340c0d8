"""One signed byte an entry, with a scale for each block of entries (Seide et al., "1-bit SGD", 2014, for the idea of
feeding the error back; block-wise scales after Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).

Bytes cannot be summed on the way, as 100 + 100 is -56, so every rank reads every other's: a rank sends N - 1 bytes an
entry where an all-reduce of fp32 sends 8 (N - 1) / N. That is less below 8 ranks, and more above.
"""

from __future__ import annotations

import torch

from drivetrain.compressor import Averaged, Bucket, Compressor, Transport

LEVELS = 127


class Int8(Compressor):
    """Entries are rounded to the nearest of 255 levels between plus and minus their block's largest. A block with an
    entry that is not finite has a scale that is not, and so arrives as nothing but NaN."""

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        flat, size = bucket.flat, min(self.options.block_size, bucket.flat.numel())
        blocks = -(-flat.numel() // size)
        padded = flat
        if blocks * size != flat.numel():
            padded = flat.new_zeros(blocks * size)
            padded[: flat.numel()] = flat
        rows = padded.view(blocks, size)
        scales = rows.abs().amax(dim=1, keepdim=True) / LEVELS
        levels = (rows / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-LEVELS, LEVELS).nan_to_num_(0.0)
        quantised = levels.to(torch.int8)
        payload = torch.cat([scales.view(-1).view(torch.uint8), quantised.view(-1)[: flat.numel()].view(torch.uint8)])
        mean = torch.zeros_like(flat)
        for part in transport.all_gather(payload):
            mean += self._read(part, blocks, size, flat)
        sent = self._read(payload, blocks, size, flat)
        return Averaged(mean.div_(transport.world_size), sent)

    @staticmethod
    def _read(payload: torch.Tensor, blocks: int, size: int, like: torch.Tensor) -> torch.Tensor:
        split = blocks * like.element_size()
        scales = payload[:split].clone().view(like.dtype)
        levels = payload[split:].view(torch.int8).to(like.dtype)
        # Not one product of blocks, as the last may be short.
        return levels.mul_(scales.repeat_interleave(size)[: like.numel()])
