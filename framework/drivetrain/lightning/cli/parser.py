"""The parser of a command line: jsonargparse's, which knows what a Trainer's parts, optimizers and schedules are."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jsonargparse
import torch
from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.data import DataModule
from drivetrain.errors import WrongKindError
from drivetrain.lightning.cli import class_paths
from drivetrain.lightning.cli.types import LRSchedulerTypeTuple
from drivetrain.module import TrainModule
from drivetrain.trainer import Trainer

jsonargparse.set_parsing_settings(config_read_mode_fsspec_enabled=True)
jsonargparse.register_unresolvable_import_paths(torch)  # torch's functions do not know their module

Classes = type | tuple[type, ...]
AUTOMATIC = "AUTOMATIC"


class LightningArgumentParser(jsonargparse.ArgumentParser):
    """Reads configuration files, options and environment variables; class paths of Lightning's mean drivetrain's.

    Args:
        description: what ``--help`` says first.
        env_prefix: of the environment variables.
        default_env: whether those are read.
        **kwargs: of :class:`jsonargparse.ArgumentParser`.

    Attributes:
        callback_keys: names of the arguments that are callbacks.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        # Classes, and what they are linked to, by the name of the argument.
        self._optimizers: dict[str, tuple[Classes, str]] = {}
        self._lr_schedulers: dict[str, tuple[Classes, str]] = {}
        class_paths.load()
        class_paths.let_loader_read_as_ours(self.parser_mode)

    def add_lightning_class_args(
        self,
        lightning_class: Callable[..., Any] | type,
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add what a Trainer, module, data module or callback is made with.

        Args:
            lightning_class: the class, or a function that returns an object of one.
            nested_key: name below which they are.
            subclass_mode: whether any class derived from it may be named.
            required: whether one must be.

        Returns:
            The names that were added.

        Raises:
            WrongKindError: it is none of them.
        """
        kind = lightning_class
        if not isinstance(kind, type):
            if not callable(kind):
                raise WrongKindError(
                    f"{nested_key}={kind!r}: give a class, or a function that returns an object of one."
                )
            kind = jsonargparse.class_from_function(kind)
        if not issubclass(kind, (Trainer, TrainModule, DataModule, Callback)):
            raise WrongKindError(
                f"{nested_key}={kind.__name__}: derive it from Trainer, LightningModule, LightningDataModule or"
                " Callback of drivetrain.lightning."
            )
        if issubclass(kind, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
        return self.add_class_arguments(
            kind, nested_key, fail_untyped=False, instantiate=not issubclass(kind, Trainer), sub_configs=True
        )

    def add_optimizer_args(
        self,
        optimizer_class: Classes = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add what an optimizer is made with.

        Args:
            optimizer_class: the class; a tuple, where classes derived from those may be named.
            nested_key: name below which its arguments are.
            link_to: argument that they are given to as ``class_path`` and ``init_args``; ``AUTOMATIC`` to be what
                ``configure_optimizers`` gives.
        """
        self._optimizers[nested_key] = (self._add_made_later(optimizer_class, nested_key, {"params"}), link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Classes = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add what a schedule of the learning rate is made with; as :meth:`add_optimizer_args`."""
        self._lr_schedulers[nested_key] = (self._add_made_later(lr_scheduler_class, nested_key, {"optimizer"}), link_to)

    def _add_made_later(self, kinds: Classes, key: str, left_out: set[str]) -> Classes:
        """Arguments of what is made when its first argument is there."""
        common: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": left_out}
        if isinstance(kinds, tuple):
            self.add_subclass_arguments(kinds, key, required=False, **common)
        else:
            self.add_class_arguments(kinds, key, sub_configs=True, **common)
        return kinds

    # What is read, read as drivetrain's.

    def parse_args(self, args: Iterable[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        with class_paths.read_as_ours():
            return super().parse_args(class_paths.ours_in_arguments(given), *more, **kwargs)

    def parse_object(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(super().parse_object).bind(*args, **kwargs)
        name = next(iter(bound.arguments))
        bound.arguments[name] = class_paths.ours(bound.arguments[name])
        with class_paths.read_as_ours():
            return super().parse_object(*bound.args, **bound.kwargs)

    def parse_string(self, *args: Any, **kwargs: Any) -> Any:
        with class_paths.read_as_ours():
            return super().parse_string(*args, **kwargs)

    def parse_path(self, *args: Any, **kwargs: Any) -> Any:
        with class_paths.read_as_ours():
            return super().parse_path(*args, **kwargs)

    def parse_env(self, *args: Any, **kwargs: Any) -> Any:
        with class_paths.read_as_ours():
            return super().parse_env(*args, **kwargs)

    def _load_env_vars(self, env: Any, defaults: bool) -> Any:
        return super()._load_env_vars(
            env={name: class_paths.ours(text, name.rpartition("__")[2].lower()) for name, text in env.items()},
            defaults=defaults,
        )

    def set_defaults(self, *args: Any, **kwargs: Any) -> None:
        super().set_defaults(*(class_paths.ours(each) for each in args), **class_paths.ours(kwargs))

    def dump(self, *args: Any, **kwargs: Any) -> str:
        return class_paths.as_offered(super().dump(*args, **kwargs))
