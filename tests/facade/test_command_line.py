"""``drivetrain.lightning.cli`` beside what Lightning does the same: its package, class paths, what modules remember."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain.lightning as L
from drivetrain.errors import CheckpointError, ConfigurationError, MissingPackageError
from drivetrain.lightning import cli
from drivetrain.lightning.cli import package
from drivetrain.lightning.cli.class_paths import as_offered, ours, ours_in_arguments
from drivetrain.lightning.demos.boring_classes import BoringDataModule, BoringModel
from tests.lightning_parts.doubles import put_wandb

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
PLUGINS = "drivetrain_plugins.loggers"
QUIET += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


class Inner(BoringModel):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


class Outer(BoringModel):
    def __init__(self, given: Inner, depth: int = 3) -> None:
        super().__init__()
        self.given, self.own = given, Inner(7)
        self.save_hyperparameters()


class Later(BoringModel):
    """Has its parameters when they are configured."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(32, 2)


class Saving(cli.SaveConfigCallback):
    pass


class CommandLine(cli.LightningCLI):
    def __init__(self, args: cli.ArgsType = None, optimizer: cli.OptimizerCallable = torch.optim.Adam) -> None:
        super().__init__(save_config_callback=Saving, args=args)


def made(*arguments: str, **options: Any) -> Any:
    options = {"run": False, "save_config_callback": None, "seed_everything_default": False, **options}
    return cli.LightningCLI(args=[*QUIET, *arguments], **options)


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])


def test_without_the_package_it_can_be_imported_and_derived_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch-uncertainty and Lightning-UQ-Box have it: imported with their models, and nobody asks for it."""
    monkeypatch.setattr(package, "NEEDED", "a-parser-that-is-nowhere>=4.53")
    from drivetrain.lightning.cli import LightningArgumentParser

    for make, name in ((CommandLine, "CommandLine"), (LightningArgumentParser, "LightningArgumentParser")):
        said = rf"^{name} needs the package jsonargparse: pip install '"
        with pytest.raises(MissingPackageError, match=said) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_configuration_names_what_the_package_of_a_logger_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``entity`` and ``tags`` of ``wandb.init``: the parser finds them in the words of the logger's code."""
    run, _ = put_wandb(monkeypatch)
    given: dict[str, Any] = {}

    def init(entity: str | None = None, tags: list[str] | None = None, **rest: Any) -> Any:
        given.update(entity=entity, tags=tags, mode=rest.get("mode"))
        return run

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    options = ["--trainer.logger=WandbLogger", "--trainer.logger.entity=team", "--trainer.logger.tags=[a,b]"]
    logger = made(*options, "--trainer.logger.offline=true", model_class=BoringModel).trainer.logger
    assert logger.experiment is run
    assert given == {"entity": "team", "tags": ["a", "b"], "mode": "offline"}


def test_the_package_is_imported_when_it_is_used() -> None:
    asked = "import drivetrain.lightning.cli as cli, sys; cli.LightningCLI, cli.SaveConfigCallback; "
    asked += "sys.exit('jsonargparse' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def test_the_extra_installs_what_is_asked_for(repository: Path) -> None:
    with (repository / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert extras["cli"] == [package.NEEDED]


def test_an_object_of_a_class_path() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    optimizer = cli.instantiate_class(parameters, {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}})
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.SGD, 0.5)
    plateau = {"class_path": "lightning.pytorch.cli.ReduceLROnPlateau", "init_args": {"monitor": "x"}}
    assert type(cli.instantiate_class(optimizer, plateau)) is cli.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lightning.pytorch.callbacks.Timer", "drivetrain.lightning.callbacks.Timer"),
        ("pytorch_lightning.callbacks.timer.Timer", "drivetrain.lightning.callbacks.timer.Timer"),
        ("lightning.fabric.plugins.CheckpointIO", "drivetrain.lightning.fabric.plugins.CheckpointIO"),
        ({"a": ["lightning.pytorch.Trainer", 3]}, {"a": ["drivetrain.lightning.Trainer", 3]}),
        ("runs of lightning.pytorch.callbacks", "runs of lightning.pytorch.callbacks"),
        ("my.lightning.pytorch.callbacks", "my.lightning.pytorch.callbacks"),
        ("lightning.pytorch", "lightning.pytorch"),
        ({"name": "CSVLogger"}, {"name": "CSVLogger"}),
        ({"logger": "CSVLogger"}, {"logger": f"{PLUGINS}.lightning.CSVLogger"}),
        ({"trainer.logger": ["CSVLogger"]}, {"trainer.logger": [f"{PLUGINS}.lightning.CSVLogger"]}),
        ({"logger": {"class_path": "CSVLogger"}}, {"logger": {"class_path": f"{PLUGINS}.lightning.CSVLogger"}}),
        ({"logger": False, "callbacks": None}, {"logger": False, "callbacks": None}),
    ],
)
def test_class_paths_of_lightnings(given: Any, meant: Any) -> None:
    assert ours(given) == meant


