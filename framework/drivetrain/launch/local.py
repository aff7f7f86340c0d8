"""Start the workers of this node from inside a running program, and bring home their values or the first cause."""

from __future__ import annotations

import gc
import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError, DrivetrainError, Interrupted
from drivetrain.launch import process_settings
from drivetrain.launch import start_method as start_methods
from drivetrain.launch.job import Job
from drivetrain.launch.temporary import temporary_folder

if TYPE_CHECKING:
    from drivetrain.launch.agent import Agent, Stop

ELASTIC_LOG = "launcher.log"
ELASTIC_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing", "torchelastic-events-null")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

Target = Callable[[Job, dict[str, Any]], Any]


def launch(
    target: Target | str,
    payload: dict[str, Any],
    *,
    workers: int,
    num_nodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
    accelerator: str = "cpu",
    backend: str = "gloo",
    log_dir: Path | None = None,
    timeout: float = 300.0,
    start_timeout: float = 60.0,
    max_restarts: int = 0,
    start_method: str = "auto",
    grace: float = 4.0,
) -> dict[int, Any]:
    """Run ``target(job, payload)`` in ``workers`` processes of this node and return the value of each of its ranks.

    The processes are forked where that is sound, and come from a forkserver with target and payload pickled by value,
    and with what this process has set for torch, warnings and loggers, where it has threads or CUDA (a notebook, a
    script that has computed). Nothing stays behind: no process, port, file, signal handler, environment variable.

    Args:
        target: a function, also one of a script or a notebook cell, or ``"module:function"``. Returns plain data.
        payload: its second argument.
        workers: number of processes on this node.
        num_nodes: number of nodes on which ``launch`` is called alike.
        node_rank: number of this node.
        master_addr: host of node 0.
        master_port: free port there; 0 takes any and is for a single node.
        accelerator: ``"cpu"`` or ``"cuda"``, for the job.
        backend: ``"gloo"`` or ``"nccl"``, for the job.
        log_dir: folder for ``rank_N.log``; rank 0 writes to the terminal too. Without it all write to the terminal.
        timeout: seconds that a collective may take.
        start_timeout: seconds that the nodes wait for each other.
        max_restarts: how often all workers are started again after a failure.
        start_method: ``"auto"``, ``"fork"`` or ``"forkserver"``.
        grace: seconds that the workers have after SIGINT or SIGTERM to reach a step boundary, save and end.

    Returns:
        The values by rank, of the ranks of this node.

    Raises:
        ConfigurationError: the request cannot be carried out, or a worker raised this error.
        WorkerError: a worker failed; the first in time, with its traceback.
        Interrupted: this process was asked to stop by a signal, and the workers have ended.
    """
    _check(workers, num_nodes, node_rank, master_addr, master_port)
    method = start_methods.choose(start_method)
    if log_dir is not None:
        log_dir = _folder(Path(log_dir))
    job = Job(
        local_world_size=workers,
        node_rank=node_rank,
        num_nodes=num_nodes,
        accelerator=accelerator,
        backend=backend,
        timeout=timeout,
        origin="local",
    )

    import torch.distributed

    if not torch.distributed.is_available():
        raise ConfigurationError(
            "this build of torch has no torch.distributed: install one that has, or use one worker"
        )

    from drivetrain.launch.agent import Agent, Stop
    from drivetrain.launch.nodes import FixedNodes
    from drivetrain.launch.worker import Assignment

    settings = b"" if method == "fork" else _pickled(process_settings.capture())
    stop = Stop(grace)
    with ExitStack() as restored:
        restored.enter_context(_environment())
        restored.enter_context(_quiet_elastic(log_dir))
        folder = restored.enter_context(temporary_folder("launch"))
        if method == "forkserver":
            restored.enter_context(_own_forkserver(folder))
        restored.enter_context(_noted_signals(stop))
        nodes = FixedNodes(
            node_rank,
            num_nodes,
            master_addr,
            master_port,
            start_timeout=start_timeout,
            timeout=timeout,
            tick=stop.check,
        )
        assignment = Assignment(
            target=target if method == "fork" else _pickled((target, payload)),
            payload=payload if method == "fork" else {},
            settings=b"" if method == "fork" else settings,
            job=job,
            folder=folder,
            log_dir=log_dir,
            threads=0 if "OMP_NUM_THREADS" in os.environ else max(1, _cores() // workers),
            parent=os.getpid() if method == "fork" else 0,
            processes=multiprocessing.get_start_method(allow_none=True),
        )
        agent = Agent(workers, assignment, nodes, stop, start_method=method, max_restarts=max_restarts)
        try:
            values = _run(agent, stop)
        except (DrivetrainError, Interrupted) as error:
            raise error.with_traceback(None)  # noqa: B904  its frames hold the store, and with it an open port
        finally:
            agent.release()
            nodes.shutdown()
    return values


def _run(agent: Agent, stop: Stop) -> dict[int, Any]:
    import pickle

    from drivetrain.launch import failure

    nodes = agent.nodes
    try:
        result = agent.run()
    except Interrupted as interrupted:
        nodes.announce(
            failure.Failure(
                agent.first_rank, 0.0, f"its node was stopped by signal {interrupted.signum}",
                exit_code=interrupted.exit_code, kind="death",
            )
        )  # fmt: skip
        nodes.linger()
        raise
    finally:
        nodes.leave()
    if stop.signum is not None:
        raise Interrupted(stop.signum)
    if result.is_failed():
        assert agent.failure is not None
        cause = nodes.announce(agent.failure)
        nodes.linger()
        raise cause.error()
    # Our own workers wrote them, into a private pipe.
    return {rank: pickle.loads(value) for rank, value in sorted(result.return_values.items())}


def _check(workers: int, num_nodes: int, node_rank: int, master_addr: str, master_port: int) -> None:
    if workers < 1:
        raise ConfigurationError(f"workers={workers} starts nothing: use 1 or more")
    if num_nodes < 1:
        raise ConfigurationError(f"num_nodes={num_nodes} is no number of nodes: use 1 or more")
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(f"node_rank={node_rank} is not one of {num_nodes} nodes: use 0 to {num_nodes - 1}")
    if not 0 <= master_port < 65536:
        raise ConfigurationError(f"master_port={master_port} is no port: use 1 to 65535")
    if num_nodes > 1 and master_port == 0:
        raise ConfigurationError(
            f"{num_nodes} nodes need a master_port that they all know: set one that is free on {master_addr}"
        )


def _cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"log_dir={str(path)!r} cannot be written: {error.strerror}: choose another"
        ) from error
    return path.resolve()


