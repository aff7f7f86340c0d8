"""``trainer.should_stop = True`` in user code on one rank, in mid-epoch: all stop at the next boundary, at one step."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import Callback
from tests.runs import Classifier, difference, loader, train

EVERY = 10


class Wishes(Classifier):
    """Rank ``rank`` wants to stop in the batch after ``step`` steps."""

    def __init__(self, rank: int, step: int = 13) -> None:
        super().__init__()
        self.rank, self.step = rank, step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == self.rank and self.trainer.global_step == self.step:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Validations(Callback):
    def __init__(self) -> None:
        self.at: list[int] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.at.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize(("strategy", "devices", "rank"), [("ddp", 2, 1), ("ring", 2, 0), ("ring", 3, 2)])
def test_one_rank_wishes_and_all_stop(strategy: str, devices: int, rank: int) -> None:
    seen = Validations()
    options: dict[str, Any] = {"validation": loader(9, 3, shuffle=False), "log_every_n_steps": EVERY}
    run = train(lambda: Wishes(rank), strategy, devices, data=loader(400), callbacks=[seen], **options)
    assert run.steps == 20, "the wish after step 13 is heard at the boundary of step 20"
    assert run.trainer.status == "stopped"
    assert run.trainer.should_stop
    assert seen.at == [20], "what training ends with is validated"
    same = train(Classifier, max_steps=20, data=loader(400), **options)
    found = difference(same, run) if same.metrics.keys() == run.metrics.keys() else {}
    assert found.get("weights", 0.0) < 1e-10
    assert [step for step, _ in run.curve] == list(range(1, 21))


def test_alone_it_is_heard_at_once_but_not_before_min_steps() -> None:
    assert train(lambda: Wishes(0), data=loader(400), log_every_n_steps=EVERY).steps == 14
    assert train(lambda: Wishes(0), data=loader(400), log_every_n_steps=EVERY, min_steps=17, min_epochs=0).steps == 17
