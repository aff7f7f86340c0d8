"""What loggers are told around a stage: the version they write to, the hyper-parameters, how it ended."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint import rng
from drivetrain.config_containers import values_of
from drivetrain.errors import ConflictError
from drivetrain.logger import Logger

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def agree_on_versions(trainer: Trainer) -> None:
    """Loggers that take the first free version take the same one on all workers, those of another launcher too."""
    choosing = [
        logger
        for logger in trainer.loggers
        if getattr(type(logger), "use_version", Logger.use_version) is not Logger.use_version
    ]
    everyone = trainer.strategy.everyone
    if not choosing or everyone.world_size == 1:
        return
    mine = [logger.version for logger in choosing] if everyone.rank == 0 else []
    for logger, version in zip(choosing, everyone.all_gather_plain(mine)[0], strict=True):
        logger.use_version(version)


def open_experiments(trainer: Trainer) -> None:
    """Let each logger make what it writes to, as far as it has such a thing, where that is meant; those that have to be
    there before others in any case."""
    first = [logger for logger in trainer.loggers if getattr(logger, "opens_first", False) is True]
    rest = (
        [logger for logger in trainer.loggers if not any(logger is one for one in first)]
        if trainer.meanings.opens_loggers
        else []
    )
    for logger in [*first, *rest] if trainer.is_global_zero else []:
        getattr(logger, "experiment", None)


def log_hyperparameters(trainer: Trainer) -> None:
    """Hyper-parameters and the module's graph, for loggers that write them.

    Raises:
        ConflictError: module and data module have one of the same name with different values.
    """
    owners = [o for o in (trainer.lightning_module, trainer.datamodule) if o is not None and o._log_hyperparams]
    params: dict[str, Any] = {}
    for owner in owners if trainer.loggers else []:
        for name, value in values_of(owner.hparams_initial).items():
            if name == "_class_path":  # of which class a command line made the owner
                continue
            if name in params and not _same(params[name], value):
                raise ConflictError(
                    f"the hyper-parameter {name!r} is {params[name]!r} in {type(trainer.lightning_module).__name__} and"
                    f" {value!r} in {type(owner).__name__}, and loggers can write one: rename it in one of them, or"
                    " give one save_hyperparameters(logger=False)."
                )
            params[name] = value
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if owners and trainer.enable_autolog_hparams:
            logger.log_hyperparams(params)
        if not trainer.strategy.support.divides:
            _log_graph(trainer, logger)
        logger.save()


def log_graph(trainer: Trainer) -> None:
    """The module's graph by itself, where it will not be whole when hyper-parameters are written."""
    for logger in trainer.loggers if trainer.is_global_zero else []:
        _log_graph(trainer, logger)


def _log_graph(trainer: Trainer, logger: Logger) -> None:
    drawn = trainer.meanings.examples == "drawn" and trainer.world_size == 1  # ranks may have to draw alike
    with nullcontext() if drawn else rng.kept():
        logger.log_graph(trainer.lightning_module)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    equal = one == other
    return bool(equal.all() if hasattr(equal, "all") else equal)  # tensors and arrays compare by element


def finalize(trainer: Trainer) -> None:
    """Tell the loggers how the stage ended."""
    for logger in trainer.loggers if trainer.is_global_zero else []:
        logger.finalize(trainer.meanings.outcomes.get(trainer.status, trainer.status))
