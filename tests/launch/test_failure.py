from __future__ import annotations

import pickle
import signal
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from drivetrain.comm import CollectiveFailed, PeerLost
from drivetrain.errors import (
    ConfigurationError,
    ConflictError,
    Interrupted,
    MetricError,
    MisuseError,
    TrainingError,
    WorkerError,
    WrongKindError,
)
from drivetrain.launch import failure


def _of(rank: int, error: BaseException) -> failure.Failure:
    try:
        raise error
    except BaseException as raised:
        return failure.of_exception(rank, raised)


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (ValueError("no peer like this"), False),
        (RuntimeError("[../gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (CollectiveFailed("rank 0 lost rank 1"), True),
        (PeerLost("rank 0 lost rank 1", 1), True),
        (RuntimeError("CUDA out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_lost_peer_is_an_echo(error: Exception, secondary: bool) -> None:
    assert _of(0, error).secondary is secondary


def test_error_that_wraps_an_echo_is_one() -> None:
    error = TrainingError("step 3 failed")
    error.__cause__ = RuntimeError("Connection closed by peer")
    assert failure.of_exception(0, error).secondary


def test_first_in_time_wins_but_never_an_echo() -> None:
    echo = failure.Failure(0, 1.0, "lost", secondary=True)
    late, early = failure.Failure(1, 3.0, "late"), failure.Failure(2, 2.0, "early")
    assert failure.first_cause([echo, late, early]) is early
    assert failure.first_cause([echo]) is echo


def test_errors_of_the_parent() -> None:
    error = _of(2, ValueError("bad\nworse")).error()
    assert isinstance(error, WorkerError)
    assert error.rank == 2
    assert str(error).splitlines()[0] == "rank 2 failed: ValueError: bad"
    assert "Traceback" in error.cause
    configuration = _of(1, ConfigurationError("devices=0")).error()
    assert isinstance(configuration, ConfigurationError)
    assert (str(configuration), configuration.exit_code) == ("devices=0", 2)

    class Own(ConflictError):
        pass

    for kind, raised in ((WrongKindError, TypeError), (ConflictError, RuntimeError), (Own, RuntimeError)):
        of_its_kind = failure.Failure.from_json(_of(1, kind("no")).as_json()).error()
        assert isinstance(of_its_kind, ConfigurationError) and isinstance(of_its_kind, raised)
        assert (str(of_its_kind), of_its_kind.exit_code) == ("no", 2)
    misuse = _of(1, MisuseError("training_step returned a str")).error()
    assert isinstance(misuse, WorkerError) and misuse.exit_code == 1, "it is known to a run only"
    training = _of(1, TrainingError("loss is NaN at step 3")).error()
    assert str(training) == "rank 1 failed: TrainingError: loss is NaN at step 3"
    interrupted = _of(0, Interrupted(signal.SIGTERM)).error()
    assert isinstance(interrupted, Interrupted)
    assert interrupted.exit_code == 143
    assert str(_of(1, SystemExit(3)).error()) == "rank 1 failed: exited with code 3"
    assert str(_of(1, SystemExit("no data")).error()) == "rank 1 failed: exited with code 1 and said: no data"


def test_deaths_are_named() -> None:
    killed = failure.of_exit_code(0, -signal.SIGKILL, 0.0)
    assert (killed.summary, killed.secondary, killed.exit_code) == ("killed by SIGKILL", False, 137)
    assert failure.of_exit_code(0, -signal.SIGABRT, 0.0).secondary
    assert "CHECK_COLLECTIVES" in str(failure.of_exit_code(0, -signal.SIGABRT, 0.0).error())
    assert str(killed.error()) == "rank 0 failed: killed by SIGKILL"
    assert failure.of_exit_code(0, 7, 0.0).summary == "exited with code 7"


def test_report_survives_the_file(tmp_path: Path) -> None:
    folder = tmp_path
    what = _of(3, KeyError("ü"))
    failure.write_report(folder, what)
    assert failure.read_report(folder, 3) == what
    assert failure.read_report(folder, 2) is None
    assert [path.name for path in folder.iterdir()] == ["failure_3.json"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no such\nimage"), "ValueError: no such (in DataLoader worker process 3)"),
        (KeyError("label"), "KeyError: 'label' (in DataLoader worker process 3)"),
        (AssertionError(), "AssertionError (in DataLoader worker process 3)"),
    ],
)
def test_what_a_loaders_process_raised_is_told_in_the_first_line(error: Exception, told: str) -> None:
    try:
        raise error
    except Exception:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 3")
    with pytest.raises(type(error)) as carried:
        wrapper.reraise()
    carried.value.add_note("batch 2")
    assert failure.in_a_line(carried.value) == f"{told} (batch 2)"
    assert failure.in_a_line(ValueError("Caught a cold in May.\nOriginal")) == "ValueError: Caught a cold in May."


class Pruned(KeyError):
    """What a callback raises to end a trial; made with more than a message."""

    def __init__(self, step: int, why: object) -> None:
        super().__init__(f"at {step}")
        self.step, self.why = step, why


def test_a_script_catches_what_its_worker_raised_by_its_kind(tmp_path: Path) -> None:
    failure.write_report(tmp_path, _of(1, Pruned(3, object())))
    report = failure.read_report(tmp_path, 1)
    assert report is not None
    for error in (report.error(), pickle.loads(pickle.dumps(report.error()))):
        assert isinstance(error, Pruned) and isinstance(error, WorkerError)
        assert (error.step, error.rank, str(error).splitlines()[0]) == (3, 1, "rank 1 failed: Pruned: 'at 3'")
        assert "in _of" in error.cause
    assert type(_of(0, StopIteration()).error()) is WorkerError  # a loop would take it for its end

    class Unknown(OSError):
        """Of a function, which another process does not find by its name."""

    assert isinstance(_of(0, Unknown(28, "full")).error(), OSError)
    assert isinstance(_of(0, MetricError("never logged")).error(), MetricError)


def test_what_ended_a_run_comes_through_a_pool() -> None:
    """A pool of processes would wait for ever for an answer that it cannot read."""
    for error in (WorkerError("failed", rank=1, exit_code=3), Interrupted(signal.SIGINT), Interrupted(signal.SIGTERM)):
        came = pickle.loads(pickle.dumps(error))
        assert type(came) is type(error) and str(came) == str(error) and vars(came) == vars(error)
