"""Hyper-parameters that are one configuration of OmegaConf: they stay one, as far as OmegaConf's own functions ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

import drivetrain
from drivetrain.config_containers import config_of
from drivetrain.errors import ConfigurationError
from tests.facade.recorder import QUIET, loader, ours, theirs

TEXT = "width: 3\nnet:\n  out: ${width}\n  scale: 0.5\nsizes:\n- 1\n- deep: 2\n"


def module_of(L: Any) -> Any:
    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, note: str = "n") -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.net = nn.Linear(6, self.hparams["net"]["out"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module


def seen_of(hparams: Any) -> list[Any]:
    return [
        type(hparams),
        OmegaConf.to_yaml(hparams),
        OmegaConf.to_container(hparams, resolve=True),
        type(hparams.sizes),
        OmegaConf.merge(hparams, {"more": 1}).more,
        sorted(hparams),
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_configuration_stays_one(tmp_path: Path) -> None:
    def run(L: Any) -> list[Any]:
        config = OmegaConf.create(TEXT)
        Module, path = module_of(L), tmp_path / f"{L.__name__}.ckpt"
        module = Module(config)
        seen = [module.hparams is config, *seen_of(module.hparams), *seen_of(module.hparams_initial)]
        trainer = L.Trainer(**QUIET, logger=L.loggers.CSVLogger(tmp_path / L.__name__, version="v"), max_steps=1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
        seen.append(Path(trainer.logger.log_dir, "hparams.yaml").read_text())
        again = Module.load_from_checkpoint(path, weights_only=False)
        other = Module.load_from_checkpoint(path, weights_only=False, more={"a": 1})
        return [*seen, *seen_of(again.hparams), type(other.hparams), other.hparams.more.a]

    assert run(ours) == run(theirs)


def trained(tmp_path: Path, config: Any, **trainer: Any) -> Any:
    module = module_of(ours)(config)
    fit = ours.Trainer(**QUIET, logger=False, max_steps=1, **trainer)
    fit.fit(module, loader())
    fit.save_checkpoint(tmp_path / "a.ckpt")
    return type(module)


def test_a_file_of_ours_needs_no_trust_and_says_to_lightning_what_it_was(tmp_path: Path) -> None:
    Module = trained(tmp_path, OmegaConf.create(TEXT))
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    plain = {"width": 3, "net": {"out": 3, "scale": 0.5}, "sizes": [1, {"deep": 2}]}
    assert content["hyper_parameters"] == plain
    again = Module.load_from_checkpoint(tmp_path / "a.ckpt").hparams
    assert isinstance(again, DictConfig) and isinstance(again.sizes, ListConfig) and again == plain
    assert module_of(theirs).load_from_checkpoint(tmp_path / "a.ckpt").hparams["net"]["out"] == 3
    content["hyper_parameters"]["net"]["scale"] = 4
    torch.save(content, tmp_path / "b.ckpt")
    for trusted in (None, False):
        changed = Module.load_from_checkpoint(tmp_path / "b.ckpt", weights_only=trusted).hparams
        assert isinstance(changed, DictConfig) and changed.net.scale == 4


def test_a_directory_gives_a_configuration(tmp_path: Path) -> None:
    Module = module_of(ours)
    fit = drivetrain.Trainer(logger=False, max_steps=1, devices=1, enable_progress_bar=False, default_root_dir=tmp_path)
    fit.fit(Module(OmegaConf.create(TEXT)), loader())
    fit.save_checkpoint(tmp_path / "a")
    again = Module.load_from_checkpoint(tmp_path / "a").hparams
    assert (tmp_path / "a").is_dir() and isinstance(again, DictConfig) and again.net.out == 3


def test_lightnings_file_gives_a_configuration(tmp_path: Path) -> None:
    fit = theirs.Trainer(**QUIET, logger=False, max_steps=1)
    fit.fit(module_of(theirs)(OmegaConf.create(TEXT)), loader())
    fit.save_checkpoint(tmp_path / "a.ckpt")
    again = module_of(ours).load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False).hparams
    assert isinstance(again, DictConfig) and OmegaConf.to_yaml(again) == TEXT


def test_what_is_missing_in_a_configuration_is_no_error_until_it_is_read(tmp_path: Path) -> None:
    config = OmegaConf.create({"net": {"out": 3}, "later": "???", "other": "${nowhere.at_all}"})
    Module = trained(tmp_path, config)
    for trusted in (None, False):
        again = Module.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=trusted, other=2)
        assert OmegaConf.is_missing(again.hparams, "later") and again.hparams.other == 2


def test_a_file_names_no_function_that_is_called() -> None:
    """A project may have given OmegaConf ``eval`` under a name, and whoever wrote the file would have it run."""
    called: list[Any] = []
    OmegaConf.register_new_resolver("called", called.append, replace=True)
    try:
        for text in ("${called:1}", "a ${called:${b}}", "${${b}:1}", r"\\${called:1}", "${called:'${b}'}"):
            made = config_of({"b": "called", "parts": [{"text": text}], "text": text})
            assert made.text == made.parts[0].text == text
            assert OmegaConf.to_container(made, resolve=True)["text"] == text
        assert not called
    finally:
        OmegaConf.clear_resolver("called")
    made = config_of({"host": "there", "one": "http://${host}:80", "two": "${host}"})
    assert made.one == "http://there:80" and made.two == "there"


def test_names_left_out_stay_in_the_configuration_that_was_given() -> None:
    class Module(ours.LightningModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config, ignore="width")

    config = OmegaConf.create({"width": 3, "deep": {"a": 1}})
    OmegaConf.set_struct(config, True)
    module = Module(config)
    assert list(module.hparams) == ["deep"] and list(config) == ["width", "deep"]
    module.remove_ignored_hparams(["deep", "nothing"])
    assert list(module.hparams) == [] and list(config) == ["width", "deep"]


def test_a_copy_of_an_argument_has_its_name() -> None:
    def run(L: Any) -> Any:
        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self, config: Any, lr: float = 0.1) -> None:
                super().__init__()
                self.save_hyperparameters({**config})

        module = Module({"a": 1, "b": [2]})
        return getattr(module, "hparams_name", None) or module._hparams_name

    assert run(ours) == run(theirs) == "config"


def test_what_is_no_hyperparameter_is_said() -> None:
    class Module(ours.LightningModule):
        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.save_hyperparameters(first, second)

    with pytest.raises(ConfigurationError, match="takes names, or one mapping or Namespace alone, not float"):
        Module(3.5, "second")
    with pytest.raises(ConfigurationError, match="not ListConfig"):
        module_of(ours)(OmegaConf.create([1, 2]))
