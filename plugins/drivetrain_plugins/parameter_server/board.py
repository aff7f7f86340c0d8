"""Where servers leave their addresses and keys for the workers, and workers their keys for the servers."""

from __future__ import annotations

from drivetrain.launch import Job, stores
from drivetrain.launch.rendezvous import job_store


class Board:
    """Where ranks leave each other words: the job's store, or a dict where there is one rank."""

    def __init__(self, job: Job, stage: int) -> None:
        self.alone: dict[str, str] | None = {} if job.world_size == 1 else None
        self.prefix = f"parameter_server/{stage}/"
        self.timeout = job.timeout

    def set(self, key: str, value: str) -> None:
        if self.alone is not None:
            self.alone[key] = value
        else:
            job_store().set(self.prefix + key, value)

    def get(self, key: str) -> str:
        """The word at ``key``, once it is there."""
        if self.alone is not None:
            return self.alone[key]
        stores.wait(job_store(), [self.prefix + key], self.timeout)
        return str(job_store().get(self.prefix + key).decode())
