"""The frames of Python's calls below a stage lie in one piece of memory, however deep the stage was called from."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain import Trainer
from drivetrain.frame_room import in_one_chunk
from tests.runs import QUIET, Classifier, loader

_CALLS = 200


def _large() -> None:
    """A frame that has no room at the end of a chunk at some depths."""


_large.__code__ = _large.__code__.replace(co_stacksize=100)


def _calls() -> None:
    for _ in range(_CALLS):
        _large()


def _from(depth: int, call: Callable[[], None]) -> None:
    if depth:
        _from(depth - 1, call)
    else:
        call()


def _most_page_faults() -> int:
    """Of the calls at any of 300 depths, whose frames take more than a chunk of 16 KiB together."""
    counts = []
    for depth in range(300):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        _from(depth, _calls)
        counts.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return max(counts)


def test_a_call_gives_what_it_gave() -> None:
    assert in_one_chunk(divmod, 7, 2) == (3, 1)


def test_calls_within_need_no_memory_mapped() -> None:
    _most_page_faults()  # what is read for the first time is paged in
    assert in_one_chunk(_most_page_faults) < _CALLS / 4


class Sweeping(Classifier):
    """Its step calls from every depth."""

    faults = _CALLS

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _most_page_faults()
        self.faults = _most_page_faults()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_stage_runs_so(devices: int) -> None:
    module = Sweeping()
    Trainer(strategy="ddp", devices=devices, max_steps=1, **QUIET).fit(module, loader(4))
    assert module.faults < _CALLS / 4
