"""Where a project's messages go, and in what words hooks are told things, as under Lightning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from tests.facade.recorder import QUIET, loader, net

LIBRARIES = ["lightning.pytorch", "drivetrain.lightning"]

SCRIPT = """
import logging
import {library} as L
from {library}.utilities import rank_zero_info
from {library}.utilities.rank_zero import rank_zero_debug

rank_zero_info("of %s", "the project")
rank_zero_debug("not shown")
logging.getLogger("{library}").info("of its logger")
logging.basicConfig(level=logging.INFO, format="root: %(message)s")
L.seed_everything(3)
print("on standard output")
"""


FORMATTED = """
import logging
import {package} as L
from {package}.pytorch import _logger as log

L.pytorch._logger.handlers[0].setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
L.pytorch.utilities.rank_zero.rank_zero_info("of the library")
log.warning("of %s", "the project")
assert L.pytorch._root_logger is logging.getLogger()
"""


SET_UP = """
import logging
from {library}.callbacks import EarlyStopping
from {library}.utilities import rank_zero_info

logging.basicConfig(level=logging.INFO, filename="file", format="%(message)s")
rank_zero_info("of the library")
logging.getLogger(EarlyStopping.__module__).info("of a callback")
logging.getLogger("of.the.project").info("of the project")
"""


REPORTS = """
import torch
import {library} as L
from {library}.callbacks import EarlyStopping, ModelCheckpoint
from {library}.demos.boring_classes import BoringModel

class Module(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(float(self.current_epoch)))

def fit(verbose):
    stopping = EarlyStopping("loss", patience=5, verbose=verbose)
    saving = ModelCheckpoint("checkpoints", monitor="loss", verbose=verbose)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    trainer = L.Trainer(
        accelerator="cpu", devices=DEVICES, max_epochs=2, limit_train_batches=1, limit_val_batches=1,
        callbacks=[stopping, saving], **quiet,
    )
    trainer.fit(Module())

"""
SILENT, VERBOSE = "fit(False)\n", "fit(True)\n"


OF_RANKS = """
import torch
import torchmetrics
import {library} as L
from {library}.demos.boring_classes import BoringModel

class Module(BoringModel):
    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("of a step", loss)
        self.log("of both", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("own", float(batch_idx))
        self.log("combined", float(batch_idx), sync_dist=True)
        self.log("of the first", float(batch_idx), rank_zero_only=True)
        self.mean(float(batch_idx))
        self.log("of an object", self.mean)

trainer = L.Trainer(
    accelerator="cpu", devices=DEVICES, max_epochs=2, limit_train_batches=1, limit_val_batches=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, strategy="ddp",
)
trainer.fit(Module())
"""


WARNED = """
import warnings
import torch
from torchmetrics.classification import BinaryAccuracy
import {library} as L


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.accuracy = torch.nn.Linear(2, 1), BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        warnings.warn("said by a step")
        self.accuracy(torch.ones(2), torch.ones(2))
        self.log("accuracy", self.accuracy, on_epoch=True)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
          enable_progress_bar=False).fit(Net(), data)
"""

# Scripts of one process, by their names in the tests.
ALONE = {
    "messages": SCRIPT,
    "formatted": FORMATTED,
    "set up": SET_UP,
    "silent": REPORTS.replace("DEVICES", "1") + SILENT,
    "verbose": REPORTS.replace("DEVICES", "1") + VERBOSE,
    "of one": OF_RANKS.replace("DEVICES", "1"),
    "warned": WARNED,
}

# An interpreter that has the library imported, as each script does first of all, and a copy of it for each script.
FIRST = """
import os, runpy, sys
from {library} import Trainer

for folder in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.argv[:], sys.path[0] = [os.path.join(folder, "script.py")], folder
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    assert os.wait()[1] == 0, open(os.path.join(folder, "err")).read()
"""


@dataclass
class Told:
    """What a script wrote to both of its outputs, and into the file that its logging was set up with."""

    out: str
    err: str
    file: str = ""


def told(folder: Path, library: str, *texts: str, first: str = "") -> list[Told]:
    """What scripts of one process tell, each as if it were started by itself.

    Args:
        first: what is run before the library is imported.
    """
    # Lightning takes a script for its own, and words warnings so, by the name of a folder that it lies in.
    places = [folder / str(LIBRARIES.index(library)) / str(number) for number in range(len(texts))]
    for place, text in zip(places, texts, strict=True):
        place.mkdir(parents=True)
        (place / "script.py").write_text(_of(library, text))
    command = [sys.executable, "-c", first + FIRST.format(library=library), *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=places[0])
    assert done.returncode == 0, done.stderr
    return [
        Told(*(path.read_text() if (path := place / name).exists() else "" for name in Told.__annotations__))
        for place in places
    ]


@pytest.fixture(scope="module")
def tells(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Told]:
    """What a script of ``ALONE`` tells under a library, which is imported once for all of them: it takes seconds."""

    @cache
    def all_of(library: str) -> dict[str, Told]:
        return dict(zip(ALONE, told(tmp_path_factory.mktemp("alone"), library, *ALONE.values()), strict=True))

    return lambda library, name: all_of(library)[name]


def told_by_workers(folder: Path, library: str, text: str) -> Told:
    """What a script tells that starts workers, for which a copy of an interpreter is no sound one to fork."""
    script = folder / f"{library}.py"
    script.write_text(_of(library, text))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder, check=True)
    return Told(done.stdout, done.stderr)


def _of(library: str, text: str) -> str:
    return text.format(library=library, package=library.removesuffix(".pytorch"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_messages_of_the_first_process_are_seen(library: str, tells: Callable[[str, str], Told]) -> None:
    formed, plain = tells(library, "formatted"), tells(library, "messages")
    assert formed.err.splitlines() == ["[INFO] of the library", "[WARNING] of the project"]
    assert plain.out == "on standard output\n"
    lines = plain.err.splitlines()
    assert lines[:2] == ["of the project", "of its logger"]
    assert [line.lower() for line in lines[2:]] in (["seed set to 3"], ["root: seed set to 3"])


BEFORE = """
import logging

