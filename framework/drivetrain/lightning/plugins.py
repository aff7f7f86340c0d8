"""Lightning's plugins: what a Trainer takes through ``plugins=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.lightning import deep_names
from drivetrain.precision import Precision as Precision

__path__: list[str] = []


def _named(kind: str, name: str) -> Any:
    from drivetrain import registry

    return registry.load("precisions", name)(name, None) if kind else None


def MixedPrecision(precision: str = "16-mixed", device: Any = "cuda", scaler: Any = None) -> Precision:
    """``precision="16-mixed"`` or ``"bf16-mixed"`` as an object; the scaler is drivetrain's."""
    if scaler is not None:
        raise ConfigurationError("MixedPrecision(scaler=...): set Trainer(loss_scale=...) for another initial scale.")
    return _named("mixed", precision)


def HalfPrecision(precision: str = "16-true") -> Precision:
    """``precision="bf16-true"`` as an object."""
    return _named("half", precision)


def DoublePrecision() -> Precision:
    """``precision="64-true"`` as an object."""
    return _named("double", "64-true")


_AS_IT_IS = ("None", "32", "32-true")  # what Lightning's default means: modules and batches keep their formats


def precision_among(plugins: Any, precision: Any) -> Any:
    """The precision that ``plugins`` hold, or ``precision`` where they hold none.

    Raises:
        ConfigurationError: they hold something else, or a precision is given twice.
    """
    given = [] if plugins is None else list(plugins) if isinstance(plugins, Sequence) else [plugins]
    for plugin in given:
        if not isinstance(plugin, Precision):
            raise ConfigurationError(
                f"plugins: {type(plugin).__name__} is no Precision, the only plugin that a Trainer takes here: leave it"
                " out; clusters are recognised by themselves, and sync_batchnorm=True synchronises BatchNorm."
            )
    if len(given) > 1 or (given and precision is not None):
        raise ConfigurationError("plugins and precision give more than one precision: give one.")
    if not given and str(precision) in _AS_IT_IS:
        return Precision("32-true")
    return given[0] if given else precision


deep_names.name_below(__name__)
