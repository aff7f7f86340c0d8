"""Options that have no effect in the run at hand: every declared one, over the registry."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Trainer, app, registry
from drivetrain import lightning as L
from drivetrain.cli import worker
from drivetrain.cli.options import JobOptions, LauncherOptions, TrainerOptions
from drivetrain.cli.request import Request
from drivetrain.compressor import CompressorDeclaration
from drivetrain.configuration import Configuration
from drivetrain.declaration import Declaration, Plan
from drivetrain.dependent_arguments import DEPENDENTS
from drivetrain.dependent_options import Dependent, in_vain, of_options
from drivetrain.errors import IdleOptionWarning, WorkerError
from drivetrain.support import declarations
from tests.runs import QUIET, Classifier, loader

COMPRESSORS = {name: registry.load("compressors", name) for name in registry.names("compressors")}
PARTS: dict[str, Declaration | CompressorDeclaration] = {
    **{f"strategy={name}": one for name, one in declarations().items()},
    **{f"compression={name}": one for name, one in COMPRESSORS.items()},
}
DEPENDING = [pytest.param(part, one, id=f"{part}-{one.option}") for part, d in PARTS.items() for one in d.dependents]


def another(value: Any) -> Any:
    """A value of an option that is not its default."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value / 2 if isinstance(value, float) else "another"


def said(part: str, options: dict[str, Any], more: dict[str, Any]) -> list[str]:
    """What is told of a run with ``options`` of the part, and in which ``more`` is so."""
    where, declaration = part.partition("=")[0], PARTS[part]
    plan = Plan("any", world_size=more.get("devices", 1))
    changes = {"accumulation": more.get("accumulate_grad_batches", 1), "precision": more.get("precision", "32-true")}
    return in_vain(
        replace(plan, **changes), [of_options(where, declaration.options(**options), declaration.dependents)]
    )


