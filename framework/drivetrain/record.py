"""The run record: ``run.json`` in the run folder, the stable surface that scripts read. Keys are added, never renamed.

=================  ===================================================================================================
``status``         ``"completed"``, ``"stopped"`` (by a callback or ``max_time``), ``"interrupted"``, ``"failed"``
``error``          the sentence that ended the run, or null
``strategy`` ...   ``strategy``, ``world_size``, ``devices`` (a node), ``num_nodes``, ``seed``, ``recipe``
``compression``    the registered name of what makes gradients smaller, ``"none"`` for nothing
``epochs``         epochs begun; ``global_step``: optimizer steps
``metrics``        the last value of everything logged
``loss_curve``     ``[[step, loss], ...]``, global means, one for each optimizer step, thinned beyond 10,000
``weights_digest`` sha256 of the full float weights in name order
``throughput``     ``samples_per_second``
``seconds``        ``total`` and what it went to
``communication``  ``bytes_sent``, ``bytes_dense`` (without compression), ``messages``; where communication was
                   monitored also ``operations`` and ``phases``, of the first worker; ``exposed_seconds_per_step``
                   that backward only waited for gradients, where the engine tells
``checkpoints``    paths of ``best`` and ``last``
``versions``       of drivetrain and torch
=================  ===================================================================================================
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError

FILE = "run.json"
STATUSES = ("completed", "stopped", "interrupted", "failed")
_PARTS = ("total", "data", "forward", "backward", "communication", "optimizer", "checkpoint")


def blank(
    *,
    strategy: str,
    world_size: int,
    devices: int,
    num_nodes: int,
    seed: int,
    recipe: str,
    compression: str = "none",
) -> dict[str, Any]:
    """A record of a run that has not begun: every key is there."""
    return {
        "status": "failed",
        "error": None,
        "strategy": strategy,
        "compression": compression,
        "world_size": world_size,
        "devices": devices,
        "num_nodes": num_nodes,
        "seed": seed,
        "recipe": recipe,
        "epochs": 0,
        "global_step": 0,
        "metrics": {},
        "loss_curve": [],
        "weights_digest": None,
        "throughput": {"samples_per_second": 0.0},
        "seconds": dict.fromkeys(_PARTS, 0.0),
        "communication": {"bytes_sent": 0, "bytes_dense": 0, "messages": 0},
        "checkpoints": {"best": None, "last": None},
        "versions": {name: _version(name) for name in ("drivetrain", "torch")},
    }


def write(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write ``run.json`` so that a reader finds the old file or the whole new one. Not-finite numbers become strings
    (``"nan"``, ``"inf"``): JSON has none."""
    # A key a line: a loss curve of thousands of numbers stays one.
    lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in _plain(record).items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{FILE}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes a file for its owner alone
        os.replace(name, folder / FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return folder / FILE


def write_if_possible(folder: Path, record: Mapping[str, Any]) -> None:
    """:func:`write` while an error is on its way that must not be hidden by one of the disk."""
    try:
        write(folder, record)
    except OSError as error:
        print(f"warning: {folder / FILE} cannot be written: {error.strerror}", file=sys.stderr)


def read(path: Path) -> dict[str, Any]:
    """The record of the run folder ``path`` (or of the file itself), numbers as numbers again.

    Raises:
        ConfigurationError: there is none, or it is not a run record.
    """
    file = path if path.is_file() else path / FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise ConfigurationError(f"{file} cannot be read ({reason}): give the folder of a run") from error
    if not isinstance(record, dict) or "status" not in record or "global_step" not in record:
        raise ConfigurationError(f"{file} is not a run record: give the folder of a run")
    record["metrics"] = {key: float(value) for key, value in record.get("metrics", {}).items()}
    record["loss_curve"] = [[int(step), float(loss)] for step, loss in record.get("loss_curve", [])]
    return record


def left_in(folder: Path) -> dict[str, Any]:
    """The record that a run left in its folder, failed ones too; empty where it did not get that far."""
    return read(folder) if (folder / FILE).exists() else {}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
