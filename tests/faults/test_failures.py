"""One rank fails: the job ends at once, names it, lets the others clean up, and leaves nothing."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, TrainModule
from drivetrain.errors import WorkerError
from tests.launch import programs
from tests.patience import SOON
from tests.runs import Classifier, loader, train


def error() -> None:
    raise ValueError("as it must")


def leave() -> None:
    sys.exit(7)


def leave_in_order() -> None:
    sys.exit(0)


def vanish() -> None:
    os._exit(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


WAYS: list[tuple[Callable[[], None], str]] = [
    (error, "rank 1 failed: ValueError: as it must"),
    (leave, "rank 1 failed: exited with code 7"),
    (die, "rank 1 failed: killed by SIGKILL"),
]
MOMENTS = ["setup", "training_step", "validation_step", "on_train_batch_end", "on_train_epoch_end"]


class Fails(Classifier):
    """Rank 1 fails at ``moment``, in training at batch 2."""

    def __init__(self, moment: str, way: Callable[[], None]) -> None:
        super().__init__()
        self.moment, self.way = moment, way

    def _at(self, moment: str, batch_idx: int = 2) -> None:
        if moment == self.moment and self.trainer.global_rank == 1 and batch_idx >= 2:
            self.way()

    def setup(self, stage: str) -> None:
        self._at("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._at("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._at("validation_step")
        super().validation_step(batch, batch_idx)


class CallbackFails(Callback):
    def __init__(self, moment: str, way: Callable[[], None]) -> None:
        self.moment, self.way = moment, way

    def _at(self, moment: str, trainer: Any) -> None:
        if moment == self.moment and trainer.global_rank == 1:
            self.way()

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self._at("on_train_batch_end", trainer)

    def on_train_epoch_end(self, trainer: Any, *rest: Any) -> None:
        self._at("on_train_epoch_end", trainer)


class Witness(Callback):
    """Leaves a file for each rank whose ``on_exception`` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, pl_module: TrainModule, exception: BaseException) -> None:
        (self.folder / f"exception_{trainer.global_rank}").write_text(type(exception).__name__)
        raise RuntimeError("the witness fails, too")


def fails(folder: Path, strategy: str, moment: str, way: Callable[[], None], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        train(
            lambda: Fails(moment, way),
            strategy,
            2,
            validation=loader(9, 3, shuffle=False),
            callbacks=[CallbackFails(moment, way), Witness(folder)],
        )
    assert time.monotonic() - began < SOON
    assert str(caught.value).startswith(message)
    if way is error:
        place = {
            "training_step": "Fails.training_step, batch 2 of epoch 0, step 3",
            "validation_step": "Fails.validation_step, batch 0",
            "setup": "",
            "on_train_batch_end": "on_train_batch_end, step 1",
            "on_train_epoch_end": "on_train_epoch_end, step 7",
        }
        place_told = f" (in {place[moment]})" if place[moment] else ""
        besides = "and while that was told: RuntimeError: the witness fails, too"
        assert str(caught.value).startswith(f"{message}{place_told or f' ({besides})'}\nTraceback")
        assert besides in str(caught.value)
    assert caught.value.rank == 1


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_a_rank_raises(strategy: str, moment: str, tmp_path: Path) -> None:
    fails(tmp_path, strategy, moment, *WAYS[0])
    assert (tmp_path / "exception_1").read_text() == "ValueError"
    if moment == "training_step":  # the other was in a collective, and heard of it
        assert (tmp_path / "exception_0").exists()


@pytest.mark.parametrize(("way", "message"), WAYS[1:])
@pytest.mark.parametrize("moment", ["training_step", "validation_step"])
def test_a_rank_is_gone(moment: str, way: Callable[[], None], message: str, tmp_path: Path) -> None:
    fails(tmp_path, "ring" if moment == "training_step" else "ddp", moment, way, message)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            leave_in_order,
            "rank 1 failed: TrainingError: rank 1 left fit by sys.exit(), which the others would wait for",
        ),
        (vanish, "rank 1 failed: exited with code 0 before its work was done"),
    ],
)
def test_a_rank_leaves_with_a_good_word(way: Callable[[], None], message: str, tmp_path: Path) -> None:
    """Nothing of it looks like a failure, and yet the others would wait for it."""
    fails(tmp_path, "ddp", "training_step", way, message)


@pytest.mark.parametrize("moment", ["training_step", "setup"])
def test_under_torchrun(moment: str, tmp_path: Path, repository: Path) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(repository)!r})
        from pathlib import Path
        from tests.faults.test_failures import Fails, Witness, error
        from tests.runs import loader, train

        witness = Witness(Path("."))
        train(lambda: Fails({moment!r}, error), "ring", 2, callbacks=[witness], validation=loader(9, 3, False))
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, output, errors = programs.run(program, tmp_path, *torchrun, "--log-dir", str(tmp_path / "logs"))
    assert code not in (0, 137, 143)
    assert "ValueError: as it must" in errors + output
    assert (tmp_path / "exception_1").read_text() == "ValueError"


# -- what a loader raises ---------------------------------------------------------------------------------------
@pytest.fixture
def short_path() -> Iterator[Path]:
    """Loader processes hand tensors over through sockets in the folder for temporary files, whose paths have an end at
    107 characters: pytest's own folder, numbered by runs, comes near it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class Broken(Dataset[Any]):
    def __init__(self, way: type[BaseException] | None) -> None:
        self.way = way

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            if self.way is None:
                os._exit(3)
            raise self.way("sample 13")
        return torch.randn(6, dtype=torch.float64), index % 4


@pytest.mark.parametrize(
    ("strategy", "workers", "way"),
    [("single", 0, IndexError), ("single", 0, StopIteration), ("single", 1, StopIteration), ("ring", 0, IndexError),
     ("ring", 0, StopIteration), ("ring", 1, IndexError)],
)  # fmt: skip
def test_an_epoch_is_never_cut_short(
    strategy: str, workers: int, way: type[BaseException], short_path: Path, run_alone: Callable[..., Any]
) -> None:
    def program() -> str:
        tempfile.tempdir = os.fspath(short_path)  # torch's loader processes leave a folder when they are ended
        data = DataLoader(Broken(way), batch_size=2, num_workers=workers)
        try:
            train(Classifier, strategy, 1 if strategy == "single" else 2, data=data)
        except Exception as caught:
            return f"{type(caught).__name__}: {caught}"
        return "it ended"

    found = run_alone(program)
    assert "sample 13" in found or "the loader ended after" in found
    assert strategy == "single" or found.startswith("WorkerError: rank ")


def test_a_loader_process_that_is_gone(run_alone: Callable[..., Any], short_path: Path) -> None:
    def program() -> str:
        tempfile.tempdir = str(short_path)
        with pytest.raises(WorkerError) as caught:
            train(Classifier, "ring", 2, data=DataLoader(Broken(None), batch_size=2, num_workers=1))
        return str(caught.value)

    assert "DataLoader worker" in run_alone(program)
    # torch's loader opens temporary files to see whether descriptors have run out, and its SIGCHLD handler may raise
    # between the making of one and its removal: such an empty file can stay, and nothing else.
    left = {path.name: path.is_file() and path.stat().st_size for path in short_path.iterdir()}
    assert all(name.startswith("tmp") and size == 0 and size is not False for name, size in left.items()), left
