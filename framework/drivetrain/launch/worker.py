"""The life of one worker that our launcher started: bind it to its parent, set it up, run the target, report."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn, TextIO

from drivetrain.command_line import silence
from drivetrain.errors import ConfigurationError
from drivetrain.launch import failure, own_processes, process_settings, signals
from drivetrain.launch.environment import set_current_job
from drivetrain.launch.job import Job

PR_SET_PDEATHSIG = 1
TERMINAL_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Assignment:
    """What the parent hands to each of its workers.

    Attributes:
        target: the function, its ``"module:name"``, or the pickle of function and payload where a process cannot
            inherit them.
        payload: its second argument.
        job: what is the same for all workers; a worker fills in its own place.
        folder: where reports to the parent go.
        log_dir: where the log of each rank goes; ``None`` leaves the output on the terminal.
        threads: number of torch threads, 0 to leave it to OMP_NUM_THREADS.
        parent: process id of the launcher where the worker is its direct child, else 0.
        processes: how the launcher's own processes start where somebody chose it (``multiprocessing``); the worker's
            (of data loaders) start so too.
        settings: the pickle of what the launcher's process has set for itself, where a worker cannot inherit it.
    """

    target: Callable[[Job, dict[str, Any]], Any] | str | bytes
    payload: dict[str, Any]
    job: Job
    folder: Path
    log_dir: Path | None
    threads: int
    parent: int
    processes: str | None = None
    settings: bytes = b""


def run(assignment: Assignment) -> bytes:
    """Entry point of a worker under the elastic agent; returns the pickled value of the target.

    Pickled here, because torch's queue would move tensors through shared memory, of which a container may have little.
    """
    bind_to_parent(assignment.parent)
    if not assignment.parent:
        _leave_forkserver(assignment.processes)
    own_processes.bind()
    # What the launching process had lives as long as this one. Each full garbage collection would go through all of
    # it, and by that copy the memory that a fork shares.
    gc.freeze()
    _await_siblings(assignment)
    os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
    job = place(assignment.job)
    log = _redirect(assignment.log_dir, job)
    set_current_job(job)
    # Where loader processes put their sockets: else Python makes a folder that stays when a worker does not end well.
    multiprocessing.current_process()._config["tempdir"] = str(assignment.folder)  # type: ignore[attr-defined]
    try:
        if assignment.threads:
            import torch

            torch.set_num_threads(assignment.threads)
        if assignment.settings:  # from the parent through a private pipe
            process_settings.restore(pickle.loads(assignment.settings))
        with signals.handling():
            target, payload = _unpack(assignment)
            if assignment.settings:  # again: what was imported for that may have set what the script set afterwards
                process_settings.restore(pickle.loads(assignment.settings))
            try:
                value = target(job, payload)
            except SystemExit as stop:
                if stop.code not in (None, 0):
                    raise
                value = None
            result = _pickled(value)
    except BaseException as error:
        _fail(assignment.folder, failure.of_exception(job.rank, error), log)
    (assignment.folder / f"finished_{job.rank}").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    return result


def _await_siblings(assignment: Assignment) -> None:
    """Wait until the parent has forked all workers of this attempt.

    A worker that joins the store while the next one is being forked has the parent's store thread at work; a lock that
    this thread holds at that moment (of the resolver, of a log) would stay locked for ever in the forked process.
    """
    gate = assignment.folder / started(assignment.job.attempt)
    while not gate.exists():
        if not assignment.folder.exists():
            sys.exit(1)  # the launcher is gone
        time.sleep(0.002)


def started(attempt: int) -> str:
    """Name of the file that says that all workers of this node are there."""
    return f"started_{attempt}"


def place(job: Job) -> Job:
    """``job`` with this worker's place in it, from the variables that the agent set."""
    number = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return replace(
        job,
        rank=number["RANK"],
        world_size=number["WORLD_SIZE"],
        local_rank=number["LOCAL_RANK"],
        master_addr=os.environ["MASTER_ADDR"],
        master_port=number["MASTER_PORT"],
    )


