"""torch's elastic agent with our manners: quick to stop, exact about the first cause, orderly on a signal."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from drivetrain.errors import ConfigurationError, DrivetrainError, Interrupted
from drivetrain.launch import failure
from drivetrain.launch.nodes import FixedNodes
from drivetrain.launch.worker import Assignment, run, started

POLL = 0.02  # seconds between two looks at the workers
ECHO = 2.0  # seconds that the cause may take to report after its echo in another rank
PRIMARY = 0.2  # seconds that an earlier failure may take to report after a later one
NO_MORE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # files, processes or memory
TERMINATE = 3.0  # seconds between SIGTERM and SIGKILL


class OwnLogs(LogsSpecs):
    """The workers write their logs themselves (see ``worker.py``); the agent only learns where its error files go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The launcher's temporary folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """No redirection; one error file for each local rank."""
        files = {}
        for local_rank, env in envs.items():
            files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = str(self._folder / f"elastic_{local_rank}.json")
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(nowhere), stderrs=dict(nowhere), error_files=files)


class Stop:
    """The signal that asked the launcher to stop, noted by its handler. A second one ends the wait for the workers."""

    def __init__(self, grace: float) -> None:
        self.signum: int | None = None
        self.deadline = 0.0
        self.groups: list[int] = []
        self._grace = grace

    def __call__(self, signum: int, frame: types.FrameType | None) -> None:
        """The handler: nothing but memory, and for the second signal a kill."""
        if self.signum is None:
            self.signum = signum
            self.deadline = time.monotonic() + self._grace
            return
        self.deadline = 0.0
        for group in self.groups:  # whatever the launcher waits for then ends too
            _kill_group(group)

    def check(self) -> None:
        """Raise :class:`Interrupted` once a signal has come."""
        if self.signum is not None:
            raise Interrupted(self.signum)


