"""Hyper-parameters in a checkpoint: as plain data for every reader, and what it takes to have the very same values."""

from __future__ import annotations

import enum
import io
import pickle
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from drivetrain.attribute_dict import AttributeDict
from drivetrain.checkpoint.convert import CONFIG, ENUM, TAG, from_safe, to_safe
from drivetrain.checkpoint.trust import trusted
from drivetrain.config_containers import config_of, is_config, values_of
from drivetrain.errors import CheckpointError


def write_hyperparameters(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(plain, rest)``: what every reader understands, and what it takes to have the very same values again.

    An object that is no plain data (a network, a function) is only in ``rest``, pickled, and only made again for a
    reader who trusts the file; what cannot be pickled is left out with a warning. A value that plain data brings back
    as a plainer kind (a configuration of OmegaConf, an Enum, a dataclass) is in both. So is one configuration that all
    of the hyper-parameters are.
    """
    if is_config(values):
        with suppress(CheckpointError):  # one that was allowed objects: each of its values is kept by itself
            safe = to_safe(values)
            return _untagged(safe), {"whole": {"safe": safe, **_objects_of(values)}}
        values = values_of(values)
    plain: dict[str, Any] = {}
    exact: dict[str, Any] = {}
    objects: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        try:
            safe = to_safe(value)
        except CheckpointError:
            try:
                objects[name] = _pickled(value)
            except _UNPICKLABLE as error:
                warnings.warn(
                    f"{where}.{name} is a {type(value).__name__} that cannot be pickled ({error}): it is not in the"
                    f" checkpoint, pass {name}=... when loading.",
                    stacklevel=2,
                )
            continue
        if not _same_kinds(value, from_safe(safe)):
            with suppress(*_UNPICKLABLE):  # its values are there
                objects[name] = _pickled(value)
        if _tagged(safe):
            exact[name] = safe
        plain[name] = _untagged(safe)
    return plain, {key: part for key, part in (("exact", exact), ("objects", objects)) if part}


def read_hyperparameters(
    plain: Mapping[str, Any], rest: Mapping[str, Any], weights_only: bool | None
) -> tuple[Any, list[str]]:
    """The values, and the names of those that are not made here: they hold an object that is neither of a trusted file
    nor of a class that ``torch.serialization.add_safe_globals`` names. A plain value that someone changed in the file
    is what counts. What was one configuration of OmegaConf is one."""
    if is_config(plain):
        return plain, []
    if whole := rest.get("whole"):
        return _configuration(plain, whole, weights_only), []
    values = dict(plain)
    for name, safe in rest.get("exact", {}).items():
        if name not in plain:
            continue
        value = from_safe(safe)  # arrays of words were text in older files
        if _alike(_untagged(safe), plain[name]) or (isinstance(plain[name], str) and str(value) == plain[name]):
            values[name] = value
    objects = rest.get("objects", {})
    trust = trusted(weights_only)
    for name, data in objects.items():
        try:  # without trust, what torch makes of any file, and what the user allowed with add_safe_globals
            value = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=not trust)
        except pickle.UnpicklingError:
            if trust:
                raise
            continue
        if name not in plain or _alike(_untagged(to_safe(value)), plain[name]):
            values[name] = value
    return values, sorted(objects.keys() - values.keys())


_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)


def _objects_of(config: Any) -> dict[str, Any]:
    try:
        return {"object": _pickled(config)}
    except _UNPICKLABLE:  # its values are there
        return {}


def _configuration(plain: Mapping[str, Any], whole: Mapping[str, Any], weights_only: bool | None) -> Any:
    """The configuration as nearly as it may be made here; of ``plain`` where someone changed that in the file."""
    made = from_safe(whole["safe"])
    if "object" in whole:
        trust = trusted(weights_only)
        try:
            made = torch.load(io.BytesIO(whole["object"].numpy().tobytes()), weights_only=not trust)
        except pickle.UnpicklingError:
            if trust:
                raise
    return made if _alike(_untagged(to_safe(made)), plain) else config_of(dict(plain))


def _pickled(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def nested(value: Any) -> Any:
    """Dictionaries as attribute dictionaries, all the way down: a configuration given as one argument."""
    if isinstance(value, Mapping):
        return AttributeDict((key, nested(inner)) for key, inner in value.items())
    return [nested(inner) for inner in value] if type(value) is list else value


def _tagged(safe: Any) -> bool:
    if isinstance(safe, dict):
        return TAG in safe or any(map(_tagged, safe.values()))
    return isinstance(safe, (list, tuple)) and any(map(_tagged, safe))


_SEQUENCES = ("set", "frozenset", "deque")
_MAPPINGS = ("dict", "attributes", "OrderedDict", "Counter", "defaultdict")
_KNOWN_TO_TORCH = ("dtype", "device", "Size", "complex", "bytes", "bytearray")


def _untagged(safe: Any) -> Any:
    """What ``to_safe`` gave, in the plain types nearest to it."""
    if isinstance(safe, (list, tuple)):
        return type(safe)(map(_untagged, safe))
    if not isinstance(safe, dict):
        return safe
    kind = safe.get(TAG)
    if kind is None:
        return {key: _untagged(value) for key, value in safe.items()}
    if kind in (CONFIG, ENUM):
        return _untagged(safe["value"])
    if kind in _MAPPINGS:
        return {_untagged(key): _untagged(value) for key, value in safe["items"]}
    if kind in _SEQUENCES:
        return [_untagged(value) for value in safe["value"]]
    value = from_safe(safe)
    if kind in _KNOWN_TO_TORCH:
        return value
    if kind == "ndarray":
        if safe["scalar"]:
            return value.item()
        if value.dtype.kind == "U":
            return value.tolist()
        return torch.from_numpy(value) if value.dtype.kind in "biufc" else str(value)
    if kind == "ndarray.object":
        return _in_lists([_untagged(one) for one in safe["value"]], safe["shape"])
    return str(value)


def _in_lists(flat: list[Any], shape: list[int]) -> Any:
    """``flat`` in nested lists of this shape, in rows."""
    if not shape:
        return flat[0]
    step = len(flat) // shape[0] if shape[0] else 0
    if len(shape) == 1:
        return flat
    return [_in_lists(flat[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


def _same_kinds(value: Any, again: Any) -> bool:
    """Whether what came back is of the types that went in, as far as dictionaries and lists show theirs."""
    if type(value) is not type(again):
        return isinstance(value, torch.Tensor)
    if is_config(value):  # what refers to other values, and what it was not allowed, did not come back
        return False
    if isinstance(value, enum.Enum):  # elsewhere its class may still have to be imported
        return False
    if isinstance(value, dict):
        return all(_same_kinds(inner, again.get(key)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_same_kinds, value, again))
    return True


def _alike(a: Any, b: Any) -> bool:
    """Whether two pieces of plain data hold the same."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return bool(a == b) or repr(a) == repr(b)  # NaN
