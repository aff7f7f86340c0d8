"""Which part of training this process is in, so that traffic can be told apart. The loops say it, at the cost of an
assignment; nothing reads it unless a communicator is being profiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SETUP = "setup"  # and whatever comes before the first step
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
BOUNDARY = "boundary"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"


class Current:
    """The phase of this process; ``name`` may be any word."""

    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name = SETUP


current = Current()


@contextmanager
def during(name: str) -> Iterator[None]:
    """``name`` is the phase while the block runs, the former one afterwards."""
    former, current.name = current.name, name
    try:
        yield
    finally:
        current.name = former
