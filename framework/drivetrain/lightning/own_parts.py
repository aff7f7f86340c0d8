"""Parts that a project, or a package that it uses, derived from Lightning's classes.

Strategies, accelerators and precisions: what they override and nothing here calls is refused, for a method that is
silently passed over would train something else. Callbacks and loggers: their bases have the same methods here.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.lightning.accelerators import Accelerator
from drivetrain.lightning.strategies import Asked
from drivetrain.precision import Precision

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
    """``part``, made an instance of ``contract`` as well where it derives from Lightning's class of that name.

    It stays the object that it is. What its class takes from Lightning's comes from ``contract`` afterwards, so that a
    hook that nobody defined costs nothing.

    Raises:
        ConfigurationError: it is one of Lightning's own, or derived from one, which reads what is inside of Lightning.
    """
    kind: Any = type(part)
    theirs = [each for each in kind.__mro__ if _is_lightnings(each)]
    if isinstance(part, contract) or contract.__name__ not in {each.__name__ for each in theirs}:
        return part
    whole = next((each for each in theirs if each.__name__ != contract.__name__), None)
    if whole is not None:
        raise ConfigurationError(
            f"{kind.__name__} is of {whole.__module__}: take {whole.__name__} from drivetrain.lightning, if it has it."
        )
    part.__class__ = _of_both(kind, contract)
    return part


@functools.cache  # callbacks of one type replace each other
def _of_both(kind: type, contract: type) -> type:
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    for name, member in vars(contract).items():
        owner = next((each for each in kind.__mro__ if name in vars(each)), object)
        if _is_lightnings(owner):
            members[name] = member
    make: Any = type(kind)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        members["__reduce_ex__"] = functools.partialmethod(_reduced, kind, contract)
    both: type = make(kind.__name__, (kind, contract), members)
    return both


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