def bind_to_parent(parent: int) -> None:
    """End with the parent whatever ends it, and be the leader of all processes started from here."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before the line above
    with contextlib.suppress(PermissionError):  # raised for one that leads a group already
        os.setsid()
    for signum in signals.HANDLED:  # the parent's own came with the fork
        signal.signal(signum, signal.SIG_DFL)


def _leave_forkserver(processes: str | None) -> None:
    """Be as a forked worker is. Python gives a forkserver's children the pipe by whose end it notices that its owner is
    gone: with it they would keep it, and so themselves, for ever. It also has them start all processes as they came."""
    manners = sys.modules.get("drivetrain.launch.forkserver_manners")  # not in a forkserver that is somebody else's
    if manners is not None:
        manners.leave()
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    multiprocessing.set_start_method(processes, force=True)


def _unpack(assignment: Assignment) -> tuple[Callable[[Job, dict[str, Any]], Any], dict[str, Any]]:
    target, payload = assignment.target, assignment.payload
    if isinstance(target, bytes):  # from the parent through a private pipe
        target, payload = pickle.loads(target)
    return (resolve(target) if isinstance(target, str) else target), payload


def resolve(path: str) -> Callable[[Job, dict[str, Any]], Any]:
    """The function named ``"module:function"``.

    Raises:
        ConfigurationError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"target {path!r} is not a 'module:function' that can be imported: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"target {path!r} is a {type(found).__name__}, not a function")
    return found


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"a worker can return plain data only, and {type(value).__name__} is not: {error}"
        ) from error


def _fail(folder: Path, what: failure.Failure, log: TextIO | None) -> NoReturn:
    """Report and be gone at once: a normal end would wait for threads that wait for other ranks."""
    try:
        failure.write_report(folder, what)
    except OSError as error:  # no room for temporary files: the parent will only know the exit code
        with contextlib.suppress(OSError, ValueError):
            print(f"rank {what.rank} cannot report to its launcher ({error}): {what.summary}", file=sys.stderr)
    # The parent shows it on the terminal; here it goes where somebody looks for this rank.
    if log is not None:
        log.write(f"{what.traceback or what.summary}\n")
        log.flush()
    with contextlib.suppress(OSError, ValueError):  # the streams may be closed or gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(what.exit_code if 0 < what.exit_code < 256 else 1)


def _redirect(log_dir: Path | None, job: Job) -> TextIO | None:
    """Rank 0 writes to the terminal and its log, the others to their log only."""
    if log_dir is None:
        return None
    log = open(log_dir / f"rank_{job.rank}.log", "a", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115
    if job.rank == 0:
        # In Python and not through a pipe: the terminal stays one, and a progress bar can draw on it.
        sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
    else:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)  # output of native libraries too
        sys.stdout = sys.stderr = log
    return log


class Tee(io.TextIOBase):
    """A text stream that shows what is written on ``terminal`` and keeps it in ``log`` without the terminal's codes.

    A terminal that takes nothing any more (a pipe that nobody reads, a full device) ends no training: the log says so,
    and has the rest.
    """

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        super().__init__()
        self._terminal = terminal
        self._log = log
        self._shown = True

    def _show(self, show: Callable[[], Any]) -> None:
        if not self._shown:
            return
        try:
            show()
        except OSError as error:
            self._shown = False
            self._log.write(
                f"\nthe terminal cannot be written any more ({error.strerror}): the rest is in this log only\n"
            )
            silence(self._terminal)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the terminal: rich asks before it draws."""
        return self._terminal.encoding

    def write(self, text: str) -> int:
        """Write to both."""
        self._show(lambda: self._terminal.write(text))
        kept = TERMINAL_CONTROL.sub("", text)
        if kept.strip("\r"):
            self._log.write(kept)
        return len(text)

    def flush(self) -> None:
        """Flush both."""
        self._show(self._terminal.flush)
        self._log.flush()

    def isatty(self) -> bool:
        """Whether the terminal is one."""
        return self._terminal.isatty()

    def fileno(self) -> int:
        """The terminal's descriptor."""
        return self._terminal.fileno()

    def writable(self) -> bool:
        """Always."""
        return True
