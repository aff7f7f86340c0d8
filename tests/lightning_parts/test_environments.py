"""Cluster environments: what they answer, and what a Trainer that they are given to says."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch.plugins.environments as theirs
import pytest

import drivetrain.lightning as L
from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job, set_current_job
from drivetrain.lightning import plugins as ours
from tests.facade.recorder import QUIET

SETTINGS: dict[str, Any] = {**QUIET, "logger": False}
JOBS: dict[str, dict[str, str]] = {
    "nothing": {},
    "TorchElasticEnvironment": {
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
        **{"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "TORCHELASTIC_RUN_ID": "a"},
    },
    "KubeflowEnvironment": {
        **{"KUBERNETES_PORT": "tcp://10.0.0.9:443", "RANK": "1", "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"},
    },
    "SLURMEnvironment": {
        **{"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"},
        **{
            "SLURM_NTASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NNODES": "2",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
        },
        **{"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NODELIST": "node1,node2", "SLURM_JOB_NODELIST": "node1,node2"},
        "MASTER_PORT": "29501",
    },
}
QUESTIONS = ("world_size", "global_rank", "local_rank", "node_rank")
PREFIXES = ("SLURM", "OMPI", "PMI", "KUBE", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_")


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variables that a launcher sets; its name."""
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "")  # Lightning's sets it
    monkeypatch.delenv("MASTER_ADDR")
    for name, value in JOBS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


def test_they_are_found_where_lightnings_are(job: str) -> None:
    for name in ("TorchElasticEnvironment", "SLURMEnvironment"):
        expected = getattr(theirs, name).detect()
        assert getattr(ours, name).detect() is expected is (name == job), name
    assert ours.KubeflowEnvironment.detect() is (job == "KubeflowEnvironment")  # Lightning's does not know
    assert ours.LightningEnvironment.detect() is theirs.LightningEnvironment.detect() is True
    assert ours.MPIEnvironment.detect() is False


def test_they_answer_what_lightnings_answer(job: str) -> None:
    name = "LightningEnvironment" if job == "nothing" else job
    here, there = getattr(ours, name)(), getattr(theirs, name)()
    questions = [*QUESTIONS, "creates_processes_externally", "main_address"]
    for question in [*questions, *([] if job == "nothing" else ["main_port"])]:
        found, expected = getattr(here, question), getattr(there, question)
        assert (found() if callable(found) else found) == (expected() if callable(expected) else expected), question
    if job == "SLURMEnvironment":
        assert (here.job_id(), here.job_name()) == (there.job_id(), there.job_name()) == (1234, "train")
    if job != "nothing":
        with pytest.raises(ConfigurationError, match="are not the"):
            here.validate_settings(num_devices=3, num_nodes=1)
        here.validate_settings(num_devices=here.world_size(), num_nodes=1)


def test_a_job_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    found = ours.MPIEnvironment()
    assert found.detect() and [getattr(found, question)() for question in QUESTIONS] == [2, 1, 1, 0]


@pytest.mark.parametrize("job", ["nothing"], indirect=True)
def test_given_to_a_trainer(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert L.Trainer(**SETTINGS, plugins=[ours.LightningEnvironment(), ours.DoublePrecision()]).precision == "64-true"
    for name, launcher in (
        ("TorchElastic", "torchrun"),
        ("SLURM", "srun"),
        ("MPI", "mpirun"),
        ("Kubeflow", "Kubeflow"),
    ):
        with pytest.raises(ConfigurationError, match=f"start the script with {launcher}"):
            L.Trainer(**{**SETTINGS, "devices": 2}, plugins=getattr(ours, f"{name}Environment")())
        with warnings.catch_warnings():  # one process asks no environment, under Lightning neither
            warnings.simplefilter("error")
            L.Trainer(**SETTINGS, plugins=getattr(ours, f"{name}Environment")())
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # a batch script's only task
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        L.Trainer(**SETTINGS, plugins=[ours.SLURMEnvironment(auto_requeue=False)])
    with pytest.warns(UserWarning, match="not put back into the queue"):
        L.Trainer(**SETTINGS, plugins=[ours.SLURMEnvironment(requeue_signal=10)])
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NTASKS", "1")  # what makes Lightning put it back into the queue
    with pytest.warns(UserWarning, match="in a job of SLURM's: a run that SLURM stops by SIGTERM saves a checkpoint"):
        L.Trainer(**SETTINGS)
    for name, value in ("SLURM_JOB_NAME", "bash"), ("SLURM_PROCID", "1"):
        with monkeypatch.context() as another, warnings.catch_warnings():
            warnings.simplefilter("error")
            another.setenv(name, value)
            L.Trainer(**SETTINGS)
            L.Trainer(**SETTINGS, plugins=[ours.SLURMEnvironment(auto_requeue=False)])
    monkeypatch.delenv("SLURM_NTASKS")
    set_current_job(Job(world_size=2, local_world_size=2, origin="slurm"))
    try:
        with pytest.raises(ConfigurationError, match="one of 2 that slurm started"):
            L.Trainer(**{**SETTINGS, "devices": 2}, plugins=[ours.LightningEnvironment()])
    finally:
        set_current_job(None)


class Own(ours.ClusterEnvironment):
    creates_processes_externally, main_address, main_port = True, "10.0.0.1", 29501

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return 2

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return 1

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 1


def test_an_environment_of_the_projects_own() -> None:
    assert Own().world_size() == 2
    with pytest.raises(ConfigurationError, match="no job through Own: leave it out and set RANK, WORLD_SIZE"):
        L.Trainer(**SETTINGS, plugins=[Own()])
    with pytest.raises(TypeError, match="abstract"):
        ours.ClusterEnvironment()