def test_class_paths_of_lightnings_among_options() -> None:
    given = ["fit", "--trainer.callbacks+=ModelCheckpoint", "--trainer.logger", "lightning.pytorch.loggers.CSVLogger"]
    checkpoint = "drivetrain_plugins.callbacks.lightning_model_checkpoint.ModelCheckpoint"
    logger = "drivetrain.lightning.loggers.CSVLogger"
    assert ours_in_arguments([*given, "--model.name=CSVLogger", "CSVLogger"]) == [
        *("fit", f"--trainer.callbacks+={checkpoint}", "--trainer.logger", logger),
        *("--model.name=CSVLogger", "CSVLogger"),
    ]


def test_what_is_written_can_be_read_and_names_what_is_offered() -> None:
    for module in (L.callbacks, L.loggers, L.profilers):
        for name in module.NAMES:
            kind = getattr(module, name)
            path = f"{module.__name__}.{name}"
            assert as_offered(f"class_path: {kind.__module__}.{kind.__qualname__}\n") == f"class_path: {path}\n"


@pytest.mark.parametrize("mode", ["yaml", "omegaconf", "omegaconf+"])
def test_lightnings_classes_are_not_mixed_in(mode: str, tmp_path: Path) -> None:
    """Lightning is installed where these tests run, and its classes could be imported."""
    import jsonargparse

    (tmp_path / "logger.yaml").write_text("class_path: pytorch_lightning.loggers.CSVLogger\ninit_args: {save_dir: x}\n")
    text = "trainer:\n  accelerator: cpu\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.ModelSummary\n"
    text += f"  logger: {tmp_path / 'logger.yaml'}\nmodel: lightning.pytorch.demos.boring_classes.DemoModel\n"
    (tmp_path / "all.yaml").write_text(text)
    options: dict[str, Any] = {"run": False, "seed_everything_default": False}
    options["parser_kwargs"] = {"parser_mode": mode}
    line = cli.LightningCLI(args=["--config", str(tmp_path / "all.yaml")], **options)
    parts = [line.model, line.trainer.logger, *line.trainer.callbacks]
    assert not [type(part) for part in parts if type(part).__module__.partition(".")[0] == "lightning"]
    assert type(line.model) is L.demos.DemoModel and type(line.trainer.logger) is L.loggers.CSVLogger
    alone = jsonargparse.ArgumentParser(parser_mode=mode)  # of somebody else, in the same process
    alone.add_argument("--text", type=dict)
    assert alone.parse_args(["--text={a: lightning.pytorch.Trainer}"]).text == {"a": "lightning.pytorch.Trainer"}


def test_class_paths_in_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_MODEL", "lightning.pytorch.demos.boring_classes.DemoModel")
    monkeypatch.setenv("PL_TRAINER__LOGGER", "false")
    options: dict[str, Any] = {"parser_kwargs": {"default_env": True}, "seed_everything_default": False}
    line = cli.LightningCLI(run=False, args=["--trainer.accelerator=cpu"], **options)
    assert type(line.model) is L.demos.DemoModel and line.trainer.logger is None


