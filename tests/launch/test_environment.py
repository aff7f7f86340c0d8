from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, current_job, detect, set_current_job
from drivetrain.launch.environment import FIRST_PORT, PORTS, agreed_port, first_host

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "77",
}  # fmt: skip
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4", "PMI_PORT": "head:1"}
SLURM = {
    "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-08],login",
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0",
}  # fmt: skip


def test_nothing_is_no_job() -> None:
    assert detect({"PATH": "/bin", "SLURM_CONF": "x"}) is None


def test_torchrun() -> None:
    expected = Job(5, 8, 1, 4, 1, 2, "head", 29500, origin="torchrun", attempt=2)
    assert detect(TORCHRUN) == expected


def test_plain_variables_are_one_worker_a_node() -> None:
    job = detect({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "ml-0", "MASTER_PORT": "1234"})
    assert job == Job(2, 3, 0, 1, 2, 3, "ml-0", 1234, origin="torchrun")


@pytest.mark.parametrize(("name", "rank"), [("ml-workers-3", 3), ("a-0", 0), ("x.y-12-1", 1)])
def test_name_of_a_pod_is_its_ordinal(name: str, rank: int) -> None:
    job = detect({"RANK": name, "WORLD_SIZE": "4", "MASTER_ADDR": "m", "MASTER_PORT": "1"})
    assert job is not None
    assert job.rank == rank


def test_open_mpi() -> None:
    assert detect(OPEN_MPI) == Job(1, 2, 1, 2, 0, 1, "127.0.0.1", agreed_port("77"), origin="mpi")


def test_open_mpi_on_two_nodes() -> None:
    two = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    assert detect(two) == Job(3, 4, 1, 2, 1, 2, "a", 9, origin="mpi")


def test_mpich() -> None:
    assert detect(PMI) == Job(3, 4, 3, 4, 0, 1, "127.0.0.1", agreed_port("head:1"), origin="mpi")


def test_slurm() -> None:
    assert detect(SLURM) == Job(4, 5, 0, 1, 2, 3, "gpu07", agreed_port("slurm 12.0"), origin="slurm")


def test_batch_script_and_shell_of_slurm_are_no_job() -> None:
    assert detect({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}) is None
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect(shell) is None


def test_torchrun_inside_slurm_or_mpi_wins() -> None:
    job = detect({**SLURM, **OPEN_MPI, **TORCHRUN})
    assert job is not None
    assert job.origin == "torchrun"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK='8' is not a number from 0 to 7"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "RANK": "worker"}, "RANK='worker'"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number of at least 1"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK='4' is not a number from 0 to 3"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
        ({"RANK": "0"}, "RANK='0' is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR and MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"}, "need MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x"}, "SLURM_TASKS_PER_NODE='2x'"),
    ],
)
def test_ill_formed_variables_are_one_sentence(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect(environment)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "host"), [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[03,07-9]-ib,m", "n03-ib"), ("g[1],h", "g1")]
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_agreed_ports_are_in_range_and_differ() -> None:
    ports = {agreed_port(str(number)) for number in range(200)}
    assert len(ports) > 190
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


def test_current_job_is_the_one_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    joined = current_job()
    assert joined is not None
    assert joined.rank == 5
    set_current_job(Job(rank=1, world_size=2))
    try:
        assert current_job() == Job(rank=1, world_size=2)
    finally:
        set_current_job(None)


@pytest.mark.parametrize(("gpus", "kind", "backend"), [(0, "cpu", "gloo"), (8, "cuda", "nccl")])
def test_a_job_of_torchrun_has_what_the_trainer_says(
    gpus: int, kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment says neither on what is computed nor how long a rank waits for another."""
    import torch

    from drivetrain.placement import place

    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    job = place("auto", "ddp", "auto", 1, None, timeout=7.0).job
    assert job is not None
    assert (job.rank, job.accelerator, job.backend, job.timeout) == (5, kind, backend, 7.0)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, drivetrain.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
