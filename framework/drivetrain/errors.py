"""The few errors a user meets. Each message is one sentence: what is wrong, where, and the way out."""

from __future__ import annotations

import difflib
import errno
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says where nothing more can be written


class DrivetrainError(Exception):
    """Base of everything drivetrain raises on purpose. ``exit_code`` is what a command ends with."""

    exit_code = 1


class ConfigurationError(DrivetrainError, ValueError):
    """The request cannot be carried out as written; known before any step is taken (exit code 2)."""

    exit_code = 2


class WrongKindError(ConfigurationError, TypeError):
    """Something of another kind was given than what is asked for."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """The Trainer was given an argument by a name that it does not have."""


class MissingPackageError(ConfigurationError, ModuleNotFoundError):
    """What was asked for needs a package that is not installed."""


class ConflictError(ConfigurationError, RuntimeError):
    """Two things that a module or a script gives do not go together."""


class MissingPartError(ConfigurationError, AttributeError):
    """An object does not have yet, or has not, what is asked of it."""


class MissingHookError(ConfigurationError, NotImplementedError):
    """A hook was called that nobody defined."""


class RemovedHookError(ConfigurationError, NotImplementedError):
    """A hook is defined that older trainers called and nothing calls any more."""


class CheckpointError(DrivetrainError):
    """A checkpoint is missing, damaged or does not fit the module."""


class NoCheckpointError(CheckpointError, ValueError):
    """A checkpoint is asked for by what it is (the best), and there is none yet."""


class UnbuildableError(CheckpointError, TypeError):
    """A class cannot be called with the hyper-parameters that a checkpoint holds."""


class MisfitError(CheckpointError, RuntimeError):
    """The weights in a checkpoint are not those of the module. torch calls it a RuntimeError."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


class TrainingError(DrivetrainError, RuntimeError):
    """Training cannot go on: a loss that is not finite, not a scalar, or has no graph; a metric never logged."""


class MisuseError(TrainingError, ConfigurationError):
    """A module's step gives, or calls, what does not fit, as only the run could show."""

    exit_code = 1


class MetricError(MisuseError):
    """A metric is logged or monitored in a way that does not fit."""


class WorkerError(DrivetrainError):
    """A worker process failed. ``rank`` is the first that did, ``cause`` its traceback or signal."""

    def __init__(self, message: str, *, rank: int, cause: str = "", exit_code: int = 1) -> None:
        Exception.__init__(self, message)  # of a kind that takes other arguments, too
        self.rank = rank
        self.cause = cause
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerError.of_kind, (getattr(self, "_kind", None), self.args[0], self.rank), vars(self)

    @staticmethod
    def of_kind(kind: type[Exception] | None, message: str, rank: int) -> WorkerError:
        """One that ``except kind`` catches, too: a script that catches what its module or callback raises (to go on
        with the next trial of a search) does so whatever the number of workers."""
        if kind is not None and not issubclass(WorkerError, kind):
            space = {"__module__": __name__, "__doc__": WorkerError.__doc__, "_kind": kind}
            with suppress(TypeError):  # a kind that cannot be derived from, or made, like this
                made: type[WorkerError] = type(WorkerError.__name__, (WorkerError, kind), space)
                return made(message, rank=rank)
        return WorkerError(message, rank=rank)


class Interrupted(SystemExit):
    """The job was asked to stop by a signal and stopped in order. ``exit_code`` is 128 + the signal's number, with
    which a script ends that does not catch it. No ``Exception``, as Python's own ``KeyboardInterrupt`` is none: a
    search that goes on with its next trial after whatever a fit raises would go on after Ctrl-C."""

    def __new__(cls, signum: int = signal.SIGTERM) -> Interrupted:
        return super().__new__(_OF_SIGNAL.get(signum, cls))

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
        self.code = self.exit_code = 128 + signum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signum,)


class Terminated(Interrupted):
    """An :class:`Interrupted` by SIGTERM, whoever raises it."""

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(signum)


class InterruptedByKeyboard(Interrupted, KeyboardInterrupt):
    """An :class:`Interrupted` by SIGINT, whoever raises it: what a script does on Ctrl-C is done."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__(signum)


_OF_SIGNAL: dict[int, type[Interrupted]] = {signal.SIGTERM: Terminated, signal.SIGINT: InterruptedByKeyboard}


def note_place(error: BaseException, place: str) -> None:
    """Add to an ``error`` of a project's own code where the run was; the innermost place stays. What drivetrain raises
    says it itself."""
    if isinstance(error, Exception) and not isinstance(error, DrivetrainError) and not hasattr(error, "__notes__"):
        error.add_note(place)


def nearest(name: str, known: Iterable[str]) -> str:
    """A half-sentence that suggests the known name nearest to ``name``, or lists all that are known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


class PossibleUserWarning(UserWarning):
    """Something looks like an oversight, and may be meant."""


class IdleOptionWarning(PossibleUserWarning):
    """An option was set that has no effect in this run."""


class EndStage(Exception):
    """Raised by a callback, on every rank at the same moment: the stage is over, in order, with what it has so far."""
