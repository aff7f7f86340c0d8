"""Class paths of Lightning's in configurations: read as drivetrain's, and drivetrain's parts written as Lightning has
them.

A project that changed its imports has YAML files that still say ``lightning.pytorch.callbacks.EarlyStopping``. They
mean the class of that name here, whether or not Lightning is installed as well: its own would not be the Trainer's.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_ROOT = "drivetrain.lightning"
_THEIRS = re.compile(r"(?:lightning\.pytorch|pytorch_lightning|(lightning[._]fabric))((?:\.[A-Za-z_]\w*)+)")
# Modules of what is registered by name; which of their classes are read below which key.
_PLUGINS = ("callbacks", "loggers", "profilers")
_UNDER = {"callbacks": "callbacks", "logger": "loggers", "profiler": "profilers"}


def ours(value: Any, key: str = "") -> Any:
    """``value`` with every string that is a whole class path of Lightning's made drivetrain's.

    Args:
        value: what was parsed: a mapping, a sequence, a string, or whatever else, which stays what it is.
        key: the name that it stands under. A name without a module below ``callbacks``, ``logger`` or ``profiler`` is
            Lightning's class, of which drivetrain may have another one under its own meanings.
    """
    if isinstance(value, str):
        found = _THEIRS.fullmatch(value)
        if found is not None:
            return f"{_ROOT}{'.fabric' if found[1] else ''}{found[2]}"
        return _offered(_UNDER[key]).get(value, value) if key in _UNDER else value
    if isinstance(value, Mapping):
        return {
            name: ours(each, key if name == "class_path" else str(name).rpartition(".")[2])
            for name, each in value.items()
        }
    if type(value) is list:
        return [ours(each, key) for each in value]
    if type(value).__name__ == "Namespace":
        return type(value)(**ours(vars(value)))
    return value


def ours_in_arguments(arguments: Iterable[str]) -> list[str]:
    """The same for what stands on a command line: ``--key=value``, ``--key value``."""
    made, key = [], ""
    for text in arguments:
        if text.startswith("--"):
            option, equals, value = text.partition("=")
            key = _last(option)
            made.append(f"{option}{equals}{ours(value, key)}")
        else:
            made.append(ours(text, key))
            key = ""
    return made


def _last(option: str) -> str:
    return option.removesuffix(".help").removesuffix("+").removesuffix(".class_path").rpartition(".")[2].lstrip("-")


def load() -> None:
    """Import what can be named without its module, which is looked for among the classes that are there."""
    for module in _PLUGINS:
        _offered(module)
    for module in ("accelerators", "cli", "demos", "plugins", "strategies"):
        importlib.import_module(f"{_ROOT}.{module}")


@functools.cache
def _offered(module: str) -> dict[str, str]:
    """Where a class lies here, by its name in ``module``."""
    found = importlib.import_module(f"{_ROOT}.{module}")
    made = {}
    for name in found.NAMES:
        kind = getattr(found, name)
        made[name] = f"{kind.__module__}.{kind.__qualname__}"
    return made


def as_offered(text: str) -> str:
    """A written configuration, in which what is registered by name has its path in ``drivetrain.lightning``."""
    names = {path: f"{_ROOT}.{module}.{name}" for module in _PLUGINS for name, path in _offered(module).items()}
    return re.sub(r"(?<![\w.])drivetrain_plugins(?:\.\w+)+", lambda found: names.get(found[0], found[0]), text)


_reading: ContextVar[bool] = ContextVar("reading", default=False)


@contextmanager
def read_as_ours() -> Iterator[None]:
    """Within this, what jsonargparse loads of texts is given as :func:`ours` gives it."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def let_loader_read_as_ours(mode: str) -> None:
    """Put :func:`ours` behind jsonargparse's loader of a ``parser_mode``. One that a project set itself stays as it is.

    Loaders are of the whole process; outside of :func:`read_as_ours` they give what they gave.
    """
    import jsonargparse
    import yaml

    errors: dict[str, Sequence[type[Exception]]] = {
        "yaml": [yaml.YAMLError],
        "json": [ValueError],
        "jsonnet": [yaml.YAMLError, ValueError],
        "omegaconf": [yaml.YAMLError],
        "omegaconf+": [yaml.YAMLError],
    }
    if mode not in errors:
        return
    jsonargparse.ArgumentParser(parser_mode=mode).parse_string("{}")  # makes the loaders that are made when first used
    given = jsonargparse.get_loader(mode)
    if hasattr(given, "reads_as_ours"):
        return

    @functools.wraps(given)
    def load(text: str, *more: Any, **named: Any) -> Any:
        value = given(text, *more, **named)
        return ours(value) if _reading.get() else value

    load.reads_as_ours = True  # type: ignore[attr-defined]
    jsonargparse.set_loader(mode, load, tuple(errors[mode]))
