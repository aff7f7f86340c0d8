from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import app
from drivetrain.cli import request as requests
from drivetrain.cli.accelerators import _listed_by_driver, visible
from drivetrain.cli.request import Request
from drivetrain.errors import ConfigurationError
from drivetrain.launch.job import Job
from tests.app.fakes import Options, only

# What the user types, and what the sentence must name.
BAD = [
    ("=3", ["cannot read", "=3", "key=value"]),
    ("strategy=ddp strategy.bucket_cap_mb=nan", ["strategy.bucket_cap_mb=nan must be finite"]),
    ("strategy=ddp strategy.bucket_cap_mb=inf", ["strategy.bucket_cap_mb=inf must be finite"]),
    ("strategy=federated strategy.fraction=nan", ["strategy.fraction=nan must be finite"]),
    ("strategy=rng", ["strategy", "rng", "ring"]),
    ("strategy=[1,2]", ["there is no strategy '1'"]),
    ("logger=[csv,null]", ["there is no logger 'null'"]),
    ("strategy={a:1}", ["there is no strategy", "a"]),
    ("strategy=ddp --multi-run", ["there is no flag '--multi-run'", "'--multirun'"]),
    ("--cfg", ["--cfg", "expected one argument", "--help"]),
    ("--cfg jobs", ["--cfg", "jobs", "'job'"]),
    ("recipe=mnits", ["recipe", "mnits", "'mnist'"]),
    ("optimizer=adan", ["optimizer", "adan", "'adam'"]),
    ("data=null", ["data", "null", "mnist"]),
    ("precision=17", ["precision", "17", "32-true"]),
    ("precision=16-mixd", ["'16-mixed'"]),
    ("sed=3", ["sed", "'seed'"]),
    ("optimizer.lrr=3", ["optimizer.lrr", "'lr'"]),
    ("model.dropot=0.1", ["model.dropot", "'dropout'"]),
    ("strategy=mine strategy.rat=1", ["strategy.rat", "'rate'"]),
    ("strategy=mine strategy.rounds=few", ["strategy.rounds=few", "whole number"]),
    ("trainer.max_epoch=3", ["trainer.max_epoch", "'max_epochs'"]),
    ("+trainer.max_epoch=3", ["trainer.max_epoch", "'max_epochs'"]),
    ("+trainr.max_epochs=3", ["'trainr'", "'trainer'"]),
    ("+lr=3 optimizer.lr=0.1", ["'lr'", "${lr}"]),
    ("trainer.max_epochs=many", ["trainer.max_epochs=many", "whole number"]),
    ("trainer.max_epochs=-2", ["trainer.max_epochs=-2", "at least 0"]),
    ("trainer.limit_train_batches=-1", ["limit_train_batches=-1", "at least 0"]),
    ("trainer.limit_val_batches=1.5", ["limit_val_batches=1.5", "1.0"]),
    ("trainer.accumulate_grad_batches=0", ["accumulate_grad_batches=0", "at least 1"]),
    ("trainer.max_time=5", ["trainer.max_time='5'", "DD:HH:MM:SS"]),
    ("trainer.max_time=00:00:00:-5", ["trainer.max_time", "DD:HH:MM:SS"]),
    ("trainer.batch=globl", ["trainer.batch=globl", "'global'"]),
    ("trainer.gradient_clip_val=-1", ["gradient_clip_val", "at least 0"]),
    ("trainer.gradient_clip_val=.nan", ["gradient_clip_val", "nan"]),
    ("launcher.timeout=0", ["launcher.timeout", "greater than 0"]),
    ("devices=0", ["devices=0", "at least 1"]),
    ("devices=two", ["devices=two", "auto"]),
    ("devices=2000000 accelerator=cuda", ["cuda", "cpu"]),
    ("num_nodes=2 node_rank=2", ["node_rank=2", "num_nodes=2"]),
    ("seed=-1", ["seed=-1", "at least 0"]),
    ("task=tests", ["task=tests", "'test'"]),
    ("backend=mpi", ["backend=mpi", "gloo"]),
    ("backend=nccl accelerator=cpu", ["nccl", "gloo"]),
    ("resume=no/such", ["no/such", "auto"]),
    ("resume=.", ["resume=.", "neither a checkpoint nor a run folder"]),
    ("resume=file", ["resume=file", "file is not a checkpoint"]),
    ("resume=lines", ["resume=lines", "lines is not a checkpoint"]),
    ("resume=" + "x" * 300, ["resume=xxx", "too long"]),
    ("resume=last", ["resume=last", "no checkpoint in", "hydra.run.dir"]),
    ("model=none", ["model"]),
    ("model._target_=nowhere.Net", ["nowhere", "model._target_"]),
    ("+callbacks.early_stoping.monitor=a", ["early_stoping", "'early_stopping'"]),
    ("+callbacks.progress=3", ["callbacks.progress=3"]),
    ("+logger.tensorbord={}", ["tensorbord", "'tensorboard'"]),
    ("precision.loss_scale=-2", ["loss_scale=-2"]),
    ("strategy=picky precision=bf16-mixed", ["picky", "bf16-mixed", "32-true"]),
    ("strategy=picky devices=1", ["picky", "at least 2 workers"]),
    ("strategy=picky trainer.gradient_clip_val=1 trainer.gradient_clip_algorithm=value", ["picky", "value", "norm"]),
    ("strategy=single devices=2", ["single", "devices=1"]),
    ("seed=1,2", ["seed=1,2", "-m"]),
    ("a=b=c", ["a=b=c"]),
    ("hydra.run.dir=/proc/nothing", ["/proc/nothing", "hydra.run.dir"]),
    ("hydra.run.dir=" + "x" * 300, ["xxx", "too long", "hydra.run.dir"]),
    ("checkpoint.dir=" + "x" * 300, ["xxx", "too long"]),
    ("hydra.run.dir=file/below", ["file", "hydra.run.dir"]),
    ("checkpoint.dir=/proc/nothing", ["/proc/nothing"]),
    ("-m strategy=single,rng", ["rng", "ring"]),
    ("-m seed=1,2 sed=3", ["sed", "'seed'"]),
    ("--config-dir nowhere", ["nowhere"]),
    ("task=fit --config-dir nowhere seed=1", ["nowhere"]),
    ("--config-path here", ["--config-dir here"]),
]


