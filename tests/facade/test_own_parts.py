"""Strategies, accelerators and precisions that a project derives from Lightning's classes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import Precision as TheirPrecision
from torch import nn

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from drivetrain.lightning.own_parts import _OF_PRECISIONS
from drivetrain.lightning.strategies import meaning_of
from drivetrain.precision import Precision
from tests.facade.recorder import QUIET, loader, net


class Doubling(ours.strategies.SingleDeviceStrategy):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return None


class Named(ours.strategies.DDPStrategy):
    strategy_name = "a name of its own"

    def __init__(self) -> None:
        super().__init__(find_unused_parameters=True)

    @classmethod
    def register_strategies(cls, registry: Any) -> None: ...


class Clipping(ours.plugins.Precision):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None: ...


class Device(ours.accelerators.CPUAccelerator):
    def setup(self, trainer: Any) -> None: ...

    @staticmethod
    def is_available() -> bool:
        return True


@pytest.fixture
def registries() -> Iterator[tuple[Any, Any]]:
    """The registries of accelerators and of strategies, afterwards as they were."""
    both = ours.accelerators.AcceleratorRegistry, ours.strategies.StrategyRegistry
    before = [dict(one) for one in both]
    yield both
    for one, entries in zip(both, before, strict=True):
        one.clear()
        one.update(entries)


def test_what_a_project_registers_is_meant_by_its_name(registries: tuple[Any, Any]) -> None:
    accelerators, strategies = registries

    @accelerators.register("vendor", description="a vendor's devices")
    class Vendor(ours.accelerators.CPUAccelerator):
        @staticmethod
        def setup_device(device: Any) -> None: ...

    strategies.register("named", strategy=Named)
    strategies.register("two", ours.strategies.DDPStrategy, find_unused_parameters=True)
    assert {"cpu", "cuda", "vendor"} == accelerators.available_accelerators()
    assert isinstance(accelerators.get("vendor"), Vendor)
    assert strategies.get("two").wanted == {"name": "ddp", "find_unused_parameters": True}
    assert set(strategies.available_strategies()) > {"ddp", "fsdp", "named", "two"}
    for trainer in (ours.Trainer(strategy="named", **QUIET), ours.Trainer(strategy="two", **QUIET)):
        assert (trainer.strategy_name, trainer.accelerator_name) == ("ddp", "cpu")
    with pytest.raises(ConfigurationError, match="Vendor overrides setup_device, which nothing calls here"):
        ours.Trainer(**{**QUIET, "accelerator": "vendor"})


def test_a_registry_answers_as_lightnings_does(registries: tuple[Any, Any]) -> None:
    for one, name in zip(registries, ("cpu", "ddp"), strict=True):
        with pytest.raises(ConfigurationError, match="registered already"):
            one.register(name, Named)
        one.register(name, Named, override=True)
        assert isinstance(one.get(name), Named)
        one.remove(name)
        with pytest.raises(KeyError, match=f"there is no .*{name}"):
            one.get(name)
        assert one.get(name, "a default") == "a default"


def test_names_of_strategies_that_a_registry_makes_mean_what_the_trainer_takes_them_for() -> None:
    for name in ours.strategies.StrategyRegistry:
        made = ours.strategies.StrategyRegistry.get(name)
        assert meaning_of(made)[0] == meaning_of(name)[0], name


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ({"strategy": Doubling()}, "training_step"),
        ({"plugins": Clipping()}, "clip_gradients"),
        ({"plugins": [Clipping()]}, "clip_gradients"),
        ({"accelerator": Device()}, "setup"),
    ],
)
def test_what_would_be_passed_over_is_refused(part: dict[str, Any], method: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"overrides {method}, which nothing calls here: "):
        ours.Trainer(**{**QUIET, **part})


def test_what_changes_nothing_is_taken() -> None:
    trainer = ours.Trainer(**{**QUIET, "strategy": Named(), "devices": 2})
    assert trainer.strategy_name == "ddp"


def test_every_method_of_a_precision_is_called_or_refused() -> None:
    methods = {name for name in vars(TheirPrecision) if callable(vars(TheirPrecision)[name]) and name[0] != "_"}
    assert methods <= {*_OF_PRECISIONS, *dir(Precision)}


def test_a_precision_without_the_base_class_constructor_trains_alike() -> None:
    def weights(L: Any) -> list[torch.Tensor]:
        class Halved(L.plugins.Precision):  # type: ignore[misc, name-defined]
            precision = "32-true"

            def __init__(self) -> None:
                self.converted = 0

            def convert_input(self, data: Any) -> Any:
                self.converted += 1
                return [part * 0.5 if part.is_floating_point() else part for part in data]

            @contextmanager
            def forward_context(self) -> Any:
                with torch.enable_grad():
                    yield

        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        torch.manual_seed(3)
        halved, module = Halved(), Module()
        trainer = L.Trainer(**QUIET, max_epochs=1, logger=False, plugins=halved)
        trainer.fit(module, loader(22, 4))
        assert halved.converted == 6
        return [parameter.detach() for parameter in module.parameters()]

    there, here = weights(theirs), weights(ours)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


@pytest.mark.parametrize("given", [3, object(), "tensorboard"])
def test_what_is_no_logger_is_told(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"logger: {type(given).__name__} is no Logger, derive it from one"):
        ours.Trainer(logger=given)


def test_the_device_of_a_strategy_is_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    single = ours.strategies.SingleDeviceStrategy
    assert ours.Trainer(**QUIET, strategy=single()).strategy.root_device == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="accelerator='gpu' goes against the device of the strategy, a cpu"):
        ours.Trainer(**{**QUIET, "accelerator": "gpu"}, strategy=single("cpu"))
    with pytest.raises(ConfigurationError, match=r"SingleDeviceStrategy\(device='mps'\): use 'cpu' or 'cuda:0'"):
        single("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for given in "auto", "gpu", "cuda":
        asked = single("cuda:2")
        assert asked.settings["devices"] == [2]
        trainer = ours.Trainer(**{**QUIET, "accelerator": given, "devices": 4}, strategy=asked)
        assert (trainer.accelerator_name, trainer.num_devices) == ("cuda", 1)


class Counts(theirs.Callback):
    """As a package makes one for Lightning's users."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class Idle(theirs.Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...


