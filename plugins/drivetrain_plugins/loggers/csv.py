"""Metrics as one CSV file, ``metrics.csv``: a row for each call, a column for each metric ever logged."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.logger import first_worker_experiment, first_worker_only
from drivetrain_plugins.loggers.versioned import VersionedLogger


class CSVLogger(VersionedLogger):
    """Arguments and meanings are those of Lightning's CSVLogger.

    Args:
        save_dir, name, version, prefix: where to write, see :class:`VersionedLogger`.
        flush_logs_every_n_steps: rows are held in memory until the step has moved on by so many.

    A file that is there already (a resumed run) is continued. Rows are appended in one write; when a new column
    comes, the file is written anew beside and renamed, so a kill loses at most the rows still in memory. A row that a
    kill cut short is dropped by the next writer.
    """

    line_end = "\n"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "drivetrain_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] | None = None  # None: the file was not looked at yet
        self._flushed = 0  # groups of so many steps that were held and are written

    @property
    def metrics_file_path(self) -> Path:
        return Path(self.log_dir) / "metrics.csv"

    @property
    @first_worker_experiment
    def experiment(self) -> CSVLogger:
        """This logger itself: ``log_metrics``, ``log_hparams``, ``save``. Its folder is made, so that a later run takes
        another version also where nothing comes to be written."""
        os.makedirs(self.log_dir, exist_ok=True)
        return self

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows that are not in the file yet."""
        return self._rows

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Remember hyper-parameters and write them now."""
        self.log_hyperparams(params)

    @first_worker_only
    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        """They are written at once, as no row may ever follow."""
        super().log_hyperparams(params, metrics)
        super().save()

    @first_worker_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = len(self._rows) if step is None else step
        self._rows.append(self._prefixed(metrics) | {"step": step})  # also where a metric has the column's name
        group = (step + 1) // self._flush_every
        if group != self._flushed or (step + 1) % self._flush_every == 0:  # rows of one step come one by one
            self.save()
            self._flushed = group

    @first_worker_only
    def save(self) -> None:
        super().save()
        if not self._rows:
            return
        os.makedirs(self.log_dir, exist_ok=True)
        if self._columns is None:
            self._columns = self._recover()
        known = set(self._columns)
        fresh = list(dict.fromkeys(name for row in self._rows for name in row if name not in known))
        if fresh:
            self._rewrite(sorted([*self._columns, *fresh]))
        with self.metrics_file_path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._text(self._columns, self._rows))
        self._rows.clear()

    def _recover(self) -> list[str]:
        """The columns of the file that is there, after a row cut short at its end is removed."""
        path = self.metrics_file_path
        if not path.exists():
            return []
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(path, end)
        return next(csv.reader(io.StringIO(data[:end].decode("utf-8"))), [])

    def _rewrite(self, columns: list[str]) -> None:
        path = self.metrics_file_path
        rows: list[dict[str, Any]] = []
        if self._columns:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
        beside = path.with_suffix(".csv.part")
        beside.write_text(self._text(columns, rows, header=True), encoding="utf-8", newline="")
        os.replace(beside, path)
        self._columns = columns

    def _text(self, columns: list[str], rows: list[dict[str, Any]], header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator=self.line_end)
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
