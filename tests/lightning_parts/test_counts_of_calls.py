"""What evaluations count of their batches over several calls of one Trainer, as Lightning counts it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import drivetrain.lightning as ours
from tests.facade.recorder import QUIET

HOOKS = [f"on_{stage}_batch_{at}" for stage in ("validation", "test", "predict") for at in ("start", "end")]
HOOKS += ["on_validation_end", "on_test_end", "on_sanity_check_end", "on_train_epoch_start", "on_train_start"]


def module(L: Any) -> Any:
    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.layer(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def counted(trainer: Any) -> list[Any]:
    loop = trainer.predict_loop if trainer.state.fn == "predict" else trainer._evaluation_loop
    progress = loop.batch_progress
    pair = [[one.ready, one.started, one.processed, one.completed] for one in (progress.current, progress.total)]
    return [*pair, progress.is_last_batch]


def calls(L: Any, hooks: list[str] = HOOKS, **options: Any) -> list[Any]:
    """What is counted in each of ``hooks`` of all stages, called several times, and between them."""

    class Counts(L.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.seen: list[Any] = []
            for hook in hooks:
                setattr(self, hook, self.at(hook))

        def at(self, hook: str) -> Any:
            return lambda trainer, *rest: self.seen.append([hook, counted(trainer)])

    counts = Counts()
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2, "logger": False, "num_sanity_val_steps": 1, **options})
    trainer.callbacks.append(counts)
    made = module(L)
    long, short = (DataLoader(torch.ones(samples, 2), batch_size=2) for samples in (6, 4))

    def evaluate() -> None:
        trainer.validate(made, long, verbose=False)
        trainer.validate(made, [long, short], verbose=False)
        trainer.test(made, short, verbose=False)
        trainer.test(made, long, verbose=False)
        trainer.predict(made, short)
        trainer.predict(made, [short, long])

    evaluate()
    trainer.fit(made, long, short)
    evaluate()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(made, long, [long, short])
    trainer.validate(made, short, verbose=False)
    return list(counts.seen)


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 1}, {"num_sanity_val_steps": 0}], ids=str)
def test_they_are_counted_on(options: dict[str, Any]) -> None:
    there = calls(theirs, **options)
    assert calls(ours, **options) == there
    assert len(there) > 60 and there[-1] == ["on_validation_end", [[2] * 4, [18] * 4, True]]


def test_also_where_each_call_has_its_workers() -> None:
    hooks = ["on_validation_end", "on_test_end"]
    assert calls(ours, hooks, devices=2, strategy="ddp", use_distributed_sampler=False) == calls(ours, hooks)