class Rows(theirs.loggers.Logger):
    name, version = "rows", "here"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    @theirs.utilities.rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **options: Any) -> None: ...


def test_callbacks_and_loggers_that_a_package_derived_from_lightnings(tmp_path: Path) -> None:
    class Module(ours.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.brought = net(), Counts()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_callbacks(self) -> Any:
            return self.brought

    class Named(Counts):
        pass

    module, given, rows = Module(), Named(), Rows()
    options = {**QUIET, "log_every_n_steps": 1, "logger": rows, "enable_checkpointing": False}
    trainer = ours.Trainer(**{**options, "max_epochs": 1}, callbacks=[Idle(), given, Idle()])
    trainer.fit(module, loader())
    steps = trainer.global_step
    assert (given.steps, module.brought.steps) == (steps, steps)
    assert [step for step, _ in rows.rows] == list(range(steps))
    assert type(given).__name__ == "Named" and isinstance(given, (theirs.Callback, ours.Callback))
    hooks = trainer.hooks
    assert not any(
        isinstance(getattr(hook, "__self__", None), Idle) for found in hooks._functions.values() for hook in found
    ), "what they do not define is not called at each step"
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert type(Named()) is not type(given) and type(Module().brought) is Counts, "a class itself stays as it is"
    alike = ours.Trainer(**options, callbacks=[Idle(), Idle()])
    assert type(alike.callbacks[0]) is type(alike.callbacks[1]), "by type they replace each other"
    again = Named()
    ours.Trainer(**{**options, "max_epochs": 2}, callbacks=[again]).fit(
        Module(), loader(), ckpt_path=tmp_path / "x.ckpt"
    )
    assert again.steps == 2 * steps


def test_they_can_be_pickled() -> None:
    """As workers are given them where they cannot be forked."""
    given = Counts()
    given.steps = 5
    trainer = ours.Trainer(**QUIET, callbacks=[given, Idle()], logger=Rows())
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(trainer, protocol))
        assert [type(callback) for callback in again.callbacks] == [type(callback) for callback in trainer.callbacks]
        assert again.callbacks[0].steps == 5 and again.callbacks[0] is not given
        assert isinstance(again.logger, ours.loggers.Logger) and isinstance(again.logger, Rows)
    assert type(copy.deepcopy(given)) is type(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"callbacks": theirs.callbacks.EarlyStopping("x")}, "EarlyStopping is of lightning.pytorch.callbacks.early_s"),
        ({"logger": [theirs.loggers.CSVLogger("x")]}, r"CSVLogger is of .*: take CSVLogger from drivetrain.lightning"),
    ],
)
def test_lightnings_own_ones_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ours.Trainer(**given)