def _pickled(thing: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _pickler(buffer).dump(thing)
        return buffer.getvalue()
    except Exception as error:  # a user's object may raise anything when it is pickled
        raise ConfigurationError(
            f"this process cannot be forked because {start_methods.why_not_fork() or 'forkserver was asked for'}, and "
            f"what the workers need cannot be pickled ({type(error).__name__}: {error}): launch before computing, "
            "or pass plain data"
        ) from error


def _pickler(buffer: io.BytesIO) -> Any:
    """cloudpickle's, and modules of a class of their own (``torch.ops``, ``torch.classes``) by name: it meets them
    wherever a class of a script has an attribute of that name. A class that travels by value keeps its qualified name,
    which callbacks are told apart by."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                name = next((name for name, module in sys.modules.items() if module is obj), None)
                if name is not None:
                    return importlib.import_module, (name,)
            reduced = super().reducer_override(obj)
            if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:  # with the class's state
                attributes, slots = reduced[2]
                state = ({**attributes, "__qualname__": obj.__qualname__}, slots)
                return (*reduced[:2], state, *reduced[3:])
            return reduced

    return Pickler(buffer)


@contextmanager
def _environment() -> Iterator[None]:
    """Put every variable back as it was."""
    before = dict(os.environ)
    # No signal handlers of the agent's: ours only note the signal, where its would raise in the middle of anything.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def _tells_something(record: logging.LogRecord) -> bool:
    """Not that no handler was registered for the signal of no name, which the agent was asked for, see
    :func:`_environment`."""
    return not (record.args == ("",) and str(record.msg).startswith("Failed to register signal handler"))


@contextmanager
def _quiet_elastic(log_dir: Path | None) -> Iterator[None]:
    """Elastic's own account of a failure fills a screen, and torch's formatter imports its compiler for the first line
    (seconds): what it says goes to a file beside the logs, or nowhere."""
    handler: logging.Handler = logging.NullHandler()
    if log_dir is not None:
        handler = logging.FileHandler(log_dir / ELASTIC_LOG, delay=True, encoding="utf-8")
        handler.addFilter(_tells_something)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    changed = []
    for name in ELASTIC_LOGGERS:
        logger = logging.getLogger(name)
        changed.append((logger, logger.handlers[:], logger.propagate))
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, handlers, propagate in changed:
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


@contextmanager
def _own_forkserver(folder: Path) -> Iterator[None]:
    """A forkserver that has torch imported, its socket in ``folder``; stopped at the end unless it was there before."""
    from multiprocessing import forkserver, resource_tracker

    # Python has no public way to stop them.
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    had_server, had_tracker = server._forkserver_pid is not None, tracker._fd is not None
    preloaded = server._preload_modules
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    own_folder = "tempdir" not in config
    if own_folder:
        config["tempdir"] = str(folder)  # else Python makes one that stays until this process ends
    # The trainer's imports take each worker seconds, and here once for all of them; other targets do without it.
    needed = [name for name in ("drivetrain.trainer",) if name in sys.modules]
    manners = "drivetrain.launch.forkserver_manners"
    multiprocessing.set_forkserver_preload([manners, "torch.distributed", "drivetrain.launch.worker", *needed])
    try:
        yield
    finally:
        server._preload_modules = preloaded
        if own_folder:
            del config["tempdir"]
        gc.collect()  # semaphores that still had an owner would be gone when it lets go of them
        # Python leaves both running until this process ends.
        if not had_server:
            server._stop()
        if not had_tracker:
            tracker._stop()


@contextmanager
def _noted_signals(stop: Stop) -> Iterator[None]:
    """Handlers that only note the signal; the former ones come back. What the script itself does on SIGTERM is done as
    well, as where it is its own worker. Off the main thread there can be none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former: dict[int, Any] = {}
    try:
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup means what it says
                former[signum] = signal.signal(signum, stop)
        of_the_script = former.get(signal.SIGTERM)
        if callable(of_the_script):

            def noted(signum: int, frame: FrameType | None) -> None:
                stop(signum, frame)
                of_the_script(signum, frame)

            signal.signal(signal.SIGTERM, noted)
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
