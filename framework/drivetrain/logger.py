"""Logger: where metrics and hyper-parameters are written. Exists on every worker, writes on the first only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from drivetrain.launch import current_job


class Logger:
    """Base class. Files are opened on the first write, never in the constructor (a fork may come between).

    The Trainer writes on the first worker only. Modules may call a logger on every worker: decorate what writes with
    :func:`first_worker_only`, and the experiment with :func:`first_worker_experiment`.

    Attributes:
        saves_by_itself: whether it decides when to write what it holds; else ``save`` follows each ``log_metrics``.
        versioned: whether it makes a folder of its own for each run, its ``log_dir``.
        opens_first: whether its experiment is made as a stage begins, before others write, whose writing it follows.
    """

    saves_by_itself = False
    versioned = False
    opens_first = False

    @property
    def name(self) -> str | None:
        return type(self).__name__

    @property
    def version(self) -> str | int | None:
        return None

    def use_version(self, version: str | int | None) -> None:
        """Take the version that the first worker chose; for loggers that choose one by what is free."""

    @property
    def save_dir(self) -> str | None:
        """Root folder of what is written on this machine; None where nothing is."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Folder of all versions."""
        return None

    @property
    def log_dir(self) -> str | Path | None:
        """Folder that this logger writes to, if it does."""
        return None

    @property
    def experiment(self) -> Any:
        """The object of the underlying library, for what this contract does not cover."""
        return None

    @property
    def group_separator(self) -> str:
        """What parts groups in names of metrics."""
        return "/"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars at ``step`` (optimizer steps done). Called on the first worker only."""

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write hyper-parameters, with the final metrics where they are known."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the graph of the module. Called on the first worker when a stage begins."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint callback has saved; it says of itself what and where."""

    def save(self) -> None:
        """Flush to disk."""

    def finalize(self, status: str) -> None:
        """Close; ``status`` is ``"completed"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``."""
        self.save()


# What the Trainer and its callbacks ask of any logger; what a Logger has besides may be missing.
_SAYS = ("name", "version", "save_dir")
_DOES = ("log_metrics", "log_hyperparams", "log_graph", "after_save_checkpoint", "save", "finalize")


def lacks(part: Any) -> list[str]:
    """What is missing of a logger in ``part``, which need not derive from :class:`Logger`: a project's own class, or
    one of another package, that has the same methods. No property of its class is read for that."""
    if isinstance(part, Logger):  # a mock of one says so too, and has its methods only
        return []
    defined = set().union(*(vars(kind) for kind in type(part).__mro__))
    found = [name for name in _SAYS if name not in defined and not _is_plain(part, name)]
    return found + [name for name in _DOES if name not in defined and not callable(getattr(part, name, None))]


def _is_plain(part: Any, name: str) -> bool:
    """Whether it says something by ``name``; what answers to any name with an object (a mock) does not."""
    return hasattr(part, name) and isinstance(getattr(part, name), (str, int, Path, NoneType))


class SilentExperiment:
    """What stands for the experiment on workers that do not write: it takes every call and item, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __getitem__(self, item: Any) -> SilentExperiment:
        return self

    def __setitem__(self, item: Any, value: Any) -> None: ...


class SilentLogger(Logger):
    """Takes the place of a run's loggers where nothing is to be written: every method is there and does nothing."""

    name = ""
    version = ""

    @property
    def experiment(self) -> SilentExperiment:
        return SilentExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def __getitem__(self, index: int) -> SilentLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def first_worker() -> bool:
    """Whether this process is the first worker of its job, or of none."""
    job = current_job()
    return job is None or job.rank == 0


def first_worker_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method do nothing, and return None, on other workers than the first."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if first_worker() else None

    return guarded


def first_worker_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a logger's ``experiment`` be a :class:`SilentExperiment` on other workers than the first."""

    @functools.wraps(function)
    def guarded(logger: Any) -> Any:
        return function(logger) if first_worker() else SilentExperiment()

    return guarded


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Anything asked of a silent experiment."""
