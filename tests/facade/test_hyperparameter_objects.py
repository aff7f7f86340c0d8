"""Objects among hyper-parameters: told of, kept out of what plain loading makes, and made again where that is asked."""

from __future__ import annotations

import importlib
import warnings
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import ListConfig, OmegaConf
from torch import nn

from drivetrain.errors import CheckpointError, ConfigurationError
from tests.facade.recorder import QUIET, loader, ours, theirs


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Embedding(Enum):
    LINEAR = "linear"
    CONVOLUTION = "conv"


def kind_of(L: Any) -> Any:
    class Parent(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, secret: str = "s", **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Module(Parent):
        def __init__(
            self,
            net: nn.Module,
            scale: Any = None,
            loss: Any = nn.functional.mse_loss,
            kind: Any = torch.optim.SGD,
            width: int = 3,
            **more: Any,
        ) -> None:
            super().__init__(secret="x")
            self.save_hyperparameters(ignore=["secret"])
            self.net, self.scale = net, scale

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.hparams.loss(self.net(batch[0]) * self.scale.factor, batch[1])

        def configure_optimizers(self) -> Any:
            return self.hparams.kind(self.parameters(), lr=0.1)

    return Module


def saved(L: Any, path: Path) -> tuple[Any, Any, list[str]]:
    Module = kind_of(L)
    with warnings.catch_warnings(record=True) as told, torch.random.fork_rng():
        warnings.simplefilter("always")
        torch.manual_seed(3)
        module = Module(nn.Linear(6, 3), Scale(0.5), nn.functional.cross_entropy, torch.optim.Adam, note="n")
        trainer = L.Trainer(**QUIET, logger=False, max_epochs=1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
    return Module, module, [str(w.message) for w in told if "nn.Module" in str(w.message)]


@pytest.mark.filterwarnings("ignore")
def test_objects_among_hyperparameters(tmp_path: Path) -> None:
    seen = {}
    for name, L in (("theirs", theirs), ("ours", ours)):
        Module, module, told = saved(L, tmp_path / name)
        again = Module.load_from_checkpoint(tmp_path / name, weights_only=False)
        kinds = {key: type(value) for key, value in again.hparams.items()}
        weights = [tensor.tolist() for tensor in again.state_dict().values()]
        assert weights == [tensor.tolist() for tensor in module.state_dict().values()]
        seen[name] = (
            sorted(kinds.items(), key=str),
            weights,
            again.scale.factor,
            again.hparams.note,
            sorted(module.hparams),
        )
        assert any("'net'" in line and "ignore=['net']" in line for line in told)
    assert seen["ours"] == seen["theirs"]


def test_what_is_not_made_unasked_is_told(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Module, module, _ = saved(ours, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"] == {"width": 3, "note": "n"}
    with pytest.raises(CheckpointError, match=r"needs net, .* pass net=\.\.\., or weights_only=False"):
        Module.load_from_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="made with the defaults of kind, loss, scale"):
        again = Module.load_from_checkpoint(tmp_path / "a.ckpt", net=nn.Linear(6, 3))
    assert again.scale is None and torch.equal(again.net.weight, module.net.weight)


@pytest.mark.parametrize("trusted", [None, True, False])
def test_members_of_an_enum_are_plain_in_the_file_and_themselves_in_the_module(
    tmp_path: Path, trusted: bool | None
) -> None:
    """Of its value a project that asks ``mode is Embedding.LINEAR`` would make another network than was trained."""

    class Module(ours.LightningModule):
        def __init__(self, mode: Embedding, layers: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.weight = nn.Parameter(torch.zeros(1 if mode is Embedding.LINEAR else 2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit = ours.Trainer(**QUIET, logger=False, max_epochs=1, limit_train_batches=1)
    fit.fit(Module(Embedding.LINEAR, {"first": [Embedding.CONVOLUTION]}), loader())
    fit.save_checkpoint(tmp_path / "a.ckpt")
    plain = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert plain == {"mode": "linear", "layers": {"first": ["conv"]}}
    again = Module.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=None if trusted is None else not trusted)
    assert again.hparams.mode is Embedding.LINEAR and again.hparams.layers == {"first": [Embedding.CONVOLUTION]}
    assert again.weight.shape == (1,)


def test_configurations_come_back_as_what_they_were_and_as_they_were_changed(tmp_path: Path) -> None:
    """A file is edited before it is loaded by whoever goes on with other classes."""

    class Module(ours.LightningModule):
        def __init__(self, net: Any, sizes: Any, seen: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    config = OmegaConf.create({"net": {"width": 3, "out": "${.width}"}, "sizes": [1, 2]})
    fit = ours.Trainer(**QUIET, logger=False, max_epochs=1, limit_train_batches=1)
    fit.fit(Module(config.net, config.sizes, {1: float("nan")}), loader())
    fit.save_checkpoint(tmp_path / "a.ckpt")
    plain = Module.load_from_checkpoint(tmp_path / "a.ckpt").hparams
    assert plain.net.out == 3 and plain.sizes == [1, 2]
    assert OmegaConf.merge(config.net, plain.net) == plain.net and OmegaConf.to_container(plain.sizes) == [1, 2]
    exact = Module.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False).hparams
    assert OmegaConf.to_yaml(exact.net) == OmegaConf.to_yaml(config.net) and isinstance(exact.sizes, ListConfig)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    content["hyper_parameters"]["net"]["width"] = 4
    torch.save(content, tmp_path / "b.ckpt")
    for trusted in (None, False):
        changed = Module.load_from_checkpoint(tmp_path / "b.ckpt", weights_only=trusted).hparams
        assert changed.net["width"] == 4 and list(changed.sizes) == [1, 2] and 1 in changed.seen


@pytest.mark.parametrize("L", [ours, theirs], ids=["ours", "theirs"])
def test_a_name_that_means_two_things(L: Any, tmp_path: Path) -> None:
    """Module and data module may have hyper-parameters of one name if they say the same."""

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int, shape: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(6, width)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int, shape: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader()

    options = {**QUIET, "logger": L.loggers.CSVLogger(tmp_path), "max_steps": 1}
    L.Trainer(**options).fit(Module(3, [1, 2]), datamodule=Data(3, [1, 2]))
    with pytest.raises((RuntimeError, ConfigurationError), match="width"):
        L.Trainer(**options).fit(Module(3, [1, 2]), datamodule=Data(4, [1, 2]))


def test_hyperparameters_saved_by_a_method_of_the_constructor(tmp_path: Path) -> None:
    def run(L: Any) -> list[Any]:
        class Base(L.LightningModule):  # type: ignore[misc, name-defined]
            def keep(self) -> None:
                self.save_hyperparameters(ignore="net")

        class Module(Base):
            def __init__(self, lr: float = 0.1, net: Any = None, **more: Any) -> None:
                super().__init__()
                self.keep()

        module = Module(lr=0.5, net=torch.nn.Linear(1, 1), width=3)
        return [dict(module.hparams), dict(module.hparams_initial), str(module.hparams), str(Module().hparams)]

    assert run(ours) == run(theirs)


def test_files_of_hyperparameters(tmp_path: Path) -> None:
    def run(L: Any) -> list[Any]:
        saving = importlib.import_module(f"{L.__name__}.core.saving")
        file, table = str(tmp_path / "hparams.yaml"), str(tmp_path / "tags.csv")
        given = {"lr": 0.1, "sizes": [1, 2], "part": {"deep": True}, "name": "x"}
        saving.save_hparams_to_yaml(file, Namespace(**given))
        as_config, plain = saving.load_hparams_from_yaml(file), saving.load_hparams_from_yaml(file, use_omegaconf=False)
        saving.save_hparams_to_tags_csv(table, given)
        saving.update_hparams(plain, {"part": {"more": 1}, "lr": 2})
        saving.save_hparams_to_yaml(file, OmegaConf.create({"a": 1, "b": "${a}"}))
        with pytest.warns(RuntimeWarning, match="missing.yaml"):
            nothing = saving.load_hparams_from_yaml(str(tmp_path / "missing.yaml"))
        referring = saving.load_hparams_from_yaml(file)
        return [type(as_config), as_config, plain, saving.load_hparams_from_tags_csv(table), nothing, referring.b]

    assert run(ours) == run(theirs)
    with pytest.raises(TypeError, match="a mapping or a Namespace, not a list"):
        importlib.import_module("drivetrain.lightning.core.saving").save_hparams_to_yaml(tmp_path / "x.yaml", [1])


@pytest.mark.filterwarnings("ignore")
def test_a_process_that_trusts_every_file_makes_objects_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's variable for that, which projects set to go on loading their files, as under Lightning."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for name, L in (("theirs", theirs), ("ours", ours)):
        Module, module, _ = saved(L, tmp_path / f"{name}.ckpt")
        again = Module.load_from_checkpoint(tmp_path / f"{name}.ckpt")
        assert again.scale.factor == 0.5 and again.hparams.kind is torch.optim.Adam
        assert torch.equal(again.net.weight, module.net.weight)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
    with pytest.raises(CheckpointError, match="weights_only=False"):
        Module.load_from_checkpoint(tmp_path / "ours.ckpt")


def test_an_overridden_load_from_checkpoint_calls_the_function_that_it_stands_for(tmp_path: Path) -> None:
    def run(L: Any) -> list[Any]:
        load = importlib.import_module(f"{L.__name__}.core.saving")._load_from_checkpoint
        boring: Any = importlib.import_module(f"{L.__name__}.demos.boring_classes")

        class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
            def __init__(self, size: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters()

            @classmethod
            def load_from_checkpoint(cls, path: Any, **more: Any) -> Any:
                return load(cls, path, **more)

        class Module(boring.BoringModel):  # type: ignore[misc, name-defined]
            def __init__(self, width: int = 1, depth: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters()

            @classmethod
            def load_from_checkpoint(cls, path: Any, strict: bool = False, **more: Any) -> Any:
                loaded = load(cls, path, None, None, strict, **more)
                loaded.after = True
                return loaded

        trainer = L.Trainer(accelerator="cpu", logger=False, fast_dev_run=True, enable_progress_bar=False)
        module, data = Module(width=3), Data(size=4)
        loader = torch.utils.data.DataLoader(torch.randn(4, 32), 2)
        data.train_dataloader = data.val_dataloader = lambda: loader
        trainer.fit(module, data)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        again = Module.load_from_checkpoint(tmp_path / "one.ckpt", depth=5)
        same = all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
        return [dict(again.hparams), again.after, same, Data.load_from_checkpoint(tmp_path / "one.ckpt").hparams.size]

    assert run(ours) == run(theirs) == [{"width": 3, "depth": 5}, True, True, 4]