def with_effect(declaration: Any, option: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What gives ``option`` an effect: other options of its part, and the rest."""
    needs = {key: value for one in declaration.dependents if one.option == option for key, value in one.needs.items()}
    own = {key[1:]: value for key, value in needs.items() if key.startswith(".")}
    return own, {key: value for key, value in needs.items() if not key.startswith(".")}


@pytest.mark.parametrize("part", PARTS)
def test_there_is_what_is_declared_and_defaults_say_nothing(part: str) -> None:
    known = {item.name for item in fields(PARTS[part].options)}
    for one in PARTS[part].dependents:
        assert {one.option, *(key[1:] for key in one.needs if key.startswith("."))} <= known
        given = {key for key in one.needs if not key.startswith(".")}
        assert given <= {"devices", "precision", "accumulate_grad_batches"}
    for workers in (1, 2):
        assert said(part, {}, {"devices": workers}) == []


# What takes the effect, where the default does not.
TAKING = {"mix": "gradients", "ratio": 1.0, "clients_per_round": 3, "local_steps": 3, "stage": 0}


@pytest.mark.parametrize(("part", "one"), DEPENDING)
def test_who_sets_it_in_vain_is_told_and_the_way_out_is_one(part: str, one: Dependent) -> None:
    usual = PARTS[part].options()
    value = another(getattr(usual, one.option))
    own, more = with_effect(PARTS[part], one.option)
    assert not said(part, {**own, one.option: value}, more)
    for key, needed in one.needs.items():  # all is there but this
        lacking = {name: kept for name, kept in own.items() if f".{name}" != key}
        if key.startswith(".") and getattr(usual, key[1:]) == needed:
            lacking[key[1:]] = TAKING[key[1:]]
        around = {name: kept for name, kept in more.items() if name != key}
        (sentence,) = said(part, {**lacking, one.option: value}, around)
        assert sentence.startswith(f"{part.partition('=')[0]}.{one.option}=") and " has no effect with " in sentence
        assert ("null" if needed is None else str(needed)) in sentence.partition(": set ")[2]


# -- the Trainer's own -------------------------------------------------------------------------------------------
IN_VAIN = [
    ("strategy=local_sgd strategy.outer_lr=0.5", "strategy.outer_lr=0.5", "strategy.outer=nesterov"),
    ("strategy=elastic_averaging strategy.local=0.1", "strategy.local=0.1", "strategy.mix=gradients"),
    ("strategy=federated strategy.mu=0.5", "strategy.mu=0.5", "strategy.algorithm=fedprox"),
    (
        "strategy=federated strategy.local_steps=2 strategy.local_epochs=3",
        "strategy.local_epochs=3",
        "strategy.local_steps=null",
    ),
    ("strategy=fsdp strategy.narrow_gather=true", "strategy.narrow_gather=true", "precision=bf16-mixed"),
    (
        "strategy=fsdp devices=1 strategy.reduce_every_micro_batch=false",
        "strategy.reduce_every_micro_batch=false",
        "devices=2",
    ),
    ("strategy=pipeline strategy.virtual_stages=3", "strategy.virtual_stages=3", "strategy.schedule=interleaved_1f1b"),
    ("devices=1 compression=topk", "compression=topk", "devices=2"),
    (
        "compression=topk compression.ratio=1.0 compression.warmup_steps=5",
        "compression.warmup_steps=5",
        "compression.ratio=0.01",
    ),
    ("devices=1 strategy.topology=tree", "strategy.topology=tree", "devices=2"),
    (
        "trainer.gradient_clip_algorithm=value",
        "trainer.gradient_clip_algorithm=value",
        "trainer.gradient_clip_val=1.0",
    ),
    (
        "trainer.overfit_batches=2 trainer.limit_train_batches=3",
        "trainer.limit_train_batches=3",
        "trainer.overfit_batches=0.0",
    ),
    (
        "trainer.overfit_batches=2 trainer.limit_val_batches=3",
        "trainer.limit_val_batches=3",
        "trainer.overfit_batches=0.0",
    ),
    (
        "trainer.limit_val_batches=0 trainer.val_check_interval=3",
        "trainer.val_check_interval=3",
        "trainer.limit_val_batches=1.0",
    ),
    (
        "trainer.limit_val_batches=0 trainer.check_val_every_n_epoch=3",
        "trainer.check_val_every_n_epoch=3",
        "trainer.limit_val_batches=1.0",
    ),
    (
        "trainer.limit_val_batches=0 trainer.num_sanity_val_steps=3",
        "trainer.num_sanity_val_steps=3",
        "trainer.limit_val_batches=1.0",
    ),
    (
        "task=fit trainer.limit_val_batches=0 trainer.inference_mode=false",
        "trainer.inference_mode=false",
        "trainer.limit_val_batches=1.0",
    ),
    ("task=fit trainer.limit_test_batches=3", "trainer.limit_test_batches=3", "task=test"),
    ("trainer.limit_predict_batches=3", "trainer.limit_predict_batches=3", "task=predict"),
    ("trainer.benchmark=true", "trainer.benchmark=true", "accelerator=cuda"),
    ("launcher.start_timeout=9", "launcher.start_timeout=9.0", "num_nodes=2"),
    ("master_port=1234", "master_port=1234", "num_nodes=2"),
    ("devices=1 backend=gloo", "backend=gloo", "devices=2"),
]


@pytest.mark.parametrize(("words", "option", "way"), IN_VAIN, ids=[words for words, *_ in IN_VAIN])
def test_a_command_line_in_vain(
    words: str, option: str, way: str, request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sentence,) = request_of(words.split()).in_vain
    assert sentence.startswith(f"{option} has no effect with ") and sentence.endswith(f": set {way}, or leave it out.")
    key = way.partition("=")[0]
    others = [word for word in words.split() if word.partition("=")[0] != key]
    monkeypatch.setattr("drivetrain.cli.request.gpu_count", lambda: 2)
    words_then = [*others, way] if "cuda" in way else [*others, way, "accelerator=cpu"]
    assert request_of(words_then).in_vain == ()


def test_every_argument_that_is_declared_is_one_and_was_tried() -> None:
    command = {item.name for options in (TrainerOptions, JobOptions, LauncherOptions) for item in fields(options)}
    script = set(inspect.signature(Configuration.__init__).parameters)
    for one in DEPENDENTS:
        assert one.option in command | script
        assert set(one.needs) <= command | script | {"task"}
    tried = {option.partition("=")[0].rpartition(".")[2] for _, option, _ in IN_VAIN}
    assert {one.option for one in DEPENDENTS} - {"sync_batchnorm"} <= tried


@pytest.mark.parametrize(
    "words",
    [
        "",
        "devices=1",
        "strategy=single",
        "recipe=char_lm",
        "recipe=char_lm task=test",
        "task=test trainer.gradient_clip_algorithm=value",
        "trainer.fast_dev_run=true trainer.limit_train_batches=3",
        "trainer.limit_val_batches=0 trainer.num_sanity_val_steps=0",
        "strategy=local_sgd strategy.outer=nesterov strategy.outer_lr=0.5",
        "strategy=local_sgd devices=1 strategy.outer=nesterov strategy.period=3",
    ],
)
def test_nothing_is_said_without_need(words: str, request_of: Callable[..., Request]) -> None:
    assert request_of(words.split()).in_vain == ()


# -- who is told, and how often -----------------------------------------------------------------------------------
@pytest.mark.usefixtures("no_training")
def test_a_command_tells_once_and_before_it_trains(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["devices=2", "callbacks=none", "logger=none", "trainer.gradient_clip_algorithm=norm"]
    assert app.run(["-m", "strategy=mine", "seed=1,2", *words]) == 0
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if "no effect" in line] == [
        "warning: trainer.gradient_clip_algorithm=norm has no effect with trainer.gradient_clip_val=null: set"
        " trainer.gradient_clip_val=1.0, or leave it out."
    ]


def test_a_real_worker_adds_nothing(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for group, name in (("model", "Tiny"), ("data", "Points")):
        (home / "own" / group).mkdir(parents=True)
        (home / "own" / group / "tiny.yaml").write_text(f"_target_: tests.app.tiny.{name}\n")
    words = ["--config-dir", str(home / "own"), "recipe=none", "model=tiny", "data=tiny", "callbacks=none"]
    assert app.run([*words, "trainer.gradient_clip_algorithm=norm", "checkpoint=none", "hydra.run.dir=run"]) == 0
    assert capfd.readouterr().err.count("no effect") == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_a_script_is_told_where_it_fits(devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    strategy = {"name": "local_sgd", "outer_lr": 0.5}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        given: dict[str, Any] = {"limit_train_batches": 5, "overfit_batches": 2, "gradient_clip_algorithm": "norm"}
        trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=1, return_weights=False, **given)
        assert not found
        trainer.fit(Classifier(), loader())
    told = [str(one.message) for one in found if one.category is IdleOptionWarning]
    assert [text.partition("=")[0] for text in told] == ["strategy.outer_lr", "limit_train_batches"]
    assert "no effect" not in capfd.readouterr().err


def test_arguments_of_callbacks(request_of: Callable[..., Request]) -> None:
    def told(*words: str) -> list[str]:
        request = request_of(list(words))
        return worker.in_vain(request.config, request.plan)

    kinds = {name: registry.load("callbacks", name) for name in registry.names("callbacks")}
    tried = set()
    for words, way in (
        ("recipe=mnist checkpoint.monitor=null", "checkpoint.monitor=val/loss"),
        ("+callbacks.timer.interval=epoch", "+callbacks.timer.duration='00:01:00:00'"),
        ("+callbacks.batch_size_finder.margin=0.1", "+callbacks.batch_size_finder.mode=binsearch"),
        (
            "+callbacks.backbone_finetuning={backbone_initial_ratio_lr:0.5,backbone_initial_lr:0.1}",
            "callbacks.backbone_finetuning.backbone_initial_lr=null",
        ),
        (
            "+callbacks.model_pruning={resample_parameters:true,use_lottery_ticket_hypothesis:false}",
            "callbacks.model_pruning.use_lottery_ticket_hypothesis=true",
        ),
    ):
        (sentence,) = told(*words.split())
        assert way.removeprefix("+").replace("'", "") in sentence.partition(": set ")[2]
        assert told(*words.split(), way) == []
        tried.add(sentence.partition("=")[0].rpartition(".")[2])
    assert told() == told("recipe=char_lm") == told("callbacks=profile", "checkpoint=none") == []
    assert tried == {one.option for kind in kinds.values() for one in kind.dependents}
    for kind in kinds.values():
        known = set(inspect.signature(kind).parameters)
        for one in kind.dependents:
            assert {one.option, *(key.removeprefix(".") for key in one.needs)} <= known


def test_batchnorm_of_all_replicas_where_there_is_none() -> None:
    trainer = Trainer(**QUIET, strategy="ddp", devices=2, max_steps=1, sync_batchnorm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", IdleOptionWarning)  # only a worker finds it
        with pytest.raises(WorkerError, match="sync_batchnorm=True has no effect: Classifier"):
            trainer.fit(Classifier(), loader())


def test_lightning_takes_it_in_silence() -> None:
    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            gradient_clip_algorithm="norm",
            benchmark=True,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(2, 2)))
    assert not [one for one in found if issubclass(one.category, IdleOptionWarning)]


def test_a_callback_with_other_arguments_than_the_one_it_derives_from_is_not_asked_for_them(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(registry.load("callbacks", "model_checkpoint")):  # type: ignore[misc]
        def __init__(self, mode: str = "min") -> None:
            super().__init__(monitor="val/accuracy", mode=mode)

    request = request_of(["strategy=single"])
    config = {"callbacks": {"mine": {"mode": "max"}, "made": {"mode": "max"}}}
    monkeypatch.setattr(registry, "load", lambda group, name: Mine if name == "mine" else lambda mode="min": Mine(mode))
    assert worker.in_vain(config, request.plan) == []
