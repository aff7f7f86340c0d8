"""The page that lists Lightning's surface is complete and true; what is asked for is done or refused, never ignored."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch

import drivetrain.lightning as L
from drivetrain.errors import ConfigurationError
from tests.facade.recorder import QUIET

SILENT: dict[str, Any] = {**QUIET, "logger": False}
SUBMODULES = ("callbacks", "loggers", "strategies", "profilers", "utilities", "plugins", "accelerators", "tuner")


REFUSED_WHEN_MADE = (
    *("to_tensorrt", "ModelParallelStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"),
    *("CometLogger", "LitLogger", "MPSAccelerator", "XLAAccelerator"),
)


def _public(kind: type, base: type = object) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - set(dir(base))


def _surface() -> dict[str, set[str]]:
    trainer = theirs.Trainer(**SILENT)
    found = {
        "Trainer arguments": set(inspect.signature(theirs.Trainer.__init__).parameters) - {"self"},
        "Trainer": _public(theirs.Trainer) | {name for name in vars(trainer) if not name.startswith("_")},
        "LightningModule": _public(theirs.LightningModule, torch.nn.Module),
        "LightningDataModule": _public(theirs.LightningDataModule),
        "Callback": _public(theirs.Callback),
    }
    for name in SUBMODULES:
        module = importlib.import_module(f"lightning.pytorch.{name}")
        found[name] = set(getattr(module, "__all__", ["Tuner"]))
    return found


def page(repository: Path) -> dict[str, dict[str, str]]:
    listed: dict[str, dict[str, str]] = {}
    for line in (repository / "docs" / "lightning-surface.md").read_text().splitlines():
        if line.startswith("## "):
            section = listed.setdefault(line[3:], {})
        elif row := re.match(r"\| `([\w.]+)` \| (same|better|not offered|to come) \| (.*) \|$", line):
            assert row[1] not in section, line
            assert row[3] or row[2] in ("same", "to come"), f"{line}: say how, or why not"
            section[row[1]] = row[2]
        else:
            assert not line.startswith("| `"), f"{line} is no row"
    return listed


def test_the_page_lists_every_member(repository: Path) -> None:
    listed = page(repository)
    for kind, members in _surface().items():
        assert sorted(listed[kind]) == sorted(members), kind


def test_the_page_says_what_is_there(repository: Path) -> None:
    listed = page(repository)
    trainer = L.Trainer(**SILENT)
    owners: dict[str, Any] = {
        "Trainer": trainer,
        "LightningModule": L.LightningModule(),
        "LightningDataModule": L.LightningDataModule(),
        "Callback": L.Callback(),
        **{name: importlib.import_module(f"drivetrain.lightning.{name}") for name in SUBMODULES},
    }
    arguments = inspect.signature(L.Trainer.__init__).parameters
    theirs_too = inspect.signature(theirs.Trainer.__init__).parameters
    for name in listed["Trainer arguments"]:
        assert arguments[name].default == theirs_too[name].default, name
    wrong = []
    for kind, owner in owners.items():
        for name, here in listed[kind].items():
            there = name in dir(type(owner)) or hasattr(owner, name)
            refused = name in REFUSED_WHEN_MADE  # there, to say the way out
            if there is not (here in ("same", "better") or refused):
                wrong.append(f"{kind}.{name} is {'there' if there else 'not there'}, the page says {here}")
    assert not wrong


# -- arguments --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_registry": "x"}, "copy trainer.checkpoint_callback.best_model_path"),
        ({"plugins": [object()]}, "is no Precision"),
        ({"plugins": [L.plugins.DoublePrecision()], "precision": 32}, "more than one precision"),
        ({"precision": "16-true"}, "there is no precision '16-true'"),
        ({"strategy": "deepspeed_stage_3_offload"}, "nothing is offloaded here"),
        ({"strategy": "dp"}, "there is no strategy 'dp'"),
        ({"accelerator": "tpu"}, "accelerator='tpu'"),
        ({"max_epoch": 3}, "did you mean 'max_epochs'"),
        ({"profiler": "sample"}, "there is no profiler"),
        ({"val_check_interval": "1:2"}, "give a time"),
        ({"max_time": {"seconds": -1}}, "give a time"),
        ({"barebones": True, "profiler": "simple", "logger": None}, "which goes against"),
    ],
)
def test_what_is_not_offered_names_the_way_out(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        L.Trainer(**{**SILENT, "enable_checkpointing": None, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "devices", "name", "options"),
    [
        ("auto", 1, "single", {}),
        ("auto", 2, "ddp", {}),
        ("ddp", 2, "ddp", {"find_unused_parameters": False}),
        ("ddp_spawn", 2, "ddp", {}),
        ("ddp_notebook_find_unused_parameters_true", 2, "ddp", {"find_unused_parameters": True}),
        ("ddp_find_unused_parameters_false", 2, "ddp", {"find_unused_parameters": False}),
        ("fsdp", 2, "fsdp", {}),
        ("deepspeed", 2, "zero", {"stage": 2}),
        ("deepspeed_stage_1", 2, "zero", {"stage": 1}),
        (L.strategies.DDPStrategy(find_unused_parameters=True, static_graph=False), 2, "ddp", {"static_graph": False}),
        (L.strategies.DeepSpeedStrategy(stage=3), 2, "zero", {"stage": 3}),
        ("ring", 2, "ring", {}),
    ],
)
def test_strategies(strategy: Any, devices: int, name: str, options: dict[str, Any]) -> None:
    trainer = L.Trainer(**{**SILENT, "devices": devices}, strategy=strategy)
    assert trainer.strategy_name == name and trainer.world_size == devices
    for option, value in options.items():
        assert getattr(trainer.strategy_options, option) == value
    assert isinstance(trainer.strategy, L.strategies.DDPStrategy) is (name == "ddp")


def test_a_strategy_whose_import_was_not_changed_is_told() -> None:
    with pytest.raises(
        TypeError, match=r"DDPStrategy\(\.\.\.\) is of lightning\.pytorch\.strategies\.ddp: give a name"
    ):
        L.Trainer(**SILENT, strategy=theirs.strategies.DDPStrategy())


def test_a_strategys_accelerator_is_the_trainers() -> None:
    asked = L.strategies.DDPStrategy(accelerator="cpu")
    free = {name: value for name, value in SILENT.items() if name != "accelerator"}
    assert L.Trainer(**free, strategy=asked).accelerator_name == "cpu"
    asked = L.strategies.DDPStrategy(accelerator=L.accelerators.CPUAccelerator())
    assert L.Trainer(**free, strategy=asked).accelerator_name == "cpu"
    for library in (theirs, L):
        twice = library.strategies.DDPStrategy(accelerator=library.accelerators.CPUAccelerator())
        with pytest.raises(library.utilities.exceptions.MisconfigurationException, match="accelerator"):
            library.Trainer(**{**SILENT, "accelerator": "cpu"}, strategy=twice)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [16, "16", "16-mixed", "bf16", "bf16-true", 32, "64", 64, None])
def test_precisions(given: Any) -> None:
    assert L.Trainer(**SILENT, precision=given).precision == theirs.Trainer(**SILENT, precision=given).precision


DEVICES = [(1, 1), ("1", 1), ([0], 1), ("0,", 1), ("auto", 1), ([0, 1], 2), ("0,1", 2)]


@pytest.mark.parametrize(("devices", "count"), DEVICES)
def test_devices(devices: Any, count: int) -> None:
    assert L.Trainer(**{**SILENT, "devices": devices}).num_devices == count


def test_the_environment_overrides_defaults_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    trainer = L.Trainer(**SILENT, precision="64-true")
    assert trainer.max_epochs == 7 and trainer.precision == "64-true"


# -- imports ----------------------------------------------------------------------------------------------------
DEEP = {
    "callbacks.finetuning": "multiplicative",
    "callbacks.prediction_writer": "WriteInterval",
    "callbacks.progress.progress_bar": "get_standard_metrics",
    "callbacks.progress.rich_progress": "RichProgressBarTheme",
    "callbacks.timer": "Interval",
    "core.saving": "load_hparams_from_yaml save_hparams_to_yaml convert update_hparams",
    "loggers.logger": "DummyLogger",
    "utilities.memory": "is_cuda_out_of_memory is_cudnn_snafu is_out_of_cpu_memory recursive_detach",
    "utilities.types": "LRSchedulerConfig",
}


def test_published_imports() -> None:
    from drivetrain.lightning.callbacks.early_stopping import EarlyStopping
    from drivetrain.lightning.core.module import LightningModule
    from drivetrain.lightning.pytorch.callbacks import EarlyStopping as Again
    from drivetrain.lightning.pytorch.loggers.tensorboard import TensorBoardLogger
    from drivetrain.lightning.trainer.states import TrainerFn
    from drivetrain.lightning.utilities.rank_zero import rank_zero_only
    from drivetrain.lightning.utilities.types import STEP_OUTPUT

    assert EarlyStopping is Again is L.callbacks.EarlyStopping and LightningModule is L.LightningModule
    assert TensorBoardLogger is L.loggers.TensorBoardLogger and L.pytorch.Trainer is L.Trainer
    assert TrainerFn.FITTING == "fit" and rank_zero_only(lambda: 3)() == 3 and STEP_OUTPUT is not None
    assert (
        importlib.import_module("drivetrain.lightning.loggers.logger").rank_zero_experiment(lambda logger: 4)(None) == 4
    )
    for path, names in DEEP.items():
        found = importlib.import_module(f"drivetrain.lightning.{path}")
        assert all(getattr(found, name) is not None for name in names.split()), path
    assert L.callbacks.__spec__.name == "drivetrain.lightning.callbacks"
    with pytest.raises(ImportError):
        importlib.import_module("drivetrain.lightning.nothing")
    with pytest.raises(ImportError, match="Nothing"):  # and not the module itself under that name
        from drivetrain.lightning.callbacks import Nothing  # noqa: F401
    with pytest.raises(ImportError, match="nothing"):
        from drivetrain.lightning.utilities import nothing  # noqa: F401


def test_deep_names_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning imports them all; an import somewhere else in these tests would make them attributes."""
    modules = importlib.import_module("drivetrain.lightning.trainer"), L.utilities
    for module, name in zip(modules, ("states", "model_summary"), strict=True):
        monkeypatch.delitem(vars(module), name, raising=False)
    assert L.utilities.model_summary.summarize(torch.nn.Linear(2, 1)).total_parameters == 3
    assert modules[0].states.TrainerFn.FITTING == "fit" and modules[0].trainer.Trainer is L.Trainer
    assert L.callbacks.progress.rich_progress.RichProgressBar is L.callbacks.RichProgressBar


