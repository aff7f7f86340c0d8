"""The doctor: what it says of a machine that works, and of each thing that can be wrong with one."""

from __future__ import annotations

import json
import resource
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from drivetrain import __main__
from drivetrain.doctor import command, exchange, installed, machine
from drivetrain.doctor.finding import Finding
from drivetrain.errors import WorkerError


def test_where_training_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is True
    found = {one["name"]: one for one in report["findings"]}
    assert found["torch"]["found"] == version("torch")
    assert found["loopback"]["state"] == found["temporary folder"]["state"] == found["gloo"]["state"] == "ok"
    assert {"extra zero", "extra bench", "shared memory", "open files", "processors", "GPUs", "nccl"} <= set(found)
    # What was measured is what two processes on one machine can do.
    assert 1e-6 < found["gloo"]["figures"]["latency_s"] < 1.0
    assert 1e6 < found["gloo"]["figures"]["bus_bandwidth_bytes_per_s"] < 1e12


def test_where_it_does_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise WorkerError("rank 1 was killed\nand more", rank=1)

    monkeypatch.setattr(exchange, "launch", refuse)
    monkeypatch.setattr(command, "LOOKS", (exchange.exchange, lambda: [Finding("x", "odd", "warn", "is", "mend it")]))
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert "FAIL  gloo                 rank 1 was killed\n" in out
    assert out.index("FAIL  gloo: ") < out.index("warn  odd: mend it")
    assert out.endswith("training does NOT work here\n")


def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    # The workers are forked from here.
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    monkeypatch.setattr(exchange, "REPEATS", {1: 1})
    gloo = next(iter(exchange.exchange()))
    assert gloo.state == "fail"
    assert "1 + 2 over gloo came out as" in gloo.found


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["doctor", "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_packages_that_are_missing_or_old() -> None:
    assert installed.needed("torch", ">=2.11", "2.13.0+cpu").state == "ok"
    assert installed.needed("torch", ">=2.11", "2.9.1").fix == "pip install --upgrade 'torch>=2.11'"
    assert installed.needed("rich", ">=13.7", None).fix == "pip install 'rich>=13.7'"
    names = {(name, extra) for name, _, extra in installed.requirements()}
    assert {("torch", ""), ("deepspeed", "zero"), ("matplotlib", "bench"), ("matplotlib", "docs")} <= names


def test_an_extra_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version_of", lambda name: None if name == "deepspeed" else "99")
    [zero] = [one for one in installed.installed() if one.name == "extra zero"]
    assert (zero.state, zero.found) == ("note", "no deepspeed")
    assert "pip install 'drivetrain[zero]'" in zero.fix


def test_limits_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "OMP_NUM_THREADS=1 " in machine._processors(64, 1.5, None).fix
    assert machine._processors(64, 1.5, "1").state == "ok"
    assert machine._open_files(256, resource.RLIM_INFINITY).fix == "ulimit -n 65536 before training"
    assert "--ulimit nofile=65536" in machine._open_files(64, 64).fix  # which no ulimit of the user's raises
    assert machine._open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).state == "ok"
    assert machine._temporary_folder(tmp_path / "absent").state == "fail"
    (long := tmp_path / ("x" * 60)).mkdir()
    assert machine._temporary_folder(long).state == "warn"
    assert machine._shared_memory(tmp_path / "absent").state == "warn"
    monkeypatch.setattr(machine, "LEAST_SHARED", 2**60)
    assert "--shm-size" in machine._shared_memory(tmp_path).fix
    assert machine._gpus(2, 0).state == "warn" and "CUDA_VISIBLE_DEVICES" in machine._gpus(2, 0).fix
    assert machine._gpus(2, 2) == Finding("machine", "GPUs", "ok", "2 of 2")


def test_names_and_variables_that_lead_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._interface("eth7", ["lo", "eth0"]).fix == "unset GLOO_SOCKET_IFNAME, or name one of lo, eth0"
    assert machine._host_name("localhost").state == "note"
    assert machine._host_name("192.0.2.7").state == "ok"
    assert "is not resolved" in machine._host_name("nobody.invalid").found
    monkeypatch.setenv("RANK", "3")
    assert machine._launcher_variables().state == "fail"
