"""A loader process that dies while its connection is read: the error says which one, however torch met its end."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import loader_processes
from drivetrain.errors import TrainingError
from drivetrain.sharding import BatchSource
from drivetrain.strategy import Shard

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