def test_seed_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    with torch.random.fork_rng():
        assert L.seed_everything() == 5
        assert L.seed_everything(9, workers=True) == 9
        ours = torch.rand(2)
        theirs.seed_everything(9)
        assert torch.equal(ours, torch.rand(2))
    said = capsys.readouterr()  # beside what the script prints, as under Lightning
    assert "seed set to 9" in said.err and not said.out


# -- parts ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_combined_loader(mode: str) -> None:
    from lightning.pytorch.utilities import CombinedLoader as Their

    ours = L.utilities.CombinedLoader({"a": range(3), "b": range(10, 12)}, mode)
    their = Their({"a": range(3), "b": range(10, 12)}, mode)
    assert len(iter(ours)) == len(iter(their))
    assert list(ours) == list(their)


def test_exports(tmp_path: Path) -> None:
    module = L.demos.BoringModel()
    module.example_input_array = torch.randn(1, 32)
    module.train()
    x = torch.randn(3, 32)
    for method in ("script", "trace"):
        found = module.to_torchscript(tmp_path / "module.pt", method=method)
        assert torch.equal(found(x), module(x)) and module.training and module._trainer is None
        assert torch.equal(torch.jit.load(tmp_path / "module.pt")(x), module(x))
    with pytest.raises(ConfigurationError, match="'script' or 'trace'"):
        module.to_torchscript(method="neither")
    module.save_hyperparameters({"lr": 0.1})  # what it keeps with them is nothing for TorchScript to compile
    assert torch.equal(module.to_torchscript()(x), module(x))
    assert not module.freeze().training and not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("method", ["script", "trace"])
