"""Names, options and combinations that cannot be meant, each answered in one sentence before a process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from drivetrain import Trainer, app, registry
from drivetrain.compressor import NONE, Averaged, Bucket, Compressor, CompressorDeclaration, Transport
from drivetrain.declaration import Declaration, Plan, Support, conflicts
from drivetrain.errors import ConfigurationError
from drivetrain.folders import folder
from tests.compression.test_compressors import LOSSY
from tests.compression.test_runs import Watch
from tests.patience import LIMIT
from tests.runs import QUIET, Classifier, difference, loader, train

BAD: list[tuple[Any, list[str]]] = [
    ("topkk", ["'topkk'", "'topk'"]),
    ({"name": "powersdg"}, ["'powersdg'", "'powersgd'"]),
    ({"ratio": 0.1}, ["name"]),
    ({"name": "topk", "ratoi": 0.1}, ["compression.ratoi", "'ratio'"]),
    ({"name": "topk", "ratio": 0}, ["compression.ratio=0", "greater than 0"]),
    ({"name": "topk", "ratio": 1.5}, ["compression.ratio=1.5", "at most 1"]),
    ({"name": "topk", "ratio": "much"}, ["compression.ratio=much", "a number"]),
    ({"name": "topk", "warmup_steps": -1}, ["compression.warmup_steps=-1", "at least 0"]),
    ({"name": "powersgd", "rank": 0}, ["compression.rank=0", "at least 1"]),
    ({"name": "int8", "block_size": 0}, ["compression.block_size=0", "at least 1"]),
    ({"name": "none", "ratio": 1.0}, ["compression.ratio"]),
]


@pytest.mark.parametrize(("compression", "named"), BAD)
def test_what_cannot_be_meant(compression: Any, named: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Trainer(strategy="ddp", devices=2, compression=compression, **QUIET)
    assert all(word in str(refused.value) for word in named), refused.value
    assert len(str(refused.value).splitlines()) == 1


def test_strategies_that_compress_nothing_refuse() -> None:
    with pytest.raises(ConfigurationError, match=r"strategy=single.*compression=topk.*strategy=ddp"):
        Trainer(strategy="single", compression="topk", **QUIET)
    some = Declaration("some", "", "nowhere:Nothing", support=Support(compressors=frozenset({"fp16", "bf16"})))
    plan = {"strategy": "some", "world_size": 2}
    assert [str(one) for one in conflicts(Plan(**plan, compression="topk"), some)] == [
        "strategy=some cannot send gradients through compression=topk: set compression=none or one of bf16, fp16, or"
        " use strategy=ddp."
    ]
    assert conflicts(Plan(**plan, compression="fp16"), some) == []
    assert conflicts(Plan(**plan), some) == []


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_combinations_that_would_be_wrong(strategy: str) -> None:
    unused = {"name": strategy, "find_unused_parameters": True}
    with pytest.raises(ConfigurationError, match=r"find_unused_parameters=false"):
        Trainer(strategy=unused, devices=2, compression="topk", **QUIET)
    Trainer(strategy=unused, devices=2, **QUIET)
    trainer = Trainer(strategy=strategy, devices=2, compression="fp16", max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match="LBFGS"):
        trainer.fit(Classifier("lbfgs"), loader())


def test_yaml_lists_what_is_declared() -> None:
    files = {file.stem: yaml.safe_load(file.read_text()) for file in (folder("conf") / "compression").glob("*.yaml")}
    assert set(files) == set(registry.names("compressors")) == {*LOSSY, NONE}
    for name, listed in files.items():
        declared = registry.load("compressors", listed.pop("name"))
        assert declared.name == name
        assert listed == {item.name: getattr(declared.options(), item.name) for item in fields(declared.options)}


def test_declarations_import_no_torch() -> None:
    script = (
        "import sys\nfrom drivetrain import registry\n"
        "for name in registry.names('compressors'): registry.load('compressors', name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=LIMIT)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("compression=topkk", ["topkk", "'topk'"]),
        ("compression=topk compression.ratoi=1", ["compression.ratoi", "'ratio'"]),
        ("compression=topk compression.ratio=2", ["compression.ratio=2", "at most 1"]),
        ("strategy=single compression=topk", ["single", "topk", "ddp"]),
    ],
)
def test_the_command_refuses_with_exit_code_2(
    words: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.run(["strategy=ddp", *words.split()]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in named), told
    assert list(tmp_path.iterdir()) == []


def test_the_command_compresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    words = ["--config-dir", "own", "recipe=none", "model=tiny", "data=tiny", "callbacks=none", "logger=none"]
    words += ["task=fit", "strategy=ddp", "devices=2", "hydra.run.dir=run"]
    assert app.run([*words, "compression=topk", "compression.ratio=0.2"]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["compression"] == "topk"
    assert record["communication"]["bytes_sent"] < record["communication"]["bytes_dense"]


class Halves(Compressor):
    """A stranger's: sends half of everything."""

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        sent = bucket.flat / 2
        return Averaged(transport.all_reduce(sent.clone()) / transport.world_size, sent)


HALVES = CompressorDeclaration("halves", "", f"{__name__}:Halves", fidelity="half of the gradients")


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Any:
    original: Callable[..., EntryPoints] = registry.entry_points
    mine = EntryPoints([EntryPoint("halves", f"{__name__}:HALVES", "drivetrain.compressors")])
    monkeypatch.setattr(
        registry, "entry_points", lambda **select: EntryPoints([*original(**select), *mine.select(**select)])
    )
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


class Slower(Classifier):
    """The same with half the learning rate and nothing else that looks at the gradient's size."""

    rate = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Faster(Slower):
    rate = 0.2


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_a_strangers_compressor_needs_no_change_here(strategy: str, strangers: None) -> None:
    many = train(Faster, strategy, 2, compression="halves", callbacks=Watch())
    assert max(difference(train(Slower), many).values()) < 1e-12
