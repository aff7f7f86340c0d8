"""Whether a launcher has already started this process as one worker of a job: torchrun, srun, mpirun, a cluster."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.launch.job import Job

# Ports agreed without a message: below the ephemeral range of Linux (from 32768), above the registered crowd.
FIRST_PORT, PORTS = 20000, 12000

_current: Job | None = None


def set_current_job(job: Job | None) -> None:
    """Remember the job of this worker process; called by the launcher's worker, and with ``None`` to forget it."""
    global _current  # noqa: PLW0603  a process is one worker of one job
    _current = job


def current_job(**unsaid: Any) -> Job | None:
    """The job that our launcher gave this worker, else the one that another launcher started, else ``None``.

    Args:
        unsaid: accelerator, backend and time-out of a job of another launcher, whose environment says nothing of them.

    Raises:
        ConfigurationError: the environment of another launcher is there but ill-formed.
    """
    if _current is not None:
        return _current
    job = detect()
    return job and replace(job, **unsaid)


def detect(environ: Mapping[str, str] | None = None) -> Job | None:
    """The job that the environment variables of torchrun, Open MPI, SLURM, or MPICH describe; ``None`` without one.

    Accelerator, backend and time-out are not in the environment: the job has its defaults for them.

    Args:
        environ: the variables; those of this process by default.

    Raises:
        ConfigurationError: a variable is missing or holds what it cannot hold.
    """
    variables = os.environ if environ is None else environ
    for reader in (_from_variables, _from_open_mpi, _from_slurm, _from_pmi):
        job = reader(variables)
        if job is not None:
            return job
    return None


def _from_variables(env: Mapping[str, str]) -> Job | None:
    """RANK and WORLD_SIZE: torchrun, or a cluster that starts one worker in each pod."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise ConfigurationError(
                f"{other}={env[other]!r} is set but {name} is not: set both to join a job, or unset {other}"
            )
    world_size = _number(env, "WORLD_SIZE", at_least=1)
    rank = _number(env, "RANK", below=world_size, ordinal=True)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", default=1, at_least=1)
    # Without GROUP_RANK every pod is a node of its own.
    num_nodes = _number(env, "GROUP_WORLD_SIZE", default=-(-world_size // local_world_size), at_least=1)
    if world_size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ConfigurationError(
            "RANK and WORLD_SIZE are set but not MASTER_ADDR and MASTER_PORT: "
            "set them to the address of rank 0 and a free port there"
        )
    return Job(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", default=rank % local_world_size, below=local_world_size),
        local_world_size=local_world_size,
        node_rank=_number(env, "GROUP_RANK", default=rank // local_world_size, below=num_nodes),
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", default=0, below=65536),
        origin="torchrun",
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _from_open_mpi(env: Mapping[str, str]) -> Job | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    identity = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE") or ""
    return _from_mpi(
        env,
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        identity=identity,
    )


def _from_pmi(env: Mapping[str, str]) -> Job | None:
    """MPICH and its kin (Intel MPI, MVAPICH)."""
    if "PMI_RANK" not in env:
        return None
    return _from_mpi(
        env,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        # One proxy a node starts its ranks; the port names the job where there are several nodes.
        identity=env.get("PMI_PORT") or f"proxy {os.getppid()}",
    )


def _from_mpi(
    env: Mapping[str, str], *, rank: str, size: str, local_rank: str, local_size: str, identity: str
) -> Job | None:
    world_size = _number(env, size, at_least=1)
    number = _number(env, rank, below=world_size)
    local_world_size = _number(env, local_size, default=world_size, at_least=1)
    num_nodes = -(-world_size // local_world_size)
    if num_nodes > 1 and "MASTER_ADDR" not in env:
        raise ConfigurationError(
            f"{num_nodes} nodes under MPI need MASTER_ADDR: set it to the host of rank 0 (mpirun -x MASTER_ADDR=HOST)"
        )
    return Job(
        rank=number,
        world_size=world_size,
        local_rank=_number(env, local_rank, default=number % local_world_size, below=local_world_size),
        local_world_size=local_world_size,
        node_rank=number // local_world_size,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", default=agreed_port(identity), below=65536),
        origin="mpi",
    )


def _from_slurm(env: Mapping[str, str]) -> Job | None:
    """A step of several tasks. A batch script or an interactive shell has SLURM's variables too, but is one process:
    to wait there for the other tasks would be to wait for ever."""
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return None
    world_size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", at_least=1)
    if world_size == 1:
        return None
    num_nodes = _number(
        env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES", default=1, at_least=1
    )
    node_rank = _number(env, "SLURM_NODEID", default=0, below=num_nodes)
    counts = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world_size))
    if len(counts) != num_nodes:
        counts = [world_size // num_nodes] * num_nodes
    rank = _number(env, "SLURM_PROCID", below=world_size)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    if num_nodes > 1 and not hosts and "MASTER_ADDR" not in env:
        raise ConfigurationError("SLURM names no nodes (SLURM_JOB_NODELIST): set MASTER_ADDR to the host of rank 0")
    return Job(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID", default=rank % counts[node_rank], below=counts[node_rank]),
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=env.get("MASTER_ADDR") or (first_host(hosts) if num_nodes > 1 else "127.0.0.1"),
        master_port=_number(
            env,
            "MASTER_PORT",
            default=agreed_port(f"slurm {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"),
            below=65536,
        ),
        origin="slurm",
        attempt=_number(env, "SLURM_RESTART_COUNT", default=0),
    )


def agreed_port(identity: str) -> int:
    """A port that all workers of a job derive alike from its name, without a message."""
    return FIRST_PORT + zlib.crc32(identity.encode()) % PORTS


def first_host(nodes: str) -> str:
    """The first host of SLURM's short form: ``"gpu[03-05,9],login"`` gives ``"gpu03"``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ConfigurationError(
            f"SLURM's list of nodes {nodes!r} names no host: set MASTER_ADDR to the host of rank 0"
        )
    return "".join(part or "" for part in match.groups())


def _tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` gives ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None or int(match[1]) < 1:
            raise ConfigurationError(f"SLURM_TASKS_PER_NODE={text!r} is not of the form '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(
    env: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    at_least: int = 0,
    below: int | None = None,
    ordinal: bool = False,
) -> int:
    text = env.get(name)
    if text is None or (not text.strip() and default is not None):
        if default is None:
            raise ConfigurationError(f"{name} is not set, though other variables of its launcher are: set it too")
        return default
    # A StatefulSet puts the name of the pod where the number should be: "ml-workers-3" is number 3.
    match = re.fullmatch(r"(?:[a-z0-9][a-z0-9.-]*-)?(\d+)" if ordinal else r"(\d+)", text.strip())
    value = int(match[1]) if match else -1
    if match is None or value < at_least or (below is not None and value >= below):
        bound = f"from {at_least} to {below - 1}" if below is not None else f"of at least {at_least}"
        raise ConfigurationError(f"{name}={text!r} is not a number {bound}: correct it, or unset it")
    return value
