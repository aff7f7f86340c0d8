"""ddp with a topology: what its presets are, what is refused, and that a calibration makes no other run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import Callback, Trainer
from drivetrain.comm.calibration import Calibration, place
from drivetrain.errors import ConfigurationError
from tests.runs import QUIET, Classifier, difference, train


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ({"name": "ddp", "topology": "rign"}, "there is no strategy.topology=rign: did you mean 'ring'"),
        ({"name": "ring", "topology": "tree"}, "strategy=ring is strategy=ddp with topology=ring: for tree, set"),
        ({"name": "tree", "topology": "auto"}, "strategy=tree is strategy=ddp with topology=tree: for auto, set"),
    ],
)
def test_topologies_that_are_none(strategy: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Trainer(**QUIET, strategy=strategy, devices=2)


def fastest_is_tree() -> Calibration:
    sizes = (1e3, 1e6)
    return Calibration.of({(3,): {"tree": dict.fromkeys(sizes, 1e-3), "native": dict.fromkeys(sizes, 1.0)}})


class Sent(Callback):
    """What the first rank sent."""

    def __init__(self) -> None:
        self.traffic: dict[str, int] = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.traffic = trainer.strategy.traffic()

    def state_dict(self) -> dict[str, Any]:
        return self.traffic

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.traffic = state_dict


def test_auto_trains_by_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    single = train(Classifier)
    auto, before, after = {"name": "ddp", "topology": "auto"}, Sent(), Sent()
    outcomes = [train(Classifier, auto, 3, callbacks=[before])]
    fastest_is_tree().save(place("cpu"))
    outcomes.append(train(Classifier, auto, 3, callbacks=[after]))
    for outcome in outcomes:
        assert max(difference(single, outcome).values()) < 1e-10
    # The backend's own is counted as a message a step; the root of a tree of three sends two, of all gradients.
    assert before.traffic["messages"] == single.steps and after.traffic["messages"] == 2 * single.steps
    assert after.traffic["bytes_sent"] * 2 == before.traffic["bytes_sent"] * 3
    compressed = train(Classifier, "halving_doubling", 3, compression="fp16")
    assert 0 < max(difference(single, compressed).values()) < 0.05
