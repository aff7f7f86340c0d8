"""How a run ends under Lightning and under drivetrain.lightning: in order, of an error, of Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.facade.recorder import QUIET, loader, net, ours, theirs


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """Lightning ignores Ctrl-C from the first one on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


ENDS: dict[str, Any] = {
    "in order": lambda: None,
    "of an error": raising(ValueError("of the project")),
    "of KeyboardInterrupt": raising(KeyboardInterrupt()),
    "of Ctrl-C": interrupted,
    "of an exit": raising(SystemExit(3)),
}


def told(L: Any, end: Any, stage: str) -> tuple[list[Any], Any]:
    """What the project is told of the end of ``stage``, where ``end`` is called in the second batch."""
    heard: list[Any] = []
    base = L.loggers.logger.Logger if L is theirs else L.loggers.Logger

    class Logger(base):  # type: ignore[misc, valid-type]
        name, version, experiment = "memory", 0, None

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...
        def log_hyperparams(self, params: Any, *more: Any) -> None: ...
        def finalize(self, status: str) -> None:
            heard.append(("finalize", status))

    class Listening(L.Callback):  # type: ignore[misc, name-defined]
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            heard.append((type(exception).__name__, trainer.interrupted, trainer.state.status.value))

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            heard.append(("teardown", stage == trainer.state.fn))

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return loader()

        val_dataloader = train_dataloader

        def on_exception(self, exception: BaseException) -> None:
            heard.append(("data", type(exception).__name__))

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                end()
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                end()

        def on_train_end(self) -> None:
            heard.append("train end")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 2}
    trainer = L.Trainer(**options, logger=Logger(), callbacks=Listening())
    try:
        getattr(trainer, stage)(Module(), datamodule=Data())
    except BaseException as error:
        heard.append((type(error).__name__, getattr(error, "code", None)))
    return heard, trainer


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("end", ENDS)
def test_the_same_is_told_of_an_end(end: str, stage: str) -> None:
    (there, their), (here, our) = told(theirs, ENDS[end], stage), told(ours, ENDS[end], stage)
    assert here == there
    assert our.interrupted == their.interrupted and our.state.status.value == their.state.status.value


def shown(L: Any, stage: str, loaders: int, verbose: bool) -> None:
    """Evaluate without a progress bar, as in a batch job."""

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def evaluate(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", batch_idx / 4 + dataloader_idx, batch_size=1)  # exact in any format
            self.log("a/metric of a name that is longer than a column", 0.25, batch_size=1)

        validation_step = test_step = evaluate

        def teardown(self, stage: str) -> None:
            print("teardown")

    trainer = L.Trainer(**QUIET, logger=False)
    getattr(trainer, stage)(Module(), [loader(16) for _ in range(loaders)], verbose=verbose)


@pytest.mark.parametrize("verbose", [True, False])
@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("loaders", [1, 2, 5])
def test_what_was_found_is_shown(
    loaders: int, stage: str, verbose: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    printed = []
    for L in (theirs, ours):
        shown(L, stage, loaders, verbose)
        printed.append(capfd.readouterr().out)
    assert printed[1] == printed[0]
    assert ("loss" in printed[1]) == verbose
