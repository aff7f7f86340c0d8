"""Reading and setting a hyper-parameter by name wherever a project keeps it: module, data module, or their hparams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def places(trainer: Trainer, name: str) -> list[Any]:
    """The objects and mappings that have ``name``, the module first."""
    found: list[Any] = []
    for owner in (trainer.lightning_module, trainer.datamodule):
        if owner is None:
            continue
        if hasattr(owner, name):
            found.append(owner)
        if name in getattr(owner, "hparams", {}):
            found.append(owner.hparams)
    return found


def get(trainer: Trainer, name: str) -> Any:
    """Its value.

    Raises:
        ConfigurationError: nobody has it.
    """
    found = places(trainer, name)
    if not found:
        raise ConfigurationError(
            f"neither {type(trainer.lightning_module).__name__} nor a data module has {name!r}, as attribute or among"
            f" its hparams: set self.{name}, or name another attribute."
        )
    return found[0][name] if isinstance(found[0], dict) else getattr(found[0], name)


def put(trainer: Trainer, name: str, value: Any) -> None:
    """Set it in every place that has it."""
    for place in places(trainer, name):
        if isinstance(place, dict):
            place[name] = value
        else:
            setattr(place, name, value)
