"""Reading a loader whose processes may die: the error then says which one did, and how. And ending those that stay.

Torch looks whether its processes are alive when reading from them fails. A process that is about to end has closed its
connections already but still counts as alive, so what comes out at times is the connection's error, which names
neither. (Where torch sees it first, its own RuntimeError says the same as ours.)
"""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from drivetrain.errors import TrainingError
from drivetrain.launch.failure import way_of_ending

_ENDING = 5.0  # seconds from closed connections to the end of a process, on a machine that has much to do


class Watched:
    """``loader``, whose processes are looked at when reading from them fails."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.num_workers = loader.num_workers

    def __iter__(self) -> Iterator[Any]:
        return _read(iter(self.loader))  # made now: making it draws random numbers

    def end_processes(self) -> None:
        """End those that wait for another epoch (``persistent_workers=True``); reading on starts others.

        Left to Python's collector they would be told in an order in which torch waits five seconds for each of them.
        """
        staying = self.loader._iterator
        if isinstance(staying, _MultiProcessingDataLoaderIter):  # else of a loader that keeps more than processes in it
            self.loader._iterator = None
            staying._shutdown_workers()


def watched(loader: Any) -> Any:
    """``loader`` as it is where it has no processes."""
    return Watched(loader) if isinstance(loader, DataLoader) and loader.num_workers > 0 else loader


def _read(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except (OSError, EOFError) as error:
        # What a data set itself raised was carried over by a process that goes on.
        if "in DataLoader worker process" in str(error):
            raise
        gone = _gone(batches)
        if gone is None:
            raise
        number, process = gone
        how = "ended" if process.exitcode is None else way_of_ending(process.exitcode)
        raise TrainingError(
            f"DataLoader worker process {number} (pid {process.pid}) is gone ({how}): read with num_workers=0 to"
            " see what it fails at, and with fewer processes where memory is short."
        ) from error


def _gone(batches: Any) -> tuple[int, BaseProcess] | None:
    """The first of the processes that ``batches`` come from that has ended or does so within seconds, with its number.
    One that had no more to read has ended in order."""
    workers: list[tuple[int, BaseProcess]] = [
        (number, worker)
        for number, worker in enumerate(getattr(batches, "_workers", []))
        if batches._workers_status[number]
    ]
    ready = multiprocessing.connection.wait([worker.sentinel for _, worker in workers], _ENDING) if workers else []
    for number, worker in workers:
        if worker.sentinel in ready:
            worker.join(_ENDING)  # for its exit code
            return number, worker
    return None