@pytest.mark.parametrize("path", ["shows.Shown", "shows.within.Holder.Shown"])
def test_a_class_that_another_package_shows_is_remembered_by_that_path(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shows", "shows.within"):
        module = types.ModuleType(name)
        module.Shown, module.Holder = Inner, types.SimpleNamespace(Shown=Inner)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    model = made(f"--model={path}", "--model.size=7", model_class=BoringModel, subclass_mode_model=True).model
    assert type(model) is Inner and dict(model.hparams)["_class_path"] == path


def test_each_module_remembers_what_it_was_made_of() -> None:
    """Under Lightning those within another save that one's."""
    inner = {"class_path": f"{__name__}.Inner", "init_args": {"size": 5}}
    chosen = ["--model=Outer", "--model.given=Inner", "--model.given.size=5"]
    model = made(*chosen, model_class=BoringModel, subclass_mode_model=True).model
    found = dict(model.hparams)
    assert found.pop("_instantiator") == "lightning.pytorch.cli.instantiate_module"
    assert found == {"_class_path": f"{__name__}.Outer", "given": inner, "depth": 3}
    assert dict(model.given.hparams) == {"size": 5} and dict(model.own.hparams) == {"size": 7}


def test_an_optimizer_of_parameters_that_come_later() -> None:
    chosen = ["--optimizer=Adam", "--optimizer.lr=0.5", "--trainer.max_steps=1"]
    line = made(*chosen, model_class=Later, datamodule_class=BoringDataModule)
    line.trainer.fit(line.model, line.datamodule)
    [optimizer] = line.trainer.optimizers
    assert optimizer.param_groups[0]["lr"] == 0.5 and len(optimizer.param_groups[0]["params"]) == 2


def test_a_checkpoint_is_read_by_lightning_and_lightnings_here(tmp_path: Path) -> None:
    line = made("--model.given=Inner", "--trainer.max_steps=1", model_class=Outer, datamodule_class=BoringDataModule)
    line.trainer.fit(line.model, line.datamodule)
    line.trainer.save_checkpoint(tmp_path / "a.ckpt")
    held = torch.load(tmp_path / "a.ckpt", weights_only=True)
    for home in ("pytorch_lightning", "drivetrain.lightning"):
        held["hyper_parameters"]["_instantiator"] = f"{home}.cli.instantiate_module"
        torch.save(held, tmp_path / "b.ckpt")
        loaded = Outer.load_from_checkpoint(tmp_path / "b.ckpt", depth=8)
        assert (type(loaded.given), loaded.hparams.depth) == (Inner, 8)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), line.model.parameters(), strict=True))


