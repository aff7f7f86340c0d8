"""Saving in an exception handler: this rank alone, never waiting for another and never hiding the first cause."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)


def save_on_exception(trainer: Trainer, path: str | Path, exception: BaseException) -> bool:
    """Save what this rank has at ``path``; says why where it cannot. Returns whether it did.

    Every rank that comes here writes the same name: each puts a complete checkpoint there, so the last one stays.
    """
    cause = f"{type(exception).__name__} on rank {trainer.global_rank}"
    try:
        trainer.save_alone(path)
    except Exception as problem:  # whatever goes wrong here, the exception that is being handled is the one to report
        log.warning("after %s: %s", cause, problem)
        return False
    log.warning("after %s the run was saved at %s", cause, path)
    return True
