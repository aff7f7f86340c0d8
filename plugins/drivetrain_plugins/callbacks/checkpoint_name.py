"""File names of checkpoints from a template: ``"{epoch}-{val/loss:.2f}"`` is ``epoch=2-val_loss=0.32``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

JOIN, EQUALS, EXTENSION = "-", "=", ".ckpt"
_FIELD = re.compile(r"\{([^{}:]*)(:[^{}]*)?\}")


def format_name(
    template: str | None, values: Mapping[str, torch.Tensor | float], prefix: str = "", insert_names: bool = True
) -> str:
    """``template`` with its fields filled in, without the extension.

    A field is a metric's name and, after a colon, a format; its value is 0 where the metric is not known. ``epoch``
    and ``step`` are whole numbers. With ``insert_names`` each value stands behind ``name=``, where a ``/`` of the
    name becomes ``_`` so that a metric does not make folders.

    Raises:
        ConfigurationError: a format that does not fit a number.
    """
    if not template:
        template = "{epoch}" + JOIN + "{step}"

    def value(name: str) -> float:
        found = float(values.get(name, 0.0))
        return int(found) if name in ("epoch", "step") else found

    def label(name: str) -> str:
        return f"{name.replace('/', '_')}{EQUALS}" if insert_names else ""

    name = fill(template, value, label)
    return f"{prefix}{JOIN}{name}" if prefix else name


def fill(template: str, value: Callable[[str], Any], label: Callable[[str], str]) -> str:
    """``template`` with each field ``{name:format}`` as ``label(name)`` and the formatted ``value(name)``.

    Raises:
        ConfigurationError: a format that does not fit the value.
    """

    def field(match: re.Match[str]) -> str:
        name, spec = match[1], (match[2] or ":")[1:]
        try:
            return label(name) + format(value(name), spec)
        except ValueError as error:
            raise ConfigurationError(
                f"ModelCheckpoint(filename={template!r}): {match[0]} is not a format for a number ({error})."
            ) from error

    return _FIELD.sub(field, template)


def path_of_first(trainer: Trainer, path: str) -> str:
    """Workers may make names of their own, with a time in them, in a subclass; whether they ask for a file, and how
    many they keep, goes by name. Every worker asks."""
    if trainer.communicator.world_size == 1:
        return path
    return str(trainer.communicator.all_gather_plain(path)[0])


def goes_without_version(callback: Any, path: str) -> ConfigurationError:
    """What to raise where no version of a name that is taken is another name."""
    return ConfigurationError(
        f"{type(callback).__name__}.format_checkpoint_name gives {path} again where that is taken: let it use ver, or"
        " pass enable_version_counter=False to write over the file."
    )