def test_exports_of_modules_within_modules(method: str) -> None:
    """None of them needs a trainer for it, and those that have one keep it."""

    class Outer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.Sequential(L.demos.BoringModel(), torch.nn.ReLU())
            self.part = L.demos.DemoModel(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.parts(x), self.part(x)], 1)

    module, x = Outer(), torch.randn(3, 32)
    attached = module.part._trainer = object()
    found = module.to_torchscript(method=method, example_inputs=x)
    assert torch.equal(found(x), module(x))
    assert module._trainer is module.parts[0]._trainer is None and module.part._trainer is attached


def test_init_module() -> None:
    trainer = L.Trainer(**SILENT, precision="64-true")
    with trainer.init_module(empty_init=True):
        layer = torch.nn.Linear(2, 2)
    assert layer.weight.dtype is torch.float64


def test_scripts_that_print_the_name_start(capsys: pytest.CaptureFixture[str]) -> None:
    from drivetrain.lightning import LIGHTNING_LOGO, cli_lightning_logo

    cli_lightning_logo()
    assert LIGHTNING_LOGO in capsys.readouterr().out


def test_validation_by_time() -> None:
    class Counting(L.demos.BoringModel):  # type: ignore[misc]
        times = 0

        def on_validation_start(self) -> None:
            self.times += 1

    module = Counting()
    trainer = L.Trainer(**SILENT, max_epochs=1, val_check_interval={"seconds": 1000}, num_sanity_val_steps=0)
    trainer.fit(module)
    assert module.times == 0
    trainer = L.Trainer(**SILENT, max_epochs=1, val_check_interval={"milliseconds": 1}, num_sanity_val_steps=0)
    trainer.fit(module)
    assert module.times > 1


def test_fast_dev_run_keeps_what_projects_use(tmp_path: Path) -> None:
    for library in (theirs, L):
        csv = library.loggers.CSVLogger(tmp_path)
        trainer = library.Trainer(**{**QUIET, "logger": csv, "enable_checkpointing": True, "fast_dev_run": True})
        assert trainer.checkpoint_callback.best_model_path == "" and len(trainer.loggers) == 1
        assert trainer.logger.experiment.add_scalar("a", 1, 2) is None and trainer.logger.watch(3) is None
        assert not library.Trainer(**{**QUIET, "logger": False, "fast_dev_run": True}).loggers
    assert not list(tmp_path.iterdir())
