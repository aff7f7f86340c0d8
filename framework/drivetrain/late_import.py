"""Imports that come while a user's program is under way: they leave its random numbers as they were.

rich, for one, takes a number from Python's generator when it is first imported. Had a script seeded it before, its
shuffles and its exploration would be others than without a progress bar.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Python's generator stands afterwards where it stood."""
    kept = random.getstate()
    try:
        yield
    finally:
        random.setstate(kept)
