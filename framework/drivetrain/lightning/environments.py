"""Cluster environments: what started this process, for projects that ask it or give it to the Trainer.

The Trainer recognises torchrun, srun and mpirun by itself (:mod:`drivetrain.launch.environment`); an object of these
classes says what the project expects.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, current_job


class ClusterEnvironment(ABC):
    """Answers a process's questions about its place in a job. A project's own class can be asked, and not be given to
    the Trainer."""

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool: ...

    @property
    @abstractmethod
    def main_address(self) -> str: ...

    @property
    @abstractmethod
    def main_port(self) -> int: ...

    @staticmethod
    @abstractmethod
    def detect() -> bool: ...

    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def set_world_size(self, size: int) -> None: ...

    @abstractmethod
    def global_rank(self) -> int: ...

    @abstractmethod
    def set_global_rank(self, rank: int) -> None: ...

    @abstractmethod
    def local_rank(self) -> int: ...

    @abstractmethod
    def node_rank(self) -> int: ...

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise where the script's numbers are not the job's."""

    def teardown(self) -> None: ...


class _OfJob(ClusterEnvironment):
    """Answers from the job that this process is a worker of, else as the only worker."""

    origins: tuple[str, ...] = ()
    launcher = ""

    @classmethod
    def _job(cls) -> Job | None:
        job = current_job()
        return job if job is not None and job.origin in cls.origins else None

    @property
    def job(self) -> Job:
        return self._job() or Job()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.job.master_addr

    @property
    def main_port(self) -> int:
        return self.job.master_port

    def world_size(self) -> int:
        return self.job.world_size

    def set_world_size(self, size: int) -> None:
        """The job's size is what it is."""

    def global_rank(self) -> int:
        return self.job.rank

    def set_global_rank(self, rank: int) -> None:
        """A worker's rank is what it is."""

    def local_rank(self) -> int:
        return self.job.local_rank

    def node_rank(self) -> int:
        return self.job.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        job = self._job()
        if job is not None and num_devices * num_nodes != job.world_size:
            raise ConfigurationError(
                f"devices={num_devices} on num_nodes={num_nodes} are not the {job.world_size} workers that"
                f" {self.launcher} started: give the numbers that it was given."
            )

    def given(self, alone: bool) -> None:
        """Called by a Trainer that it is given to.

        Args:
            alone: whether that is of one process, which looks at no environment.

        Raises:
            ConfigurationError: this process was not started so, and is to be one of several.
        """
        if not self.detect() and not alone:
            raise ConfigurationError(
                f"plugins: {type(self).__name__} is for a process that {self.launcher} started, and this one is not:"
                f" leave it out, or start the script with {self.launcher}."
            )


class TorchElasticEnvironment(_OfJob):
    """torchrun."""

    origins, launcher = ("torchrun",), "torchrun"

    @staticmethod
    def detect() -> bool:
        return TorchElasticEnvironment._job() is not None and "TORCHELASTIC_RUN_ID" in os.environ


class KubeflowEnvironment(_OfJob):
    """A pod for each worker, with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``."""

    origins, launcher = ("torchrun",), "Kubeflow"

    @staticmethod
    def detect() -> bool:
        found = KubeflowEnvironment._job() is not None and "KUBERNETES_PORT" in os.environ
        return found and not TorchElasticEnvironment.detect()


class MPIEnvironment(_OfJob):
    """mpirun."""

    origins, launcher = ("mpi",), "mpirun"

    @staticmethod
    def detect() -> bool:
        return MPIEnvironment._job() is not None


class SLURMEnvironment(_OfJob):
    """srun, or a job of one task.

    Args:
        auto_requeue: jobs are not put back into the queue here; a Trainer that it is given to says so.
        requeue_signal: not listened to, for the same reason.
    """

    origins, launcher = ("slurm",), "srun"

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        self.auto_requeue = auto_requeue
        self.requeue_signal = requeue_signal

    @staticmethod
    def detect() -> bool:
        return SLURMEnvironment._job() is not None or (current_job() is None and "SLURM_JOB_ID" in os.environ)

    @staticmethod
    def job_name() -> str | None:
        return os.environ.get("SLURM_JOB_NAME")

    @staticmethod
    def job_id() -> int | None:
        """The job's number; none in an interactive shell."""
        number = os.environ.get("SLURM_JOB_ID", "")
        return int(number) if number.isdigit() and SLURMEnvironment.job_name() not in ("bash", "interactive") else None

    def given(self, alone: bool) -> None:
        super().given(alone)
        if self.auto_requeue and self.detect():
            tell_of_no_requeueing("SLURMEnvironment(auto_requeue=True)")


def tell_of_no_requeueing(place: str) -> None:
    """Say what Lightning would do in a job of SLURM's, and is not done here."""
    warnings.warn(
        f"{place}: a run that SLURM stops by SIGTERM saves a checkpoint and is not put back into the queue, and SIGUSR1"
        " is not listened to: give plugins=[SLURMEnvironment(auto_requeue=False)], and use sbatch --requeue"
        " --signal=TERM@90 with fit(ckpt_path='auto').",
        stacklevel=5,
    )


class LightningEnvironment(_OfJob):
    """Workers that the Trainer starts itself."""

    origins, launcher = ("local", "inline"), "the Trainer"

    @property
    def creates_processes_externally(self) -> bool:
        return False

    @staticmethod
    def detect() -> bool:
        return True

    def given(self, alone: bool) -> None:
        job = current_job()
        if job is not None and job.origin not in self.origins:
            raise ConfigurationError(
                f"plugins: LightningEnvironment lets the Trainer start its workers, and this process is one of"
                f" {job.world_size} that {job.origin} started: leave it out, or start the script once."
            )
