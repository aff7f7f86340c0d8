"""``fit`` called again on one Trainer counts on, up to limits that may have been raised; as Lightning does."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as lightning
import pytest

import drivetrain
from drivetrain import Trainer
from tests.runs import QUIET, Classifier, loader
from tests.trainer.twins import batches, make_module


def counts(trainer: Any) -> tuple[int, int]:
    return trainer.current_epoch, trainer.global_step


def test_counts_are_lightnings() -> None:
    found = []
    libraries: tuple[Any, Any] = (lightning, drivetrain)
    for library in libraries:
        trainer = library.Trainer(**QUIET, num_sanity_val_steps=0, max_epochs=2)
        seen = []
        for limit in (2, 2, 3):
            (trainer.fit_loop if library is lightning else trainer).max_epochs = limit
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(make_module(library)(), batches())
            seen.append(counts(trainer))
        found.append(seen)
    assert found[0] == found[1] == [(2, 14), (2, 14), (3, 21)]


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ring", 2)])
def test_trains_on_up_to_a_raised_limit(strategy: str, devices: int) -> None:
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "precision": "64-true", "seed": 3}
    trainer = Trainer(**QUIET, **options, max_epochs=1, log_every_n_steps=1)
    module = Classifier()
    trainer.fit(module, loader())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.max_epochs = 2
    trainer.fit(module, loader())
    assert counts(trainer) == (2, 14)
    assert [step for step, _ in trainer.loss_curve] == list(range(1, 15))
    assert any(not value.equal(before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 3}])
def test_at_its_limit_it_says_so(limit: dict[str, Any]) -> None:
    trainer = Trainer(**QUIET, **limit, precision="64-true")
    module = Classifier()
    trainer.fit(module, loader())
    before = counts(trainer)
    with pytest.warns(UserWarning, match="is at its limit .*: fit does nothing; raise the limit"):
        trainer.fit(module, loader())
    assert counts(trainer) == before
