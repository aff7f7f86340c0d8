"""Random numbers in a pipeline: what all ranks draw stays the same on all, what each draws for its stages is its own.

Ranks read the same batch and run the same step around the network, so data sets and steps that draw numbers must draw
the same on all of them; dropout within the stages must not. Both ends therefore draw from streams that are seeded by
the batch, and every rank's own generators are left as they were found.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def stream(device: torch.device, *key: int | str) -> Iterator[None]:
    """While it lasts the generators of torch (CPU and ``device``), numpy and Python start from a hash of ``key``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "big") >> 1
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    python, numpy = random.getstate(), np.random.get_state()
    for generator in generators:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)
