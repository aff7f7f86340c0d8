"""Where servers leave their addresses and keys for the workers, and workers their keys for the servers."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from drivetrain.launch import Job, stores
from drivetrain.launch.rendezvous import job_store
from drivetrain_plugins.parameter_server.departures import PeerGoneError

_FAILED = "parameter_server/failed"


class Board:
    """Where ranks leave each other words: the job's store, or a dict where there is one rank."""

    def __init__(self, job: Job, stage: int) -> None:
        self.alone: dict[str, str] | None = {} if job.world_size == 1 else None
        self.job = job
        self.prefix = f"parameter_server/{stage}/"

    def set(self, key: str, value: str) -> None:
        if self.alone is not None:
            self.alone[key] = value
        else:
            job_store().set(self.prefix + key, value)

    def get(self, key: str) -> str:
        """The word at ``key``, once it is there. Raises as :func:`drivetrain.launch.stores.wait` and :func:`heard`."""
        if self.alone is not None:
            return self.alone[key]
        stores.wait(job_store(), [self.prefix + key], self.job.timeout, partial(heard, self.job))
        return str(job_store().get(self.prefix + key).decode())


def heard(job: Job) -> None:
    """Raise :class:`PeerGoneError` with what a rank that has failed said."""
    if job.world_size == 1:
        return
    words = ""
    with suppress(RuntimeError):  # the store went with the rank that held it, whose connections are closed, too
        words = job_store().get(_FAILED).decode() if job_store().check([_FAILED]) else ""
    if words:
        raise PeerGoneError(words)


def fail(job: Job, error: BaseException) -> None:
    """Say that this rank has failed, to those that wait for its words in whichever stage: its script may catch it."""
    if job.world_size > 1:
        with suppress(RuntimeError):  # the store went with the rank that held it
            job_store().set(_FAILED, f"rank {job.rank} failed: {type(error).__name__}: {error}")
