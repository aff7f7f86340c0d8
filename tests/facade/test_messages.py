"""Where a project's messages go, and in what words hooks are told things, as under Lightning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from tests.facade.recorder import QUIET, loader, net

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
import {library} as L
from {library}.pytorch import _logger as log

L.pytorch._logger.handlers[0].setFormatter(logging.Formatter("[%(levelname)s] %(message)s"))
L.pytorch.utilities.rank_zero.rank_zero_info("of the library")
log.warning("of %s", "the project")
assert L.pytorch._root_logger is logging.getLogger()
"""


@pytest.mark.parametrize("library", ["lightning", "drivetrain.lightning"])
def test_a_project_gives_messages_a_form_of_its_own(library: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORMATTED.format(library=library))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["[INFO] of the library", "[WARNING] of the project"]


@pytest.mark.parametrize("library", ["lightning.pytorch", "drivetrain.lightning"])
def test_messages_of_the_first_process_are_seen(library: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(library=library))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "on standard output\n"
    lines = done.stderr.splitlines()
    assert lines[:2] == ["of the project", "of its logger"]
    assert [line.lower() for line in lines[2:]] in (["seed set to 3"], ["root: seed set to 3"])


SET_UP = """
import logging
{before}
from {library}.callbacks import EarlyStopping
from {library}.utilities import rank_zero_info

logging.basicConfig(level=logging.INFO, filename="file", format="%(message)s")
rank_zero_info("of the library")
logging.getLogger(EarlyStopping.__module__).info("of a callback")
logging.getLogger("of.the.project").info("of the project")
"""
BEFORE = 'logging.basicConfig(level=logging.INFO, filename="file", format="%(message)s")'


@pytest.mark.parametrize("before", ["", BEFORE], ids=["after", "before"])
def test_logging_that_is_set_up_after_the_import_takes_no_messages(before: str, tmp_path: Path) -> None:
    """Hydra sets the root logger up within a script, whose imports are done by then."""

    def told(library: str) -> tuple[list[str], list[str]]:  # on standard error, and in the project's file
        folder = tmp_path / library
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(SET_UP.format(library=library, before=before))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=folder)
        return done.stderr.splitlines(), (folder / "file").read_text().splitlines()

    both = ["of the library", "of a callback"]
    (shown, ours_kept), (_, theirs_kept) = told("drivetrain.lightning"), told("lightning.pytorch")
    assert ours_kept == theirs_kept == ([*both, "of the project"] if before else ["of the project"])
    assert shown == ([] if before else both)


REPORTS = """
import torch
import {library} as L
from {library}.callbacks import EarlyStopping, ModelCheckpoint
from {library}.demos.boring_classes import BoringModel

class Module(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(float(self.current_epoch)))

stopping = EarlyStopping("loss", patience=5, verbose={verbose})
saving = ModelCheckpoint("checkpoints", monitor="loss", verbose={verbose})
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
trainer = L.Trainer(
    accelerator="cpu", devices={devices}, max_epochs=2, limit_train_batches=1, limit_val_batches=1,
    callbacks=[stopping, saving], **quiet,
)
trainer.fit(Module())
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_what_callbacks_report_is_seen(devices: int, tmp_path: Path) -> None:
    """By a script that sets no logging up: EarlyStopping by each worker, as under Lightning, ModelCheckpoint once."""

    def told(library: str, verbose: bool) -> list[str]:
        folder = tmp_path / library / str(verbose)
        folder.mkdir(parents=True)
        script = folder / "script.py"
        script.write_text(REPORTS.format(library=library, verbose=verbose, devices=devices))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=folder, check=True)
        lines = done.stderr.lower().splitlines()  # of several workers in any order
        found = [word for line in lines for word in ("improved", "saved", "saving", "best", "top 1") if word in line]
        return found if devices == 1 else sorted(found)

    assert told("drivetrain.lightning", False) == []
    reports = told("drivetrain.lightning", True)
    if devices == 2:
        assert reports == ["best", "improved", "improved", "saved"]
    else:
        assert reports == ["improved", "saved", "best"]
        assert told("lightning.pytorch", True) == ["improved", "best", "saving", "best", "top 1", "top 1"]


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
    accelerator="cpu", devices={devices}, max_epochs=2, limit_train_batches=1, limit_val_batches=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, strategy="ddp",
)
trainer.fit(Module())
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_what_ranks_do_not_combine_is_told_once(devices: int, tmp_path: Path) -> None:
    def told(library: str) -> list[str]:
        script = tmp_path / f"{library}.py"
        script.write_text(OF_RANKS.format(library=library, devices=devices))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=True)
        about = [line.split("self.log(")[1] for line in done.stderr.splitlines() if "sync_dist=True" in line]
        return sorted(line.split("'")[1] for line in about)

    assert told("drivetrain.lightning") == (["of both", "own"] if devices == 2 else [])
    if devices == 2:
        assert told("lightning.pytorch") == ["of both", "of the first", "own"]


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


@pytest.mark.parametrize("library", ["lightning.pytorch", "drivetrain.lightning"])
def test_a_warning_of_a_step_is_shown_once_where_a_metric_is_logged(library: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WARNED.format(library=library))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.count("UserWarning: said by a step") == 1
