"""The parts of a Trainer made from what the user passed: names become plugins, flags become default parts."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain import registry
from drivetrain.callback import Callback
from drivetrain.cli.schema import checked
from drivetrain.declaration import Declaration
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.logger import Logger, lacks
from drivetrain.named_part import named
from drivetrain.precision import Precision
from drivetrain.profiler import PassThroughProfiler, Profiler

if TYPE_CHECKING:
    from drivetrain.configuration import Configuration


def strategy_options(declaration: Declaration, options: Mapping[str, Any]) -> Any:
    """The declared options with ``options`` set, checked as those of a config are; an unknown name is answered with
    the nearest."""
    known = getattr(declaration.options, "__dataclass_fields__", {})
    for name in options:
        if name not in known:
            raise ConfigurationError(f"strategy={declaration.name} has no option {name!r}: {nearest(name, known)}")
    return checked(declaration.options, options, "strategy")


_PRECISION_ALIASES = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "None": "32-true",
}


def precision_of(precision: Any, loss_scale: Any) -> Precision:
    """The precision of that name (also in Lightning's short forms), or the object itself."""
    if isinstance(precision, Precision):
        return precision
    name = _PRECISION_ALIASES.get(str(precision), str(precision))
    return registry.load("precisions", name)(name, loss_scale)


def _listed(given: Any) -> list[Any]:
    """Hydra gives a list of its own kind."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def _made(trainer: Configuration, group: str, given: Any) -> Any:
    """A registered name, alone or with options (``{"name": ..., ...}``) as strategies are given, becomes the part that
    it stands for, where a Trainer takes such."""
    if not trainer.meanings.named_parts or not isinstance(given, (str, Mapping)):
        return given
    options = {"name": given} if isinstance(given, str) else dict(given)
    if "name" not in options:
        raise ConfigurationError(f"{group}: {given!r} has no 'name': {{'name': ..., ...}} names what is registered.")
    name = str(options.pop("name"))
    taken = inspect.signature(registry.load(group, name)).parameters
    wants_folder = "save_dir" in taken and taken["save_dir"].default is inspect.Parameter.empty
    return named(group, name, options, {"save_dir": os.fspath(trainer.default_root_dir)} if wants_folder else {})


def callbacks_of(
    trainer: Configuration, given: Any, checkpointing: bool | None, summary: bool | None
) -> list[Callback]:
    """The user's callbacks and the default ones that he did not replace."""
    if given is None:
        given = []
    found = [trainer.take_callback(_made(trainer, "callbacks", one)) for one in _listed(given)]
    saves = any(callback.saves_checkpoints for callback in found)
    if checkpointing is False and saves and not trainer.fast_dev_run:
        raise ConfigurationError("enable_checkpointing=False goes against the ModelCheckpoint in callbacks: drop one.")
    bars = [type(callback).__name__ for callback in found if callback.shows_progress]
    if len(bars) > 1:
        raise ConfigurationError(f"callbacks have {len(bars)} progress bars ({', '.join(bars)}): keep one.")
    if bars and not (trainer.enable_progress_bar or trainer.fast_dev_run):
        raise ConfigurationError(f"enable_progress_bar=False goes against the {bars[0]} in callbacks: drop one.")
    summary_kind = registry.load("callbacks", "model_summary")
    summarizes = any(isinstance(callback, summary_kind) for callback in found)
    wanted: list[tuple[bool, str, dict[str, Any]]] = [
        (trainer.enable_progress_bar and not bars, "progress_bar", {}),
        (summary is not False and not summarizes, trainer.meanings.model_summary, {}),
        (trainer.max_time is not None, "timer", {"duration": trainer.max_time}),
        (checkpointing is not False and not saves, trainer.meanings.model_checkpoint, {}),
    ]
    for use, name, options in wanted:
        if use:
            kind = registry.load("callbacks", name)
            if not any(isinstance(callback, kind) for callback in found):
                found.append(kind(**options))
            elif options:
                warnings.warn(
                    f"max_time={trainer.max_time!r} is not used: callbacks have a Timer already.", stacklevel=2
                )
    return found


def loggers_of(trainer: Configuration, given: Any) -> list[Logger]:
    if given is False:
        return []
    if given is None or given is True:
        kind, folder = registry.load("loggers", trainer.meanings.logger), os.fspath(trainer.default_root_dir)
        return [kind(folder, name=trainer.meanings.log_folder, default_hp_metric=trainer.meanings.default_hp_metric)]
    found = [_made(trainer, "loggers", one) for one in _listed(given)]
    for logger in found:
        missing = lacks(logger)
        if missing:
            which = f" and has no {', '.join(missing)}" if "log_metrics" not in missing else ""
            raise ConfigurationError(f"logger: {type(logger).__name__} is no Logger{which}, derive it from one.")
    return found


def profiler_of(given: Any) -> Any:
    """The profiler of that registered name, or the object itself; for None one that measures nothing."""
    if given is None:
        return PassThroughProfiler()
    found = registry.load("profilers", given.lower())() if isinstance(given, str) else given
    if not isinstance(found, Profiler):
        raise ConfigurationError(
            f"profiler={given!r} is no Profiler: give 'simple', 'advanced', 'pytorch' or an object of a class derived"
            " from drivetrain.profiler.Profiler."
        )
    return found