class TakingAll(BoringModel):
    """Hands on what it does not name itself."""

    def __init__(self, size: int = 2, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.more = more


def test_arguments_that_only_kwargs_take_come_back(tmp_path: Path) -> None:
    """jsonargparse knows them as ``dict_kwargs``; in a checkpoint they are beside the others, as under Lightning."""
    chosen = ["--model=TakingAll", "--model.size=3", "--model.dict_kwargs.depth=4", "--trainer.max_steps=1"]
    line = made(*chosen, model_class=BoringModel, subclass_mode_model=True)
    assert line.model.more == {"depth": 4}
    line.trainer.fit(line.model)
    line.trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = TakingAll.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (loaded.hparams.size, loaded.more) == (3, {"depth": 4})
    options: dict[str, Any] = {"save_config_callback": None, "subclass_mode_model": True}
    options["seed_everything_default"] = False
    chosen = ["test", "--model=TakingAll", f"--ckpt_path={tmp_path / 'a.ckpt'}", *QUIET]
    tested = cli.LightningCLI(BoringModel, args=chosen, **options)
    assert type(tested.model) is TakingAll and tested.model.more == {"depth": 4}


def test_a_trainer_of_the_projects_own_may_have_no_arguments() -> None:
    class Bare(L.Trainer):
        def __init__(self) -> None:
            super().__init__(accelerator="cpu", logger=False)

    options: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    with pytest.warns(UserWarning, match="has no argument callbacks"):
        line = cli.LightningCLI(BoringModel, trainer_class=Bare, args=[], **options)
    assert type(line.trainer) is Bare


def test_a_callback_that_would_save_nothing_says_so() -> None:
    with pytest.raises(ConfigurationError, match="saves nothing: give it a save_config"):
        Saving(None, None, save_to_log_dir=False)  # type: ignore[arg-type]


def test_a_configuration_may_name_what_the_profiler_hands_on() -> None:
    profiler = "--trainer.profiler.class_path=PyTorchProfiler"
    line = made(profiler, "--trainer.profiler.init_args.record_shapes=true", model_class=BoringModel)
    assert type(line.trainer.profiler).__name__ == "PyTorchProfiler"
    assert line.config.trainer.profiler.init_args.record_shapes is True


class Open(BoringModel):
    """Takes an object of any class, or of one."""

    def __init__(self, given: Any = None, written: logging.Handler | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("name", ["given", "written"])
def test_a_checkpoint_names_no_class_that_is_made_unasked(name: str, tmp_path: Path) -> None:
    """Objects of the standard library's classes can do what a pickle can: this one makes a file."""
    model, file = Open(), tmp_path / "made"
    chosen = {"class_path": "logging.FileHandler", "init_args": {"filename": str(file)}}
    saved = {"_instantiator": "lightning.pytorch.cli.instantiate_module", name: chosen}
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": saved}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"an object of logging\.FileHandler, which is not made unasked"):
        Open.load_from_checkpoint(tmp_path / "a.ckpt")
    assert not file.exists()
    assert Open.load_from_checkpoint(tmp_path / "a.ckpt", **{name: None}).hparams[name] is None
    made = Open.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False).hparams[name]
    assert type(made) is logging.FileHandler
    made.close()


@pytest.mark.parametrize(
    ("path", "argument"),
    [("torch.package.PackageExporter", "f"), ("torch.utils.tensorboard.SummaryWriter", "log_dir")],
)
def test_classes_of_torch_are_made_unasked_only_where_they_are_parts_of_a_network(
    path: str, argument: str, tmp_path: Path
) -> None:
    model, made = Open(), tmp_path / "made"
    harmless = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 1}}
    for chosen in (harmless, {"class_path": path, "init_args": {argument: str(made)}}):
        saved = {"_instantiator": "lightning.pytorch.cli.instantiate_module", "given": chosen}
        torch.save({"state_dict": model.state_dict(), "hyper_parameters": saved}, tmp_path / "a.ckpt")
        if chosen is harmless:
            assert (
                type(Open.load_from_checkpoint(tmp_path / "a.ckpt", strict=False).hparams["given"]) is torch.nn.Linear
            )
            continue
        with pytest.raises(CheckpointError, match="which is not made unasked"):
            Open.load_from_checkpoint(tmp_path / "a.ckpt")
        assert not made.exists()


class Written(cli.LightningCLI):
    """Makes its parser by itself, as a project does that adds words to it, of the parts that Lightning's has."""

    def setup_parser(self, add_subcommands: bool, main_kwargs: Any, subparser_kwargs: Any) -> None:
        self.parser = self.init_parser(**main_kwargs)
        self.parser.add_argument("--more", default=1)
        self._subcommand_method_arguments = {}
        self._add_subcommands(self.parser, **subparser_kwargs)


def test_a_project_may_make_the_parser_by_itself(tmp_path: Path) -> None:
    words = ["fit", *QUIET, "--trainer.max_steps=1", f"--trainer.default_root_dir={tmp_path}"]
    made = Written(BoringModel, BoringDataModule, None, seed_everything_default=False, args=words)
    assert made.trainer.global_step == 1 and made.config.more == 1
