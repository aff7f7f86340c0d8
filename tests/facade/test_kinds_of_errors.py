"""What a project may catch: errors are of the kinds that Lightning raises for the same mistake."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from tests.facade.recorder import QUIET, loader, module


def fit(L: Any, data: Any = None, flags: dict[str, Any] | None = None, **parts: Any) -> None:
    one = {"max_epochs": 1, "accelerator": "cpu", "devices": 1}
    trainer = L.Trainer(**{**QUIET, **one, **(flags or {})})
    trainer.fit(module(L, **parts), loader() if data is None else data)


def logging(value: Any) -> Callable[[Any], None]:
    return lambda L: fit(L, training_step=lambda self, batch, batch_idx: self.log("value", value))


def returning(value: Any) -> Callable[[Any], None]:
    return lambda L: fit(L, training_step=lambda self, batch, batch_idx: value)


def two_optimizers(self: Any) -> Any:
    return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]


class Kept:
    """A callback's state under one name for all."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def callbacks_of_one_name(L: Any) -> None:
    kind = type("Keeper", (Kept, L.Callback), {})
    L.Trainer(**{**QUIET, "callbacks": [kind(), kind()]})


def search(L: Any) -> None:
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, "accelerator": "cpu", "devices": 1})
    importlib.import_module(f"{L.__name__}.tuner").Tuner(trainer).lr_find(module(L), loader())


def told_of_one_loader(name: str) -> Callable[[Any], None]:
    """A hook or step of which the number of the loader is asked for where there is one loader."""
    stage = "validation" if "validation" in name else "predict"

    def mistake(L: Any) -> None:
        trainer = L.Trainer(**{**QUIET, "accelerator": "cpu", "devices": 1})
        hooks: dict[str, Any] = {
            f"{stage}_step": lambda self, batch, batch_idx: None,
            f"on_{stage}_batch_start": lambda self, batch, batch_idx: None,
        }
        hooks[name] = lambda self, batch, batch_idx, dataloader_idx: None
        if name.endswith("_end"):
            hooks[name] = lambda self, outputs, batch, batch_idx, dataloader_idx: None
        getattr(trainer, {"validation": "validate"}.get(stage, stage))(module(L, **hooks), loader())

    return mistake


def loaded_without_an_argument(L: Any) -> None:
    """A class that did not save what it is made with."""

    class Wanting(type(module(L))):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()

    trainer = L.Trainer(**{**QUIET, "max_steps": 1, "accelerator": "cpu", "devices": 1})
    trainer.fit(module(L), loader())
    trainer.save_checkpoint("wanting.ckpt")
    Wanting.load_from_checkpoint("wanting.ckpt")


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "accelerator": lambda L: L.Trainer(accelerator="abacus"),
    "strategy": lambda L: L.Trainer(strategy="luck"),
    "precision": lambda L: L.Trainer(precision="12"),
    "nodes": lambda L: L.Trainer(num_nodes=0),
    "devices": lambda L: L.Trainer(accelerator="cpu", devices="many"),
    "limit": lambda L: L.Trainer(limit_train_batches=1.5),
    "clip": lambda L: L.Trainer(gradient_clip_val="much"),
    "barebones": lambda L: L.Trainer(barebones=True, enable_checkpointing=True),
    "interval": lambda L: fit(L, flags={"val_check_interval": 1000}, validation_step=len, val_dataloader=loader),
    "callbacks": callbacks_of_one_name,
    "no module": lambda L: L.Trainer(**QUIET).fit(nn.Linear(1, 1)),
    "no module yet": lambda L: L.Trainer(**QUIET).predict(),
    "nothing to save": lambda L: L.Trainer(**QUIET).save_checkpoint("nothing.ckpt"),
    "no best": lambda L: L.Trainer(**QUIET).validate(
        module(L, validation_step=lambda *_: None), loader(), ckpt_path="best"
    ),
    "no loader": lambda L: fit(L, data=3),
    "log text": logging("text"),
    "log nothing": logging(None),
    "log a vector": logging(torch.ones(2)),
    "loss is text": returning("text"),
    "no loss": returning({"accuracy": 1}),
    "two optimizers": lambda L: fit(L, configure_optimizers=two_optimizers),
    "backward": lambda L: fit(L, training_step=lambda self, batch, _: self.manual_backward(self.net(batch[0]).sum())),
    "hyper-parameters": lambda L: module(L).save_hyperparameters(3),
    "no rate": search,
    "a function for no hook": lambda L: L.callbacks.LambdaCallback(on_training=print),
    "no schedule": lambda L: L.callbacks.GradientAccumulationScheduler({}),
    "a step is told of one loader": told_of_one_loader("validation_step"),
    "a start is told of one loader": told_of_one_loader("on_validation_batch_start"),
    "an end is told of one loader": told_of_one_loader("on_predict_batch_end"),
    "load without an argument": loaded_without_an_argument,
    "no loader of a module": lambda L: L.LightningModule().val_dataloader(),
    "no loader of data": lambda L: L.LightningDataModule().train_dataloader(),
    "load into a module": lambda L: module(L).load_from_checkpoint("some.ckpt"),
    "load into data": lambda L: L.LightningDataModule().load_from_checkpoint("some.ckpt"),
}


def kind_of(mistake: Callable[[Any], Any], L: Any) -> type[BaseException]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011  (which one is the question)
            mistake(L)
    return caught.type


@pytest.mark.parametrize("mistake", list(MISTAKES.values()), ids=list(MISTAKES))
def test_a_mistake_raises_the_kind_of_error_that_lightning_raises(
    mistake: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected, found = kind_of(mistake, theirs), kind_of(mistake, ours)
    if expected.__name__ == "MisconfigurationException":
        expected = importlib.import_module("drivetrain.lightning.utilities.exceptions").MisconfigurationException
    assert issubclass(found, expected)


def test_what_a_mixin_calls_and_nobody_defined_gives_nothing() -> None:
    def run(L: Any) -> list[Any]:
        class Mixin(L.LightningModule):  # type: ignore[misc, name-defined]
            def configure_optimizers(self) -> Any:
                return super().configure_optimizers() or "its own"

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step(batch, batch_idx)

        with pytest.warns(UserWarning, match="configure_optimizers") as told:
            answers = [Mixin().configure_optimizers(), Mixin().training_step(None, 0)]
        return [*answers, ["training_step" in str(one.message) for one in told]]

    assert run(ours) == run(theirs)


def test_a_module_still_shows_its_class_methods() -> None:
    """TorchScript and tools that list members look at them without a call."""
    assert callable(module(ours).load_from_checkpoint)
    module(ours).to_torchscript()
