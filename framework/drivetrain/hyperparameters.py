"""``save_hyperparameters`` and ``hparams``: what an object was made with, kept for checkpoints and loggers."""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, cast

from torch import nn

from drivetrain.attribute_dict import AttributeDict
from drivetrain.config_containers import is_mapping_config, without
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.given_hyperparameters import given_to
from drivetrain.rank_zero import rank_zero_warn


class HyperparametersMixin:
    """Gives a module or data module ``save_hyperparameters`` and ``hparams`` with Lightning's meanings."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"
    _log_hyperparams = False
    # The argument whose parts the hyper-parameters are, or "kwargs" for several. TorchScript reads annotations.
    hparams_name = cast("str | None", None)

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of the calling ``__init__`` (and of the ``__init__`` of subclasses that called it).

        Args:
            args: names to keep, or one mapping or Namespace of hyper-parameters. Nothing: all arguments.
            ignore: names to leave out.
            frame: frame whose arguments are meant; the caller's by default.
            logger: whether loggers write them.
        """
        frame = frame or (f.f_back if (f := inspect.currentframe()) else None)
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        given = given_to(self)
        if given is None:
            given = _init_arguments(self, frame)
        if not args:
            chosen: Any = given
        elif len(args) == 1 and not isinstance(args[0], str):
            chosen = args[0] if is_mapping_config(args[0]) else _as_dict(args[0])
        else:
            for name in args:
                if not isinstance(name, str):
                    raise ConfigurationError(
                        f"save_hyperparameters(...) in {type(self).__name__} takes names, or one mapping or Namespace"
                        f" alone, not {type(name).__name__}: give the names of arguments."
                    )
                if name not in given:
                    raise ConfigurationError(
                        f"save_hyperparameters({name!r}) in {type(self).__name__}: {nearest(name, given)}"
                    )
            chosen = {name: given[name] for name in args}
        whole = is_mapping_config(chosen)
        chosen = without(chosen, ignored) if whole else {k: v for k, v in chosen.items() if k not in ignored}
        self.hparams_name = "kwargs"
        if len(args) == 1 and not isinstance(args[0], str):
            self.hparams_name = _name_of(args[0], given)
        self._log_hyperparams = logger
        self._set_hparams(chosen)
        self.remove_ignored_hparams(ignored)  # a parent class may have saved them before
        for name, value in () if whole else chosen.items():
            if isinstance(value, nn.Module):
                rank_zero_warn(
                    f"the hyper-parameter {name!r} is an nn.Module, whose weights are in checkpoints as it is: leave it"
                    f" out with save_hyperparameters(ignore=[{name!r}]) and pass it to load_from_checkpoint.",
                    stacklevel=3,
                )
        self._hparams_initial = _copy(self.hparams)

    def _set_hparams(self, hp: Any) -> None:
        """Add what a mapping or Namespace holds to ``hparams``; ``save_hyperparameters`` calls it, and subclasses that
        choose what is kept override it (the name is Lightning's). A configuration of OmegaConf takes their place, so
        that it is one in ``hparams``, with what it refers to."""
        added = self._to_hparams_dict(hp)
        if is_mapping_config(added) or is_mapping_config(self.hparams):
            self.__dict__["_hparams"] = added
        else:
            self.hparams.update(added)

    @staticmethod
    def _to_hparams_dict(hp: Any) -> AttributeDict:
        return cast(AttributeDict, hp) if is_mapping_config(hp) else AttributeDict(_as_dict(hp))

    def remove_ignored_hparams(self, ignore_list: Iterable[str]) -> None:
        """Forget the hyper-parameters of these names."""
        if is_mapping_config(self.hparams):
            self.__dict__["_hparams"] = without(self.hparams, ignore_list)
            return
        for name in ignore_list:
            self.hparams.pop(name, None)

    @property
    def hparams(self) -> AttributeDict:
        if "_hparams" not in self.__dict__:
            self.__dict__["_hparams"] = AttributeDict()
        return self.__dict__["_hparams"]

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyper-parameters as they were saved; changing ``hparams`` later doesn't change these."""
        saved = self.__dict__.get("_hparams_initial")
        return AttributeDict() if saved is None else saved


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, Namespace):
        return dict(vars(value))
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigurationError(
        f"save_hyperparameters takes names, a mapping or a Namespace, not {type(value).__name__}: pass vars(...) of it."
    )


def _name_of(value: Any, arguments: Mapping[str, Any]) -> str | None:
    """The argument that ``value`` is, or is a copy of; None where there is none."""
    for name, given in arguments.items():
        if given is value:
            return name
    for name, given in arguments.items():
        with suppress(ValueError, RuntimeError):  # tensors and arrays in it do not say whether they are equal
            if isinstance(given, Mapping | Namespace) and given == value:
                return name
    return None


def _init_arguments(owner: Any, frame: FrameType | None) -> dict[str, Any]:
    """Arguments of the chain of ``__init__`` frames of ``owner``; the outermost (most derived) one wins."""
    collected: dict[str, Any] = {}
    while frame is not None and not _initialises(frame, owner):  # ``__init__`` may leave it to a method
        frame = frame.f_back
    while frame is not None and _initialises(frame, owner):
        owner_class = frame.f_locals.get("__class__", type(owner))
        arguments: dict[str, Any] = {}
        signature = inspect.signature(owner_class.__init__)
        for name, parameter in list(signature.parameters.items())[1:]:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(frame.f_locals.get(name, {}))
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL and name in frame.f_locals:
                arguments[name] = frame.f_locals[name]
        collected.update(arguments)
        frame = frame.f_back
    return collected


def _initialises(frame: FrameType, owner: Any) -> bool:
    return frame.f_code.co_name == "__init__" and _first_argument(frame) is owner


def _first_argument(frame: FrameType) -> Any:
    """What the frame's function calls ``self``, under whatever name."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def _copy(values: AttributeDict) -> AttributeDict:
    if is_mapping_config(values):
        return copy.deepcopy(values)
    result = AttributeDict()
    for key, value in values.items():
        try:
            result[key] = copy.deepcopy(value)
        except (TypeError, RuntimeError, NotImplementedError):  # not every argument can be copied (locks, generators)
            result[key] = value
    return result
