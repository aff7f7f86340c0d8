"""Profiler: what measures named actions of a run. The base class and the one that measures nothing."""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.local_path import local_path


class Profiler(ABC):
    """Derive from it, define ``start`` and ``stop``; ``summary`` gives the report. Names and meanings are Lightning's.

    The report is written when a stage ends, also after an error: by every worker to its own file
    (``{stage}-{filename}-{local rank}.txt``, without rank where there is one process), or by the first worker of a node
    to the standard output where no file is named.

    Args:
        dirpath: folder of the file; default: the Trainer's ``log_dir``.
        filename: of the report, without extension; None for the standard output.

    Attributes:
        measures: whether it measures anything; where it does not, nothing calls it.
    """

    measures = True

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else type(dirpath)(local_path(dirpath, "dirpath"))
        self.filename = filename
        self._stage: str | None = None
        self._local_rank: int | None = None
        self._module: Any = None  # of the stage, for profilers that look into it

    @abstractmethod
    def start(self, action_name: str) -> None:
        """The action of that name begins."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """It ends."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measure what runs within as ``action_name``."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """The report; empty for none."""
        return ""

    @property
    def local_rank(self) -> int:
        return self._local_rank or 0

    # -- a stage ------------------------------------------------------------------------------------------------
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | Path | None = None) -> None:
        """A stage begins. ``local_rank``: of this worker; None where it is the only one."""
        self._stage, self._local_rank = stage, local_rank
        self.dirpath = self.dirpath or log_dir

    def describe(self) -> None:
        """Write the report and end the stage."""
        text = self.summary()
        if text and self.filename and self.dirpath:
            path = os.path.join(self.dirpath, self._prepare_filename())
            os.makedirs(self.dirpath, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
        elif text and self.local_rank == 0:
            print(text, file=sys.stdout, flush=True)
        self.teardown(self._stage)

    def teardown(self, stage: str | None) -> None:
        """Let go of what the stage needed."""

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        """``{stage}-{filename}-{rank}-{action}{extension}`` without characters that file systems do not take."""
        rank = None if self._local_rank is None else str(self._local_rank)
        parts = [part for part in (self._stage, self.filename, rank, action_name) if part]
        return (re.sub(r'[\\/:*?"<>|\s_]+', "_", "-".join(parts)) or "profile") + extension

    def _stats_to_str(self, stats: Mapping[str, str]) -> str:
        """A report of the text for each action."""
        rank = "" if self._local_rank is None else f" rank: {self._local_rank}"
        lines = [f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"]
        for action, text in stats.items():
            lines += [f"Profile stats for: {action}{rank}", text]
        return "\n".join(lines)


class PassThroughProfiler(Profiler):
    """Measures nothing: what a Trainer has that was given no profiler."""

    measures = False

    def start(self, action_name: str) -> None: ...
    def stop(self, action_name: str) -> None: ...