class Fit(theirs.LightningModule):
    """As a package makes a model for Lightning's users: with what is its base's, by ``super()``, and a network of the
    same kind within it."""

    class Net(theirs.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.steps: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.steps.append(self.trainer.global_step)
            return self.net(x)

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.example_input_array = torch.zeros(1, 5)
        self.inner = self.Net()
        self.calls: list[str] = []

    def log(self, name: str, *args: Any, **options: Any) -> None:
        super().log(f"my_{name}", *args, **options)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.inner(batch[0]), batch[1])
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["mine"] = self.current_epoch


class Data(theirs.LightningDataModule):
    """As PyG's: kinds of data that it has not are None."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.val_dataloader = None
        self.told: list[str] = []

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.told.append(str(stage))

    def prepare_data(self) -> None:
        assert self.trainer.num_devices >= 1
        super().prepare_data()

    def train_dataloader(self) -> Any:
        return loader(22, self.hparams.size)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        return {"told": len(self.told)}


@pytest.mark.parametrize("positional", [False, True])
def test_modules_and_data_modules_that_a_package_derived_from_lightnings(positional: bool, tmp_path: Path) -> None:
    def trained(L: Any) -> tuple[Any, Any, dict[str, Any]]:
        torch.manual_seed(5)
        module, data = Fit(0.2), Data()
        trainer = L.Trainer(**QUIET, max_epochs=2, logger=False)
        trainer.fit(module, data) if positional else trainer.fit(module, datamodule=data)
        file = tmp_path / f"{L.__name__}.ckpt"
        trainer.save_checkpoint(file)
        kept = torch.load(file, weights_only=True)
        assert trainer.datamodule is data and trainer.lightning_module is module and module.trainer is trainer
        return module, data, {**kept, "metrics": trainer.callback_metrics}

    (module, data, kept), (expected, their_data, their_kept) = trained(ours), trained(theirs)
    assert isinstance(module, Fit) and isinstance(data, Data) and type(Fit()).__mro__[1] is theirs.LightningModule
    assert data.told == their_data.told
    assert module.inner.steps == expected.inner.steps
    assert (module.automatic_optimization, module.strict_loading) == (False, True)
    assert torch.equal(module.example_input_array, expected.example_input_array)
    assert kept["metrics"].keys() == their_kept["metrics"].keys() == {"my_loss", "my_loss_step", "my_loss_epoch"}
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True))
    names = ("mine", "hyper_parameters", "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name")
    assert {name: kept[name] for name in names} == {name: their_kept[name] for name in names}
    assert kept["Data"] == their_kept["Data"]
    again = copy.deepcopy(module)
    assert type(again) is type(module) and again.hparams == module.hparams
    assert pickle.loads(pickle.dumps(data)).told == data.told
    assert Fit.load_from_checkpoint(tmp_path / f"{ours.__name__}.ckpt").hparams.rate == 0.2


def test_they_are_taken_by_several_workers() -> None:
    module, data = Fit(), Data()
    before = copy.deepcopy(module.state_dict())
    trainer = ours.Trainer(**{**QUIET, "devices": 2, "logger": False, "max_epochs": 1}, strategy="ddp")
    trainer.fit(module, datamodule=data)
    assert data.told == ["TrainerFn.FITTING"] and trainer.global_step == 3
    assert not any(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    with pytest.raises(ConfigurationError, match="BoringModel is of lightning"):
        trainer.fit(BoringModel(), loader())
