"""What loggers that write to a folder share: ``save_dir/name/version_N/sub_dir`` and ``hparams.yaml`` in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drivetrain.local_path import local_path
from drivetrain.logger import Logger, first_worker_only
from drivetrain.yaml_text import yaml_text
from drivetrain_plugins.loggers.parameters import plain


class VersionedLogger(Logger):
    """Base of the file loggers.

    Args:
        save_dir: root folder.
        name: folder of the experiment in it; ``""`` or None for none.
        version: a number N for the folder ``version_N``, a string for the folder of that name (``""`` for none), or
            None for the first number that is free when it is first asked for.
        prefix: put before every metric's name, with :attr:`LOGGER_JOIN_CHAR` between.
        sub_dir: one more folder below the version's.

    Nothing is created before the first write.
    """

    saves_by_itself = True
    versioned = True
    LOGGER_JOIN_CHAR = "-"  # between prefix and name
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None,
        version: int | str | None,
        prefix: str,
        sub_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        local_path(save_dir, "save_dir")
        self._save_dir = os.fspath(save_dir)
        self._name = name or ""
        self._version = version
        self._prefix = prefix
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self.hparams: dict[str, Any] = {}
        self._hparams_written: dict[str, Any] | None = {}

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def sub_dir(self) -> str | None:
        return self._sub_dir

    @property
    def name(self) -> str:
        return self._name

    @property
    def root_dir(self) -> str:
        """Parent of all versions."""
        local_path(self.save_dir, "save_dir")  # a subclass may name another one, and workers would be the first to see
        return os.path.join(self.save_dir, self.name)

    @property
    def version(self) -> int | str:
        if self._version is None:
            self._version = self._next_version()
        return self._version

    def use_version(self, version: int | str | None) -> None:
        self._version = version

    @property
    def log_dir(self) -> str:
        version = f"version_{self.version}" if isinstance(self.version, int) else self.version
        folder = os.path.join(self.root_dir, version, *([] if self.sub_dir is None else [self.sub_dir]))
        return _expanded(folder)

    def _next_version(self) -> int:
        root = Path(_expanded(self.root_dir))
        if not root.is_dir():
            return 0
        numbers = [entry.name.removeprefix("version_") for entry in root.glob("version_*") if entry.is_dir()]
        return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Names with the prefix, tensors as Python numbers; other values, such as text, as they are."""
        join = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        return {f"{join}{name}": value for name, value in numbers.items()}

    @first_worker_only
    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        """Remember ``params`` (nested as they like) for ``hparams.yaml``; later ones are added to earlier ones."""
        self.hparams.update(plain(params or {}))
        if not self.hparams:
            self._hparams_written = None  # that there are none is written, too

    @first_worker_only
    def save(self) -> None:
        """Write ``hparams.yaml``, complete or not at all."""
        if self.hparams != self._hparams_written:
            path = Path(self.log_dir) / self.NAME_HPARAMS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f"{path.name}.part")
            beside.write_text(yaml_text(self.hparams, sort_keys=False), encoding="utf-8")
            os.replace(beside, path)
            self._hparams_written = dict(self.hparams)

    @first_worker_only
    def finalize(self, status: str) -> None:
        self.save()


def _expanded(folder: str) -> str:
    return os.path.expanduser(os.path.expandvars(folder))
