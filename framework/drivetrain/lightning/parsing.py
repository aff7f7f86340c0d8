"""What modules were made with, and attributes that may be the module's, its hyper-parameters' or its data's."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable, MutableMapping
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from drivetrain.hyperparameters import HyperparametersMixin
from drivetrain.rank_zero import rank_zero_warn


def is_picklable(obj: object) -> bool:
    """Whether ``pickle`` can write ``obj``."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Take out, and tell, what ``pickle`` cannot write."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(
            f"the hyper-parameter {name!r} is left out, as it cannot be pickled: leave it out yourself with"
            f" save_hyperparameters(ignore=[{name!r}])."
        )
        del hparams[name]


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """What ``__init__`` of ``cls`` calls itself, its further positional arguments and its further named ones."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    several = [
        next((p.name for p in parameters if p.kind is kind), None)
        for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    return parameters[0].name, several[0], several[1]


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """The arguments of the ``__init__`` that ``frame`` is of, those in ``**kwargs`` by their names; none where it is of
    no ``__init__`` that knows its class."""
    return _init_of(frame)[1]


def _init_of(frame: FrameType) -> tuple[Any, dict[str, Any]]:
    """The object that ``frame`` makes, and with which arguments."""
    found = frame.f_locals
    cls = found.get("__class__")
    if cls is None or frame.f_code.co_name != "__init__":
        return None, {}
    own, positional, named = parse_class_init_keys(cls)
    arguments = {name: found[name] for name in inspect.signature(cls.__init__).parameters}
    arguments |= arguments.get(named, {}) if named is not None else {}
    left_out = (own, positional, named, "frame", "frame_args")
    return found.get(own), {name: value for name, value in arguments.items() if name not in left_out}


def collect_init_args(
    frame: FrameType,
    path_args: list[dict[str, Any]],
    inside: bool = False,
    classes: tuple[type, ...] = (),
) -> list[dict[str, Any]]:
    """Add to ``path_args`` the arguments of each ``__init__`` of the chain that ``frame`` is in, the most derived
    class's last.

    Args:
        frame: where to begin; frames that are in no chain are passed over.
        path_args: what is known already.
        inside: whether ``frame`` is in the chain, which then ends with the first that is not.
        classes: of whose objects the chain is, by default of any.
    """
    at: FrameType | None = frame
    while at is not None and at.f_back is not None:
        owner, arguments = _init_of(at)
        if "__class__" in at.f_locals and (not classes or isinstance(owner, classes)):
            path_args.append(arguments)
            inside = True
        elif inside:
            break
        at = at.f_back
    return path_args


def save_hyperparameters(
    obj: HyperparametersMixin,
    *args: Any,
    ignore: str | Iterable[str] | None = None,
    frame: FrameType | None = None,
    given_hparams: dict[str, Any] | None = None,
) -> None:
    """``obj.save_hyperparameters(...)``, of the arguments of the calling ``__init__`` or of ``given_hparams``."""
    if given_hparams is None and is_dataclass(obj):
        given_hparams = {field.name: getattr(obj, field.name) for field in fields(obj) if field.init}
    if given_hparams is None:
        caller = inspect.currentframe()
        obj.save_hyperparameters(*args, ignore=ignore, frame=frame or (caller and caller.f_back))
        return
    ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
    if not args:
        chosen: Any = {name: value for name, value in given_hparams.items() if name not in ignored}
    elif len(args) == 1 and not isinstance(args[0], str):
        chosen = args[0]
    else:
        chosen = {name: given_hparams[name] for name in args}
    obj.save_hyperparameters(chosen, ignore=ignored)


def _holders(model: Any, attribute: str) -> list[Any]:
    """The objects and dictionaries that have ``attribute``: the module, its hyper-parameters, its data, theirs."""
    trainer = getattr(model, "_trainer", None)
    data = None if trainer is None else trainer.datamodule
    found = []
    for owner in (model, data):
        if owner is None:
            continue
        if hasattr(owner, attribute):
            found.append(owner)
        if attribute in getattr(owner, "hparams", ()):
            found.append(owner.hparams)
    return found


def _some_holders(model: Any, attribute: str) -> list[Any]:
    found = _holders(model, attribute)
    if not found:
        raise AttributeError(
            f"{type(model).__name__} has no {attribute!r}, and neither have its hyper-parameters nor its data module."
        )
    return found


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Whether the module, its hyper-parameters, its data module or that one's hyper-parameters have ``attribute``."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """``attribute`` of the last of module, its hyper-parameters, data module and its hyper-parameters that have it.

    Raises:
        AttributeError: none has.
    """
    holder = _some_holders(model, attribute)[-1]
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set ``attribute`` wherever :func:`lightning_getattr` may find it.

    Raises:
        AttributeError: it is nowhere.
    """
    for holder in _some_holders(model, attribute):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)
