"""Room for the frames of Python's calls in one piece, below everything that a run calls.

CPython (3.11 to 3.13 looked at) keeps the frames of a thread in chunks of 16 KiB, each mapped when a call needs it and
unmapped when that call returns. Where a loop's innermost calls happen to straddle the end of a chunk, every one of them
maps and unmaps memory, and pays a page fault: thousands a step under engines with a Python hook at every layer, or not
one, as the depth has it that the loop was called from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

# In words of 8 bytes. A frame that needs more than half a MiB is given a chunk of a MiB, whose other half, as much as a
# thousand nested calls usually take, is left to what it calls. Memory that is not used is not paged in.
_OWN_WORDS = 66_000


def in_one_chunk(call: Callable[..., Result], *arguments: Any) -> Result:
    """``call(*arguments)``, with all frames below in one chunk of memory."""
    return call(*arguments)


in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=_OWN_WORDS)