logging.basicConfig(level=logging.INFO, filename="file", format="%(message)s")
"""


def test_logging_that_is_set_up_after_the_import_takes_no_messages(tells: Callable[[str, str], Told]) -> None:
    """Hydra sets the root logger up within a script, whose imports are done by then."""
    both = ["of the library", "of a callback"]
    ours_told, theirs_told = (tells(library, "set up") for library in reversed(LIBRARIES))
    assert ours_told.file.splitlines() == theirs_told.file.splitlines() == ["of the project"]
    assert ours_told.err.splitlines() == both


def test_logging_that_is_set_up_before_the_import_takes_messages(tmp_path: Path) -> None:
    both = ["of the library", "of a callback"]
    ours_told, theirs_told = (told(tmp_path, library, SET_UP, first=BEFORE)[0] for library in reversed(LIBRARIES))
    assert ours_told.file.splitlines() == theirs_told.file.splitlines() == [*both, "of the project"]
    assert ours_told.err == ""


def reported(told: Told) -> list[str]:
    lines, words = told.err.lower().splitlines(), ("improved", "saved", "saving", "best", "top 1")
    return [word for line in lines for word in words if word in line]


def test_what_callbacks_report_is_seen(tells: Callable[[str, str], Told], tmp_path: Path) -> None:
    """By a script that sets no logging up: EarlyStopping by each worker, as under Lightning, ModelCheckpoint once."""
    theirs_told = tells("lightning.pytorch", "verbose")
    assert reported(theirs_told) == ["improved", "best", "saving", "best", "top 1", "top 1"]
    assert reported(tells("drivetrain.lightning", "silent")) == []
    assert reported(tells("drivetrain.lightning", "verbose")) == ["improved", "saved", "best"]
    workers = REPORTS.replace("DEVICES", "2")
    of_workers = told_by_workers(tmp_path, "drivetrain.lightning", workers + SILENT + VERBOSE)
    assert sorted(reported(of_workers)) == ["best", "improved", "improved", "saved"]


def test_what_ranks_do_not_combine_is_told_once(tells: Callable[[str, str], Told], tmp_path: Path) -> None:
    def named(told: Told) -> list[str]:
        about = [line.split("self.log(")[1] for line in told.err.splitlines() if "sync_dist=True" in line]
        return sorted(line.split("'")[1] for line in about)

    workers = OF_RANKS.replace("DEVICES", "2")
    assert named(tells("drivetrain.lightning", "of one")) == []
    assert named(told_by_workers(tmp_path, "drivetrain.lightning", workers)) == ["of both", "own"]
    assert named(told_by_workers(tmp_path, "lightning.pytorch", workers)) == ["of both", "of the first", "own"]


def test_the_algorithm_of_clipping_is_told_alike() -> None:
    def told(L: Any, algorithm: str | None) -> list[str]:
        found: list[str] = []

        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, **how: Any) -> None:
                found.append(f"{gradient_clip_val} {how}")
                self.clip_gradients(optimizer, gradient_clip_val, **how)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        options = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": algorithm}
        trainer = L.Trainer(**QUIET, **options, max_epochs=1, logger=False)
        found.append(f"{trainer.gradient_clip_algorithm}")
        trainer.fit(Module(), loader(8, 4))
        return found

    kinds = ours.utilities.GradClipAlgorithmType
    assert kinds.supported_types() == ["value", "norm"] and kinds.supported_type("norm")
    assert not kinds.supported_type("other")
    for algorithm in ("value", "norm", None):
        assert told(ours, algorithm) == told(theirs, algorithm)


def test_the_check_of_a_resumed_run_begins_with_nothing_known(tmp_path: Path) -> None:
    def known(L: Any) -> list[Any]:
        found: list[Any] = []

        class Module(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.log("loss", loss)
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("index", float(batch_idx))

            def on_validation_start(self) -> None:
                found.append((self.trainer.sanity_checking, sorted(self.trainer.callback_metrics)))

            def on_train_start(self) -> None:
                found.append(sorted(self.trainer.callback_metrics))

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        path = str(tmp_path / f"{L.__name__}.ckpt")
        trainer = L.Trainer(**QUIET, max_epochs=1, logger=False)
        trainer.fit(Module(), loader(8, 4), loader(8, 4))
        trainer.save_checkpoint(path)
        L.Trainer(**QUIET, max_epochs=2, logger=False).fit(Module(), loader(8, 4), loader(8, 4), ckpt_path=path)
        return found

    there, here = known(theirs), known(ours)
    assert here == there
    assert (True, []) in here


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_warning_of_a_step_is_shown_once_where_a_metric_is_logged(
    library: str, tells: Callable[[str, str], Told]
) -> None:
    assert tells(library, "warned").err.count("UserWarning: said by a step") == 1
