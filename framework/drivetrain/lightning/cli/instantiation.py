"""Objects made of ``class_path`` and ``init_args``, and modules that remember what they were made of."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from drivetrain.data import DataModule
from drivetrain.errors import CheckpointError
from drivetrain.given_hyperparameters import given
from drivetrain.lightning.cli import class_paths
from drivetrain.lightning.cli.package import require
from drivetrain.module import TrainModule

ModuleType = TypeVar("ModuleType")
_HARMLESS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# What every module and data module derives from; among these packages' classes are some that write files.
_COMMON = (*TrainModule.__mro__, *DataModule.__mro__)
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"  # so that either library reads the other's checkpoints


def instantiate_class(args: Any | tuple[Any, ...], init: Mapping[str, Any]) -> Any:
    """An object of the class that ``init["class_path"]`` names.

    Args:
        args: what it is given by position: a tuple, or the one argument.
        init: ``class_path``, and in ``init_args`` what it is given by name.
    """
    module, _, name = class_paths.ours(init["class_path"]).rpartition(".")
    positional = args if isinstance(args, tuple) else (args,)
    return getattr(importlib.import_module(module), name)(*positional, **init.get("init_args", {}))


def instantiate_module(class_type: type[ModuleType], config: Mapping[str, Any]) -> ModuleType:
    """:func:`configured`, of a configuration that is trusted; under Lightning's name."""
    return configured(class_type, config, trusted=True)


def configured(class_type: type[ModuleType], config: Mapping[str, Any], trusted: bool) -> ModuleType:
    """An object of ``class_type``, or of the class below it that ``config["_class_path"]`` names, with objects made of
    what is nested in it: what a checkpoint's ``hyper_parameters`` hold of a module that a command line made.

    Args:
        class_type: what it is, or derives from.
        config: its arguments.
        trusted: whether objects of any class may be made. Otherwise they are modules, optimizers and their schedules,
            and classes of the project's packages: of those that ``class_type`` derives from, but torch and drivetrain.

    Raises:
        CheckpointError: one of another class would have to be made.
        argparse.ArgumentError: ``config`` does not fit the class.
        MissingPackageError: jsonargparse is not installed.
    """
    require("A checkpoint of a module that LightningCLI made")
    from drivetrain.lightning.cli.parser import LightningArgumentParser

    parser = LightningArgumentParser(exit_on_error=False)
    values: dict[str, Any] = {
        name: value for name, value in config.items() if name not in ("_class_path", "_instantiator")
    }
    if "_class_path" in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        values = of_class(config["_class_path"], values)
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    refused: list[str] = []
    project = {_package(kind) for kind in class_type.__mro__} - {_package(kind) for kind in _COMMON}

    def make(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not (issubclass(kind, (class_type, *_HARMLESS)) or _package(kind) in project):
            refused.append(f"{kind.__module__}.{kind.__qualname__}")
            raise CheckpointError(refused[0])
        return kind(*args, **kwargs)

    parsed = parser.parse_object({"module": values})
    try:
        return parser.instantiate(parsed, instantiators=None if trusted else [(make, object, True)]).module
    except Exception as error:  # which jsonargparse puts into one of its own
        if not refused:
            raise
        raise CheckpointError(
            f"{class_type.__name__} needs an object of {refused[0]}, which is not made unasked: pass that argument, or"
            " weights_only=False if you trust where the checkpoint comes from."
        ) from error


def of_class(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What jsonargparse makes an object of the class at ``path`` of, with arguments that were saved: among them may be
    some that only its ``**kwargs`` take, which jsonargparse finds out."""
    return {"class_path": path, "dict_kwargs": dict(values)}


def remembering(key: str, configuration: Callable[[], Any]) -> Callable[..., Any]:
    """An instantiator for jsonargparse: objects save, as hyper-parameters, how they were configured.

    Args:
        key: argument of the command line that the object is.
        configuration: gives what it was configured with, as plain values.
    """

    def make(class_type: type, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any) -> Any:
        found = configuration()
        given_as: dict[str, Any] = copy.deepcopy(found) if isinstance(found, dict) else {}
        for target, value in applied_instantiation_links.items():
            head, _, path = target.partition(f"{key}.")
            if path and not head.strip("."):
                _put(given_as, path.split("."), value)
        if "class_path" in given_as:
            if not _leads_to(given_as["class_path"], class_type):  # one that is nested in it
                return class_type(*args, **kwargs)
            inner = {**(given_as.get("init_args") or {}), **(given_as.get("dict_kwargs") or {})}
            given_as = {"_class_path": given_as["class_path"], **inner}
        with given(class_type, {**given_as, "_instantiator": INSTANTIATOR}):
            return class_type(*args, **kwargs)

    return make


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        values[name] = values = inner if isinstance(inner, dict) else {}
    values[path[-1]] = value


def _leads_to(path: str, kind: type) -> bool:
    """Whether ``path``, which jsonargparse has imported, is one of ``kind``: packages may show what others define."""
    module, _, name = class_paths.ours(path).rpartition(".")
    names = [name]
    while module and module not in sys.modules:  # a class within a class
        module, _, name = module.rpartition(".")
        names.insert(0, name)
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found is kind