class Agent(LocalElasticAgent):
    """The workers of one node, from start to end.

    Args:
        workers: how many.
        assignment: what each of them is to do.
        nodes: the rendezvous with the other nodes.
        stop: the signals that the launcher receives.
        start_method: ``"fork"`` or ``"forkserver"``.
        max_restarts: how often a failed attempt is repeated.
    """

    def __init__(
        self,
        workers: int,
        assignment: Assignment,
        nodes: FixedNodes,
        stop: Stop,
        *,
        start_method: str,
        max_restarts: int,
    ) -> None:
        spec = WorkerSpec(
            role="worker",
            local_world_size=workers,
            rdzv_handler=nodes,
            entrypoint=run,
            args=(assignment,),
            max_restarts=max_restarts,
            monitor_interval=POLL,
            local_addr="127.0.0.1",  # else every event looks up this host's name, which may take seconds
        )
        super().__init__(spec, OwnLogs(assignment.folder), start_method=start_method)
        self._assignment = assignment
        self.nodes = nodes
        self._stop = stop
        self._seen: dict[int, float] = {}
        self._looked = 0.0
        self.failure: failure.Failure | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop.check()
        for left in self._assignment.folder.glob("f*_*"):
            left.unlink()  # "failure" and "finished" of the attempt before
        self.failure, self._seen, self._looked = None, {}, time.time()
        job = replace(self._assignment.job, attempt=self.nodes.attempt)
        worker_group.spec.args = (replace(self._assignment, job=job),)
        processes = None
        try:
            with _without_main(self._start_method):
                processes = super()._start_workers(worker_group)
        except (EOFError, ConnectionError):
            pass  # told below, without the frames of this one, which hold semaphores
        except OSError as error:
            if error.errno not in NO_MORE:
                raise
            raise ConfigurationError(
                f"this machine does not start {worker_group.spec.local_world_size} workers"
                f" ({(error.strerror or str(error)).lower()}): use fewer, or raise the limit (ulimit -n, ulimit -u)"
            ) from error
        if processes is None:
            self._stop.check()  # a signal to the whole group may have ended it
            raise DrivetrainError(
                "the forkserver that starts the workers ended before it had (killed from outside, or for want of"
                " memory): run it again"
            )
        self._look_first()
        (self._assignment.folder / started(job.attempt)).touch()
        self._stop.groups = [process.pid for process in self._processes().values()]
        return processes

    def _look_first(self) -> None:
        """Keep torch from looking at the workers while one runs. Where it is the first to see that one has ended, it
        gives the others half a minute and kills them, and nobody can tell any more which of them was the cause."""
        context = getattr(self._pcontext, "_pc", None)
        if context is None:
            return
        # A proxy: an object that holds itself would keep its pipes open until the collector comes by.
        join, itself = type(context).join, weakref.proxy(context)

        def look(timeout: float | None = None, grace_period: float | None = None) -> bool:
            if timeout is not None and any(process.exitcode is None for process in itself.processes):
                return False
            return bool(join(itself, timeout, TERMINATE if grace_period is None else grace_period))

        context.join = look

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.signum is not None:
            self._drain(worker_group)
            raise Interrupted(self._stop.signum)
        if self._failures():
            self._settle()
            self._terminate()
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and self.failure is None:  # one ended between the two looks
            self._settle()
        if self.failure is not None and not result.is_failed():  # one left with a good word, its work undone
            return RunResult(state=WorkerState.FAILED)
        return result

    def release(self) -> None:
        """Let go of the store and of the semaphores shared with the workers: an exception may keep this object."""
        self._pcontext = None
        self._store = self._worker_group.store = None

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node, 0 before the ranks are known."""
        return min((worker.global_rank for worker in self._worker_group.workers if worker.global_rank >= 0), default=0)

    def _processes(self) -> dict[int, Any]:
        """The process of each rank on this node."""
        context = getattr(self._pcontext, "_pc", None)
        if context is None:
            return {}
        return {worker.global_rank: context.processes[worker.local_rank] for worker in self._worker_group.workers}

    def _failures(self) -> list[failure.Failure]:
        """Every worker that has ended and not well, or before its work was done, with the moment at which it did."""
        found = []
        for rank, process in self._processes().items():
            code = process.exitcode
            if code is None or (code == 0 and self._is_done(rank)):
                continue
            # Without a report it ended since the last look: the earliest moment counts, for echoes follow it.
            seen = self._seen.setdefault(rank, self._looked)
            report = failure.read_report(self._assignment.folder, rank)
            found.append(report or failure.of_exit_code(rank, code, seen))
        self._looked = time.time()
        return found

    def _end_orphans(self) -> None:
        """End what workers that have ended had started. Processes of a data loader that were forked hold its end of the
        connections to the other workers, who would learn of its end from theirs only, seconds later."""
        for process in self._processes().values():
            if process.exitcode is not None:
                _kill_group(process.pid)

    def _settle(self) -> None:
        """Wait a moment for a failure that came before the one seen, and keep the first cause."""
        start = time.monotonic()
        while True:
            failures = self._failures()
            cause = failure.first_cause(failures)
            told = self.nodes.peer_failure()
            waited = time.monotonic() - start
            if told is not None or waited > (ECHO if cause.secondary else PRIMARY):
                break
            if len(failures) == len(self._processes()) and self._worker_group.group_world_size == 1:
                break
            self._end_orphans()
            time.sleep(POLL)
        self.failure = told or cause

    def _drain(self, worker_group: WorkerGroup) -> None:
        """Pass the signal on and give the workers their time to reach a step boundary, save and end."""
        assert self._stop.signum is not None
        processes = self._processes()
        for process in processes.values():
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, self._stop.signum)
        while time.monotonic() < self._stop.deadline:
            if all(self._is_over(rank, process) for rank, process in processes.items()):
                return
            time.sleep(POLL)

    def _is_over(self, rank: int, process: Any) -> bool:
        """Ended, or has done all its work: it only waits for the agent to take its value."""
        return process.exitcode is not None or self._is_done(rank)

    def _is_done(self, rank: int) -> bool:
        """Whether the worker has done all its work."""
        return (self._assignment.folder / f"finished_{rank}").exists()

    def _terminate(self) -> None:
        """SIGTERM to those that are left, SIGKILL after a short grace; at once where a signal has had its own grace.
        Bounded, unlike the agent's own way."""
        processes = self._processes()
        alive = {rank: process for rank, process in processes.items() if process.exitcode is None}
        for process in alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + (TERMINATE if self._stop.signum is None else 0.0)
        while time.monotonic() < deadline and not all(self._is_over(*one) for one in alive.items()):
            self._end_orphans()
            time.sleep(POLL)
        for process in processes.values():
            _kill_group(process.pid)  # all of it: a worker that was killed could not end its own data loaders
        for process in processes.values():
            process.join(timeout=TERMINATE)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, **more: Any) -> None:
        """Called by the agent at the end of each attempt and of the job."""
        self._terminate()
        super()._shutdown(death_sig, **more)
        self._stop.groups = []

    def _exit_barrier(self) -> None:
        """Called by the agent when all workers of this node have finished."""
        self.nodes.finish()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def _without_main(start_method: str) -> Iterator[None]:
    """A forkserver's child would run the user's script again as ``__main__``. It need not: what it runs is pickled by
    value; and it must not: a script without the usual guard would launch without end."""
    if start_method == "fork":
        yield
        return
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
