"""Which checkpoint ``resume`` means: looked up and verified before a run folder is made or a worker starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drivetrain import record
from drivetrain.cli.request import Request
from drivetrain.errors import CheckpointError, ConfigurationError

CHECKPOINTS = "checkpoints"


def found(request: Request, folder: Path) -> Request:
    """``request`` with the checkpoint that a run in ``folder`` goes on from; ``auto`` is left to the workers.

    Raises:
        ConfigurationError: there is none, or it is damaged.
    """
    resume = request.job.resume
    if resume in (None, "auto"):
        return request
    own = (request.config.get("checkpoint") or {}).get("dir")
    place = folder / CHECKPOINTS if own is None else Path(str(own))
    if resume in ("last", "best") and (not place.is_dir() or not any(place.iterdir())):
        raise ConfigurationError(
            f"resume={resume}: there is no checkpoint in {place}: set hydra.run.dir to the folder of the"
            " run to go on with, or give a checkpoint"
        )
    spec = best(folder) if resume == "best" else of_run(Path(resume)) if resume != "last" else resume
    from drivetrain import checkpoint, snapshot  # these import torch, which a run without it can put off

    try:
        path = checkpoint.resolve(spec, place)
        if path is not None:
            snapshot.outline(path)
    except (CheckpointError, OSError) as error:
        raise ConfigurationError(f"resume={resume}: {error}") from error
    return replace(request, resume_from=None if path is None else str(path.absolute()))


def of_run(path: Path) -> str:
    """``path``, or the last checkpoint of the run whose folder it is, where that kept its checkpoints elsewhere."""
    if not (path / record.FILE).is_file() or (path / CHECKPOINTS).is_dir():
        return str(path)
    last = record.read(path).get("checkpoints", {}).get("last")
    if not last:
        raise ConfigurationError(f"resume={path}: that run left no checkpoint; name another, or leave resume out")
    return str(last)


def best(folder: Path) -> str:
    """The best checkpoint of the run in ``folder``, as its record names it."""
    kept = (folder / record.FILE).is_file() and record.read(folder).get("checkpoints", {}).get("best")
    if not kept:
        raise ConfigurationError(
            f"resume=best: the run in {folder} does not say which of its checkpoints is the best: use resume=last or"
            " give a path"
        )
    return str(kept)
