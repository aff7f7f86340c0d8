"""Parts that a project, or a package that it uses, derived from Lightning's classes.

Strategies, accelerators and precisions: what they override and nothing here calls is refused, for a method that is
silently passed over would train something else. Callbacks and loggers: their bases have the same methods here.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.lightning.accelerators import Accelerator
from drivetrain.lightning.strategies import Asked
from drivetrain.precision import Precision

_NAMES = {"DataModule": "LightningDataModule", "TrainModule": "LightningModule"}  # Lightning's, where they differ
# What Lightning calls of an accelerator while it runs.
_OF_ACCELERATORS = ("setup", "setup_device", "teardown", "get_device_stats")
# What it calls of a precision under another name, or by other arguments, than drivetrain does.
_OF_PRECISIONS = (
    *("backward", "pre_backward", "post_backward", "optimizer_step", "unscale_gradients", "main_params"),
    *("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "convert_output", "teardown"),
    *(f"{stage}_step_context" for stage in ("train", "val", "test", "predict")),
    *("module_init_context", "tensor_init_context", "on_save_checkpoint", "on_load_checkpoint"),
)


def refuse_what_is_not_called(strategy: Any, accelerator: Any, plugins: Any) -> None:
    """Refuse parts of the Trainer that a project derived from Lightning's classes and that would be passed over.

    Raises:
        ConfigurationError: one overrides a method that is never called here.
    """
    given = plugins if isinstance(plugins, Sequence) else [plugins]
    for part, base, never_called, instead in [
        (strategy, Asked, None, "derive from drivetrain.Strategy, whose methods are called (docs/architecture.md)"),
        (accelerator, Accelerator, _OF_ACCELERATORS, "do it in a callback's setup and teardown"),
        *(
            (
                plugin,
                Precision,
                _OF_PRECISIONS,
                "override convert_input, convert_module, forward_context, scale, unscale or step",
            )
            for plugin in given
        ),
    ]:
        if not isinstance(part, base):
            continue
        names = sorted(_overridden(type(part), never_called))
        if names:
            raise ConfigurationError(
                f"{type(part).__name__} overrides {', '.join(names)}, which nothing calls here: {instead}."
            )


def as_ours(part: Any, contract: type) -> Any:
    """``part``, made an instance of ``contract`` as well where it derives from Lightning's class for the same.

    It stays the object that it is. Whatever its class takes from Lightning's, also by ``super()``, is of ``contract``
    afterwards, so that a hook that nobody defined costs nothing. So are the networks within it.

    Raises:
        ConfigurationError: it is one of Lightning's own, or derived from one, which reads what is inside of Lightning.
    """
    kind = type(part)
    whole = _own_of_lightning(kind, contract)
    if whole is not None:
        raise ConfigurationError(
            f"{kind.__name__} is of {whole.__module__}: take {whole.__name__} from drivetrain.lightning, if it has it."
        )
    for one in part.modules() if isinstance(part, nn.Module) else [part]:
        if _theirs(type(one), contract) is not None and _own_of_lightning(type(one), contract) is None:
            _take(one, contract)
    return part


def taken_as_callback(part: Any) -> bool:
    """Whether ``part``, which derives from no Callback, has every hook that Lightning calls of one (a mock in a test);
    what drivetrain asks of a callback besides it is given then, as the object that it is."""
    own = {name: value for name, value in vars(Callback).items() if not name.startswith("__")}
    hooks = [name for name, value in own.items() if callable(value) and name not in _OURS_OF_CALLBACKS]
    if not all(callable(getattr(part, name, None)) for name in hooks):
        return False
    for name, value in own.items():
        if not callable(value) and not isinstance(value, property):
            setattr(part, name, value)
    for name in _OURS_OF_CALLBACKS:
        setattr(part, name, _nothing)
    return True


_OURS_OF_CALLBACKS = ("_log_to", "before_restore", "before_division")


def _nothing(*arguments: Any) -> None:
    """What a callback of another kind does where only drivetrain asks."""


def _take(part: Any, contract: type) -> None:
    kind: Any = type(part)
    if isinstance(part, contract):
        return
    given = _set_by_properties(part, contract)
    part.__class__ = _of_both(kind, contract)
    for name, value in given.items():
        setattr(part, name, value)
    if isinstance(part, nn.Module):
        for name in ("_device", "_dtype"):  # Lightning keeps them up to date in methods that are no longer called
            vars(part).pop(name, None)


def _own_of_lightning(kind: type, contract: type) -> type | None:
    """What ``kind`` takes from Lightning besides the class that ``contract`` stands for, and what is below that."""
    base = _theirs(kind, contract)
    if base is None or issubclass(kind, contract):
        return None
    return next((each for each in kind.__mro__ if _is_lightnings(each) and each not in base.__mro__), None)


def _theirs(kind: type, contract: type) -> type | None:
    """The class of Lightning's that ``kind`` derives from and ``contract`` stands for."""
    name = _NAMES.get(contract.__name__, contract.__name__)
    return next((each for each in kind.__mro__ if each.__name__ == name and _is_lightnings(each)), None)


def _set_by_properties(part: Any, contract: type) -> dict[str, Any]:
    """What ``part`` was given through properties of Lightning's that are plain attributes here."""
    given = {"hparams_name": vars(part)["_hparams_name"]} if "_hparams_name" in vars(part) else {}
    base = _theirs(type(part), contract)
    for name in dir(base):
        member = getattr(base, name)
        if isinstance(member, property) and member.fset is not None:
            here, value = getattr(contract, name, None), vars(part).get(f"_{name}")
            if value is not None and not isinstance(here, property):
                given[name] = value
    return given


@functools.cache  # callbacks of one type replace each other
def _of_both(kind: type, contract: type) -> type:
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        members["__reduce_ex__"] = functools.partialmethod(_reduced, kind, contract)
    make: Any = type(type(kind).__name__, (type(kind),), {"mro": functools.partialmethod(_order, kind, contract)})
    both: type = make(kind.__name__, (kind, contract), members)
    return both


def _order(both: type, kind: type, contract: type) -> list[type]:
    """The project's own classes first, then ``contract``, and behind it what it takes the place of."""
    base: Any = _theirs(kind, contract)
    own = [each for each in kind.__mro__ if each not in base.__mro__]
    ours = [each for each in contract.__mro__ if each is not object]
    return [both, *own, *ours, *(each for each in base.__mro__ if each not in ours)]


def _reduced(part: Any, kind: type, contract: type, protocol: Any) -> tuple[Any, ...]:
    """What makes a copy of ``part``: its class is found by the name of ``kind`` only."""
    made: Any = object.__reduce_ex__(part, max(2, protocol))  # copyreg.__newobj__, (class, *arguments), state, ...
    return _remade, (kind, contract, *made[1][1:]), *made[2:]


def _remade(kind: type, contract: type, *arguments: Any) -> Any:
    return copyreg.__newobj__(_of_both(kind, contract), *arguments)  # type: ignore[attr-defined]


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def _overridden(kind: type, among: Collection[str] | None) -> Iterable[str]:
    """Names of ``among`` (None: of whatever is called or computed) that classes outside of drivetrain define."""
    for owner in kind.__mro__:
        if owner is object or owner.__module__.partition(".")[0] in ("drivetrain", "drivetrain_plugins"):
            continue
        for name, value in vars(owner).items():
            does = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if (
                does
                and not name.startswith("__")
                and (name != "register_strategies" if among is None else name in among)
            ):
                yield name
