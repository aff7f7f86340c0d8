"""A loader process that dies while its connection is read: the error says which one, however torch met its end. Those
that stay from epoch to epoch end with the stage that they read for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import drivetrain.lightning
from drivetrain import Trainer, loader_processes
from drivetrain.errors import TrainingError
from drivetrain.lightning.utilities import CombinedLoader
from drivetrain.sharding import BatchSource
from drivetrain.strategy import Shard
from tests.runs import QUIET, Classifier

LOST = [ConnectionResetError(104, "Connection reset by peer"), EOFError(), FileNotFoundError(2, "No such file")]


class Unread(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(2, "No such file", f"sample {index}")


class Losing(DataLoader[Any]):
    """Gives one batch, then ``error`` while the second of its processes does ``last``; the first has read its share."""

    def __init__(self, error: BaseException, last: Any) -> None:
        super().__init__(Unread(), num_workers=2)
        context = multiprocessing.get_context("fork")
        self.error = error
        self.workers = [context.Process(target=one, daemon=True) for one in (int, last)]

    def __iter__(self) -> Any:
        for worker in self.workers:
            worker.start()
        return _Lost(self.error, self.workers)


class _Lost:
    def __init__(self, error: BaseException, workers: list[Any]) -> None:
        self.error, self._workers, self._workers_status = error, workers, [False, True]
        self._given = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._given:
            raise self.error
        self._given = True
        return torch.zeros(2, 3)

    def __len__(self) -> int:
        return 2


def source(loader: DataLoader[Any]) -> BatchSource:
    return BatchSource(loader, Shard(0, 1), mode="global", seed=0, training=True)


def exit_soon() -> None:
    time.sleep(0.05)
    os._exit(3)


def die() -> None:
    os.kill(os.getpid(), 9)


@pytest.fixture
def losing() -> Iterator[Callable[..., Losing]]:
    made: list[Losing] = []

    def make(error: BaseException, last: Any) -> Losing:
        made.append(Losing(error, last))
        return made[-1]

    yield make
    for worker in (worker for loader in made for worker in loader.workers):
        worker.kill()
        worker.join()


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("last", "how"), [(exit_soon, "exited with code 3"), (die, "killed by SIGKILL")])
def test_the_process_is_named(losing: Callable[..., Losing], error: BaseException, last: Any, how: str) -> None:
    said = rf"worker process 1 \(pid \d+\) is gone \({how}\): read with num_workers=0"
    with pytest.raises(TrainingError, match=said) as caught:
        list(source(losing(error, last)).read())
    assert caught.value.__cause__ is error


def test_an_error_while_all_live_stays_what_it_is(
    losing: Callable[..., Losing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_processes, "_ENDING", 0.05)
    with pytest.raises(ConnectionResetError):
        list(source(losing(LOST[0], lambda: time.sleep(60))).read())


def test_what_the_data_set_raises_stays_what_it_is(run_alone: Callable[..., Any]) -> None:
    def program() -> str:
        try:
            return str(list(source(DataLoader(Unread(), num_workers=1)).read()))
        except FileNotFoundError as caught:
            return str(caught)

    assert "sample 0" in run_alone(program)


# -- processes that stay from epoch to epoch ---------------------------------------------------------------------
class Tells(Dataset[Any]):
    """Samples that say which process read them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6), index, os.getpid()


def staying() -> DataLoader[Any]:
    return DataLoader(Tells(), batch_size=2, num_workers=1, persistent_workers=True)


class Notes(Classifier):
    """Writes down by whom it was read to, and how many processes there are at the end of each epoch."""

    fails = False

    def __init__(self, make: Callable[[], Any] = staying) -> None:
        super().__init__()
        self.make, self.readers, self.counts = make, set(), []

    def train_dataloader(self) -> Any:
        return self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch if isinstance(batch[0], list) else [batch]
        self.readers.update(reader for _, _, readers in parts for reader in readers.tolist())
        if self.fails:
            raise ValueError("enough")
        return super().training_step(parts[0][:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)

    test_step = validation_step

    def on_train_epoch_end(self) -> None:
        self.counts.append(len(multiprocessing.active_children()))


def left(stage: str, trainer: Any, module: Notes, *loaders: Any) -> int:
    getattr(trainer, stage)(module, *loaders)
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("library", [drivetrain, drivetrain.lightning])
def test_what_stays_for_the_next_epoch_ends_with_the_stage(library: Any, run_alone: Callable[..., Any]) -> None:
    def program() -> list[Any]:
        trainer, module = library.Trainer(max_epochs=3, devices=1, **QUIET), Notes()
        found = [left("fit", trainer, module, None, staying()), module.counts, len(module.readers)]
        return [*found, *(left(stage, trainer, module, staying()) for stage in ("validate", "test", "predict"))]

    assert run_alone(program) == [0, [2, 2, 2], 1, 0, 0, 0]


def test_it_ends_where_several_loaders_are_read_at_once(run_alone: Callable[..., Any]) -> None:
    def program() -> list[Any]:
        module = Notes(lambda: CombinedLoader([staying(), staying()], "min_size"))
        return [left("fit", Trainer(max_epochs=2, devices=1, **QUIET), module), module.counts, len(module.readers)]

    assert run_alone(program) == [0, [2, 2], 2]


def test_it_ends_where_loaders_are_asked_for_anew(run_alone: Callable[..., Any]) -> None:
    def program() -> list[Any]:
        trainer = Trainer(max_epochs=3, devices=1, reload_dataloaders_every_n_epochs=1, **QUIET)
        module, same = Notes(), staying()
        anew = [left("fit", trainer, module), module.counts, len(module.readers)]
        trainer = drivetrain.lightning.Trainer(max_epochs=3, devices=1, reload_dataloaders_every_n_epochs=1, **QUIET)
        module = Notes(lambda: same)  # Lightning's meanings read it itself, and its processes go on
        return [*anew, left("fit", trainer, module), module.counts, len(module.readers)]

    assert run_alone(program) == [0, [1, 1, 1], 3, 0, [1, 1, 1], 1]


def test_it_ends_where_training_fails(run_alone: Callable[..., Any]) -> None:
    def program() -> int:
        module = Notes()
        module.fails = True
        with pytest.raises(ValueError, match="enough"):
            Trainer(max_epochs=1, devices=1, **QUIET).fit(module)
        return len(multiprocessing.active_children())

    assert run_alone(program) == 0


class Ring:
    """What only Python's collector ends; it notes that it did, as a process group would wait for its threads."""

    ended: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.ended.append("ended")


class Collects(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        gc.collect()
        return float(len(Ring.ended))


class Leaves(Classifier):
    """Leaves what an earlier run would, before the loader's processes are started."""

    def on_predict_start(self) -> None:
        gc.disable()  # else it could be gone by then
        Ring()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch

    def on_predict_end(self) -> None:
        gc.enable()


def test_processes_leave_alone_what_a_rank_has_no_use_for_any_more() -> None:
    found = Trainer(strategy="ring", devices=2, **QUIET).predict(Leaves(), DataLoader(Collects(), num_workers=1))
    assert torch.cat(found).tolist() == [0.0, 0.0]
