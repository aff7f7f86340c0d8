"""How the ranks of a job learn that all of them succeeded, or which one did not."""

from __future__ import annotations

from typing import Any, Protocol

from drivetrain.errors import FULL, CheckpointError, DrivetrainError


class Communicator(Protocol):
    """What a checkpoint needs of the job's communicator. Data is plain: what JSON can carry."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather_plain(self, obj: Any) -> list[Any]:
        """Every rank's ``obj``, in the order of ranks, on every rank."""
        ...


class SingleProcess:
    """The communicator of a job with one worker: no process group, nothing to wait for."""

    rank = 0
    world_size = 1

    def all_gather_plain(self, obj: Any) -> list[Any]:
        return [obj]


def reason(error: Exception) -> str:
    """One line that says what went wrong."""
    if isinstance(error, DrivetrainError):
        return str(error)
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):  # torch wraps what the disk said
        link = link.__cause__ or link.__context__
    error = link if isinstance(link, OSError) else error
    if isinstance(error, OSError) and error.strerror:
        way_out = "; free space or save elsewhere: the checkpoints before it are still there"
        place = f" ({error.filename})" if error.filename else ""
        return error.strerror + place + (way_out if error.errno in FULL else "")
    return f"{type(error).__name__}: {error}".splitlines()[0]


def agree(communicator: Communicator, what: str, value: Any, error: Exception | None) -> list[Any]:
    """Every rank's ``value``, once all ranks came here without an error. All ranks must call it.

    Raises:
        CheckpointError: on every rank, when any rank brought an error; it names the first such rank and its reason.
    """
    reports = communicator.all_gather_plain({"error": None if error is None else reason(error), "value": value})
    for rank, report in enumerate(reports):
        if report["error"] is not None:
            where = f"rank {rank}: " if communicator.world_size > 1 else ""
            raise CheckpointError(f"{what}: {where}{report['error']}") from error
    return [report["value"] for report in reports]
