"""What an optimizer keeps beside its parameters, of any nesting, as plain data and a list of tensors: what a message of
:mod:`drivetrain_plugins.parameter_server.wire` can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain_plugins.parameter_server.wire import DTYPES, WireError


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` as JSON can say it; its tensors are appended to ``tensors``.

    Raises:
        WireError: it holds something else than numbers, texts, tensors, and dictionaries, lists and tuples of these.
    """
    if isinstance(value, Tensor) and value.dtype in DTYPES.values():
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [pack(item, tensors) for item in value]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
    raise WireError(f"its optimizer keeps a {kind} beside its parameters, which no message can hold")


def unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    """What :func:`pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in content}
    items = [unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
