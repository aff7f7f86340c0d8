"""What went wrong in a worker, as it crosses the process boundary, and which of several failures came first."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from drivetrain import errors
from drivetrain.errors import ConfigurationError, DrivetrainError, Interrupted, MisuseError, WorkerError

# What a rank sees when another is gone. Its own fault it is not, though it may be the first that the parent hears of.
PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|peer|"
    r"timed out waiting|operation timed out|failed to recv|failed to send|remote process|nccl|gloo|collective",
    re.IGNORECASE,
)
_CAUGHT = re.compile(r"Caught (\w+) in (.+)\.\nOriginal Traceback")
ABORTED = (
    ": the transport ends a process so where ranks bring tensors of other shapes to one collective"
    " (DRIVETRAIN_CHECK_COLLECTIVES=1 says which; all_gather of rows that may be uneven takes uneven=True)"
)
PEER_GONE_TYPES = {"DistError", "DistNetworkError", "DistBackendError", "DistStoreError", "ConnectionError"}
PEER_GONE_TYPES |= {"CollectiveFailed", "PeerLost"}  # our communicator's


@dataclass(frozen=True)
class Failure:
    """The end of one worker.

    Attributes:
        rank: which worker.
        time: seconds of ``time.time()`` when it failed, written by the worker itself where it could.
        summary: one line, as ``"ValueError: no such file"`` or ``"killed by SIGKILL"``.
        sentence: the message alone, for the errors that drivetrain raises on purpose.
        traceback: the worker's, empty where there is none.
        exit_code: what a command that ran this worker should end with.
        kind: ``"error"``, ``"configuration"``, ``"drivetrain"``, ``"interrupted"`` or ``"death"``.
        secondary: whether it looks like the echo of another rank's failure.
        name: the class of an error of the configuration, which the parent raises again.
        kinds: the classes of another error, as ``module:name``, the nearest first.
        attributes: its public ones that are numbers and words.
    """

    rank: int
    time: float
    summary: str
    sentence: str = ""
    traceback: str = ""
    exit_code: int = 1
    kind: str = "error"
    secondary: bool = False
    name: str = ConfigurationError.__name__
    kinds: Sequence[str] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    def error(self) -> DrivetrainError | Interrupted:
        """The exception that the parent raises for it."""
        if self.kind == "configuration":
            kind: type[ConfigurationError] = getattr(errors, self.name)
            return kind(self.sentence)
        if self.kind == "interrupted":
            return Interrupted(self.exit_code - 128)
        message = f"rank {self.rank} failed: {self.summary}"
        if self.kind == "death" and self.exit_code == 128 + signal.SIGABRT:
            message += ABORTED
        if self.kind == "error" and self.traceback:
            message += f"\n{self.traceback.rstrip()}"
        error = WorkerError.of_kind(_known(self.kinds), message, self.rank)
        own = {"rank": self.rank, "cause": self.traceback or self.summary, "exit_code": self.exit_code}
        vars(error).update({**self.attributes, **own})
        return error

    def as_json(self) -> str:
        """Text that :meth:`from_json` restores."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """The failure that :meth:`as_json` wrote."""
        return cls(**json.loads(text))


def of_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a worker whose target raised ``error``."""
    now = time.time()
    text, summary = str(error), in_a_line(error)
    trace = "".join(traceback.format_exception(error))
    secondary = any(_peer_gone(one) for one in _chain(error))
    if isinstance(error, Interrupted):
        return Failure(rank, now, summary, text, exit_code=error.exit_code, kind="interrupted")
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else f" and said: {error.code}"
        return Failure(rank, now, f"exited with code {code}{said}", exit_code=code, kind="death")
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, now, "interrupted", exit_code=128 + signal.SIGINT, kind="interrupted")
    if isinstance(error, ConfigurationError) and not isinstance(error, MisuseError):
        # A class of a project's own is not known to the parent by its name.
        name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return Failure(rank, now, summary, text, trace, error.exit_code, "configuration", secondary, name)
    kinds = [f"{kind.__module__}:{kind.__qualname__}" for kind in type(error).__mro__]
    plain = {name: value for name, value in vars(error).items() if not name.startswith("_") and _plain(value)}
    if isinstance(error, DrivetrainError):
        return Failure(
            rank, now, summary, text, trace, error.exit_code, "drivetrain", secondary, kinds=kinds, attributes=plain
        )
    return Failure(rank, now, summary, text, trace, secondary=secondary, kinds=kinds, attributes=plain)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _known(kinds: Sequence[str]) -> type[Exception] | None:
    """The nearest of ``kinds`` that this process knows too: a script can catch no other. What ends an iteration is
    none, which a loop around the caller would take for its end."""
    for name in kinds:
        module, _, qualname = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in qualname.split("."):
            found = getattr(found, part, None)
        is_error = isinstance(found, type) and issubclass(found, Exception)
        if is_error and not issubclass(found, (StopIteration, StopAsyncIteration)):
            return cast("type[Exception]", found)
    return None


def in_a_line(error: BaseException) -> str:
    """The kind of ``error``, the first line of its text, and where it was raised if that was noted."""
    name, text, notes = type(error).__name__, str(error), getattr(error, "__notes__", ())
    line = _carried_over(text) or (f"{name}: {text}".splitlines()[0] if text else name)
    return " ".join([line, *(f"({note})" for note in notes[:1])])


def _carried_over(text: str) -> str | None:
    """What another process or thread raised, where torch gives it as the text of an error: ``"Caught ValueError in
    DataLoader worker process 0."``, and the error itself below all of its traceback."""
    told = _CAUGHT.match(text)
    if told is None:
        return None
    name, place = told.groups()
    lines = [line for line in text.splitlines() if re.match(rf"([\w.]+\.)?{name}(: |$)", line)]
    return f"{lines[-1]} (in {place})" if lines else None


def of_exit_code(rank: int, code: int, when: float) -> Failure:
    """The failure of a worker that ended without a word: ``code`` is negative for a signal, as in ``Process``."""
    if code >= 0:
        return Failure(rank, when, way_of_ending(code), exit_code=code or 1, kind="death")
    # Gloo and NCCL abort a process that lost its peers; our own launcher terminates.
    echo = -code in (signal.SIGABRT, signal.SIGTERM)
    return Failure(rank, when, way_of_ending(code), exit_code=128 - code, kind="death", secondary=echo)


def way_of_ending(code: int) -> str:
    """What a process did that ended with ``code``, as in ``Process.exitcode``."""
    if code >= 0:
        return f"exited with code {code}" + ("" if code else " before its work was done")
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def first_cause(failures: list[Failure]) -> Failure:
    """The failure to show: the first in time among those that are not an echo of another, if there is one."""
    return min(failures, key=lambda one: (one.secondary, one.time))


def write_report(folder: Path, failure: Failure) -> None:
    """Leave ``failure`` for the parent: complete or absent."""
    path = _report(folder, failure.rank)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(failure.as_json(), encoding="utf-8")
    beside.replace(path)


def read_report(folder: Path, rank: int) -> Failure | None:
    """The failure that ``rank`` left, if it did."""
    try:
        return Failure.from_json(_report(folder, rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _report(folder: Path, rank: int) -> Path:
    return folder / f"failure_{rank}.json"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _peer_gone(error: BaseException) -> bool:
    if any(kind.__name__ in PEER_GONE_TYPES for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and PEER_GONE.search(str(error)) is not None
