"""Callbacks and loggers of a script by their registered names, as a config names them; arguments that there are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import drivetrain.lightning
from drivetrain import Trainer
from drivetrain.callbacks import EarlyStopping, LearningRateMonitor
from drivetrain.errors import ConfigurationError, UnknownArgumentError
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from tests.runs import QUIET, Classifier, loader

LOUD = {name: value for name, value in QUIET.items() if name != "logger"}


def test_names_stand_for_parts(tmp_path: Path) -> None:
    stopping = {"name": "early_stopping", "monitor": "val/loss", "stopping_threshold": 100.0}
    trainer = Trainer(
        strategy="single",
        max_epochs=3,
        default_root_dir=tmp_path,
        logger=["tensorboard", {"name": "csv", "flush_logs_every_n_steps": 1}],
        callbacks=["learning_rate_monitor", stopping],
        **LOUD,
    )
    assert [type(one) for one in trainer.loggers] == [TensorBoardLogger, CSVLogger]
    assert [type(one) for one in trainer.callbacks] == [LearningRateMonitor, EarlyStopping]
    trainer.fit(Classifier(), loader(), loader(shuffle=False))
    assert trainer.current_epoch == 1
    assert list(tmp_path.rglob("metrics.csv")) and list(tmp_path.rglob("events.out.tfevents.*"))


def test_one_name_is_enough(tmp_path: Path) -> None:
    trainer = Trainer(
        strategy="single", default_root_dir=tmp_path, logger="csv", callbacks="device_stats_monitor", **LOUD
    )
    assert isinstance(trainer.logger, CSVLogger) and len(trainer.callbacks) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"logger": "tensorbord"}, "there is no logger 'tensorbord': did you mean 'tensorboard'?"),
        ({"callbacks": ["early_stoping"]}, "there is no callback 'early_stoping': did you mean 'early_stopping'?"),
        ({"callbacks": ["early_stopping"]}, "callbacks 'early_stopping': missing a required argument: 'monitor'"),
        (
            {"callbacks": {"name": "early_stopping", "monitr": "a"}},
            "callbacks 'early_stopping' takes no argument 'monitr': did you mean 'monitor'?",
        ),
        ({"callbacks": {"monitor": "a"}}, "callbacks: {'monitor': 'a'} has no 'name'"),
        ({"callbacks": [3]}, "callbacks: int is no Callback, derive it from one."),
    ],
)
def test_what_cannot_be_made_is_told(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as told:
        Trainer(strategy="single", **arguments)
    assert str(told.value).startswith(sentence)


@pytest.mark.parametrize("kind", [Trainer, drivetrain.lightning.Trainer])
@pytest.mark.parametrize(
    ("name", "way_out"),
    [("max_epoch", "did you mean 'max_epochs'?"), ("gpus", "use devices, with accelerator='gpu'")],
)
def test_an_argument_that_there_is_not(kind: Any, name: str, way_out: str) -> None:
    with pytest.raises(UnknownArgumentError) as told:
        kind(**{name: 1})
    assert str(told.value) == f"the Trainer has no argument {name!r}: {way_out}"
    assert isinstance(told.value, TypeError)


@pytest.mark.parametrize("kind", [Trainer, drivetrain.lightning.Trainer])
def test_an_argument_without_a_name(kind: Any) -> None:
    with pytest.raises(UnknownArgumentError, match="takes its arguments by name, and 'ring' has none"):
        kind("ring", 2)