@pytest.mark.parametrize(("words", "named"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_sentence_and_leaves_nothing(
    words: str, named: list[str], home: Path, strangers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "file").touch()
    (home / "lines").write_text("of\nseveral")
    assert app.run(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    for word in named:
        assert word in said.err
    assert sorted(path.name for path in home.iterdir()) == ["file", "lines"]


def test_defaults(request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "gpu_count", lambda: 0)
    assert only(request_of().plan) == "ddp on 2 x cpu over gloo"
    assert only(request_of(["strategy=single"]).plan) == "single on 1 x cpu over gloo"
    assert only(request_of(["strategy=mine", "devices=3", "num_nodes=2"]).plan) == "mine on 6 x cpu over gloo"
    monkeypatch.setattr(requests, "gpu_count", lambda: 4)
    assert only(request_of(["strategy=mine"]).plan) == "mine on 4 x cuda over nccl"
    assert only(request_of(["strategy=mine", "accelerator=cpu"]).plan) == "mine on 2 x cpu over gloo"
    with pytest.raises(ConfigurationError, match="5 workers need 5 GPUs but this machine has 4"):
        request_of(["strategy=mine", "devices=5"])


def test_a_strategy_without_yaml_has_its_declared_options(request_of: Callable[..., Request]) -> None:
    assert request_of(["strategy=mine"]).plan.options == Options()
    request = request_of(["strategy=mine", "strategy.rate=1", "strategy.rounds=7"])
    assert request.plan.options == Options(rate=1.0, rounds=7)
    assert request.config["strategy"] == {"name": "mine", "rate": 1.0, "rounds": 7}


def test_types_and_null_arrive_as_written(request_of: Callable[..., Request]) -> None:
    trainer = request_of(
        ["trainer.limit_train_batches=0.5", "trainer.limit_val_batches=3", "trainer.max_epochs=null"]
    ).config["trainer"]
    assert (trainer["limit_train_batches"], trainer["limit_val_batches"], trainer["max_epochs"]) == (0.5, 3, None)
    assert isinstance(trainer["limit_val_batches"], int)


def test_joined_job_decides_the_number_of_workers(request_of: Callable[..., Request]) -> None:
    job = Job(rank=1, world_size=3, local_rank=1, local_world_size=3, origin="torchrun")
    assert request_of(joined=job).plan.world_size == 3
    assert request_of(["devices=3"], joined=job).workers == 3
    with pytest.raises(ConfigurationError, match="devices=2 but torchrun started 3"):
        request_of(["devices=2"], joined=job)


def test_joined_workers_of_one_node_meet_by_the_time_to_start(request_of: Callable[..., Request]) -> None:
    job = Job(rank=1, world_size=3, local_rank=1, local_world_size=3, origin="torchrun")
    assert request_of(["launcher.start_timeout=90"], joined=job).in_vain == ()
    (sentence,) = request_of(["launcher.start_timeout=90"]).in_vain
    assert sentence.startswith("launcher.start_timeout=90.0 has no effect with num_nodes=1")


def test_callbacks_by_name_target_and_null(request_of: Callable[..., Request]) -> None:
    request = request_of(
        [
            "callbacks.progress_bar=null",
            "+callbacks.second={name: timer}",
            "+callbacks.own={_target_: tests.app.fakes.Own}",
        ]
    )
    assert request.config["callbacks"]["progress_bar"] is None
    both = request_of(["callbacks=[default,timer]"]).config["callbacks"]
    assert "timer" in both and "model_summary" in both


@pytest.mark.parametrize(
    ("present", "mask", "left"),
    [(4, None, 4), (4, "", 0), (4, "0,2", 2), (4, "-1", 0), (4, "0,9,1", 1), (2, "GPU-ab,MIG-cd", 2), (0, "0", 0)],
)
def test_visible_gpus(present: int, mask: str | None, left: int) -> None:
    assert visible(present, mask) == left


NVML = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int nvmlInit_v2(void) {
    FILE *told = fopen(getenv("FAKE_NVML_TOLD"), "w");
    fprintf(told, "%d", (int)getpid());
    fclose(told);
    return atoi(getenv("FAKE_NVML_FAILS"));
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
"""
ASK = "import os; from drivetrain.cli.accelerators import present; print(present(), os.getpid())"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to make a driver with")
@pytest.mark.parametrize("fails", [0, 1])
def test_gpus_are_counted_by_another_process(fails: int, tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    told = tmp_path / "told"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "FAKE_NVML_TOLD": str(told),
        "FAKE_NVML_FAILS": str(fails),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    count, process = done.stdout.split()
    assert int(count) == (_listed_by_driver() if fails else 3)
    assert told.read_text() not in ("", process), "the driver was begun where workers are forked"
