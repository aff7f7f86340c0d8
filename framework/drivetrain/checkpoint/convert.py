"""Plain data out of rich Python objects and back, so that a checkpoint never needs the free unpickler.

``torch.load(weights_only=True)`` takes numbers, strings, lists, tuples, dictionaries and tensors. Everything
else is kept as a *tagged* dictionary: ``{"drivetrain:type": "path", "value": "a/b"}``. What comes back:

=============================================  =====================================================
goes in                                        comes back
=============================================  =====================================================
number, str, bytes, list, tuple, dict          the same type (a named tuple as a plain tuple)
Tensor, Parameter, a subclass over them        Tensor on the CPU, same bits
numpy array, scalar, Generator                 the same
Path, set, frozenset, deque, Counter           the same (a path becomes one of the machine that reads)
OrderedDict, defaultdict                       the same (a default that is no builtin type is lost: OrderedDict)
datetime, date, time, timedelta, Decimal, UUID the same
torch dtype, device, Size, layout, Generator   the same (a generator of an absent device fails)
range, slice, complex, bytearray               the same
Enum                                           the same where its class is imported, else its value
Namespace, dataclass                           :class:`AttributeDict`, nested ones too
DictConfig, ListConfig                         the same; interpolations are resolved where they can be
any other Mapping                              dict
=============================================  =====================================================

Anything else is refused by name. Two references to one object come back as two objects.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.attribute_dict import AttributeDict
from drivetrain.checkpoint import enum_member
from drivetrain.config_containers import config_of, plain_config
from drivetrain.errors import CheckpointError

TAG = "drivetrain:type"
CONFIG = "OmegaConf"
ENUM = "Enum"

Key = Any
TensorHook = Callable[[tuple[Key, ...], torch.Tensor], Any]

_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def describe(path: tuple[Key, ...]) -> str:
    """``("hyper_parameters", "layers", 0)`` as ``hyper_parameters.layers[0]``."""
    text = ""
    for key in path:
        text += f"[{key!r}]" if not isinstance(key, str) else f".{key}" if text else key
    return text or "the value"


def to_safe(obj: Any, *, tensor: TensorHook | None = None) -> Any:
    """``obj`` as data that ``torch.load(weights_only=True)`` takes.

    Args:
        obj: any nesting of the types in the table above.
        tensor: called with the path of keys and the tensor for each tensor leaf of ``obj``; what it returns is kept in
            the tensor's place. Without it tensors stay, detached and without the rest of a storage that they only view.

    Raises:
        CheckpointError: an object is of a kind that cannot be kept, or contains itself.
    """
    return _Encoder(tensor or own_tensor).encode(obj, ())


def from_safe(obj: Any, *, tensor: Callable[[Any], Any] | None = None) -> Any:
    """The inverse of :func:`to_safe`. ``tensor`` turns what its hook returned back into the value of the leaf; it is
    called for dictionaries tagged ``"tensor"``.

    Raises:
        CheckpointError: the data holds a tag that this version does not know.
    """
    if isinstance(obj, dict):
        kind = obj.get(TAG)
        if kind is None:
            return {key: from_safe(value, tensor=tensor) for key, value in obj.items()}
        if kind == "tensor" and tensor is not None:
            return tensor(obj)
        decode = _DECODERS.get(kind)
        if decode is None:
            raise CheckpointError(
                f"the checkpoint holds data of the unknown kind {kind!r}; "
                "load it with the newer version of drivetrain that wrote it"
            )
        return decode(obj, lambda value: from_safe(value, tensor=tensor))
    if type(obj) in (list, tuple):
        return type(obj)(from_safe(value, tensor=tensor) for value in obj)
    return obj


def own_tensor(path: tuple[Key, ...], value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        raise CheckpointError(
            f"cannot keep {describe(path)}: a sharded tensor belongs into the shared state, not into one worker's own; "
            "pass its local part"
        )
    value = plain_tensor(value).resolve_conj().resolve_neg()
    if value.device.type == "meta":
        raise CheckpointError(
            f"cannot keep {describe(path)}: a tensor on the meta device has no data; materialise it first"
        )
    # torch.save writes the whole storage that a tensor views: a row of a large buffer would drag the buffer along.
    if value.layout is torch.strided and value.untyped_storage().nbytes() != value.numel() * value.element_size():
        value = value.clone(memory_format=torch.contiguous_format)
    return value


def plain_tensor(value: torch.Tensor) -> torch.Tensor:
    """``value``, detached, of torch's own class, which is read without trust. A package's own class that names its
    columns keeps its numbers; one that is made of several tensors (quantised ones) has none of its own and stays."""
    value = value.detach()
    if type(value) is torch.Tensor or is_traceable_wrapper_subclass(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


class _Encoder:
    """One conversion: carries the hook for tensors and the containers it is inside of."""

    def __init__(self, tensor: TensorHook) -> None:
        self.tensor = tensor
        self.open: set[int] = set()

    def encode(self, obj: Any, path: tuple[Key, ...]) -> Any:
        kind = type(obj)
        if obj is None or kind in (bool, int, float, str):
            return obj
        if isinstance(obj, torch.Tensor):
            return self.tensor(path, obj)
        if id(obj) in self.open:
            raise CheckpointError(f"cannot keep {describe(path)}: it contains itself; break the cycle or leave it out")
        self.open.add(id(obj))
        try:
            return self._encode(obj, kind, path)
        finally:
            self.open.discard(id(obj))

    def _encode(self, obj: Any, kind: type, path: tuple[Key, ...]) -> Any:
        if kind is dict:
            return self.mapping(obj, path)
        if kind is list:
            return self.sequence(obj, path)
        leaf = _LEAVES.get(kind)
        if leaf is not None:
            return leaf(obj)
        if kind in (set, frozenset, deque):
            tagged = {TAG: kind.__name__, "value": self.sequence(obj, path)}
            return tagged | {"maxlen": obj.maxlen} if kind is deque else tagged
        if kind in (OrderedDict, Counter):
            return {TAG: kind.__name__, "items": self.items(obj, path)}
        if kind is defaultdict:
            factory = next((name for name, known in _FACTORIES.items() if known is obj.default_factory), None)
            name = "defaultdict" if factory or obj.default_factory is None else "OrderedDict"
            return {TAG: name, "factory": factory, "items": self.items(obj, path)}
        if isinstance(obj, enum.Enum):
            return {TAG: ENUM, "value": self.encode(obj.value, path), **enum_member.name_of(obj)}
        if isinstance(obj, pathlib.PurePath):
            return {TAG: "path", "value": str(obj)}
        if isinstance(obj, (np.ndarray, np.generic)):
            return self.array(obj, path)
        if isinstance(obj, np.random.Generator):
            return {TAG: "numpy.Generator", "state": self.encode(obj.bit_generator.state, path)}
        if isinstance(obj, torch.Generator):
            return {TAG: "torch.Generator", "device": str(obj.device), "state": obj.get_state()}
        if isinstance(obj, argparse.Namespace):
            return self.attributes(vars(obj), path)
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            return self.attributes({f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}, path)
        plain = plain_config(obj)
        if plain is not None:
            return {TAG: CONFIG, "value": self.encode(plain, path)}
        if isinstance(obj, AttributeDict):
            return self.attributes(obj, path)
        if isinstance(obj, tuple):
            return tuple(self.sequence(obj, path))
        if isinstance(obj, Mapping):
            return self.mapping(obj, path)
        base: Any
        for base in (int, float, str, bytes, list, set, frozenset):  # a subclass is kept as the plain type
            if isinstance(obj, base):
                return self.encode(base(obj), path)
        raise CheckpointError(
            f"cannot keep {describe(path)} in a checkpoint: {kind.__module__}.{kind.__qualname__} is not plain data; "
            "leave it out, or turn it into numbers, strings, lists, dictionaries, arrays or tensors"
        )

    def sequence(self, values: Any, path: tuple[Key, ...]) -> list[Any]:
        return [self.encode(value, (*path, index)) for index, value in enumerate(values)]

    def items(self, values: Mapping[Any, Any], path: tuple[Key, ...]) -> list[tuple[Any, Any]]:
        return [(self.encode(key, (*path, key)), self.encode(value, (*path, key))) for key, value in values.items()]

    def mapping(self, values: Mapping[Any, Any], path: tuple[Key, ...]) -> dict[Any, Any]:
        if TAG not in values and all(key is None or type(key) in (str, int, bool, float) for key in values):
            return {key: self.encode(value, (*path, key)) for key, value in values.items()}
        return {TAG: "dict", "items": self.items(values, path)}

    def attributes(self, values: Mapping[Any, Any], path: tuple[Key, ...]) -> dict[str, Any]:
        """Dictionaries inside become attribute dictionaries too, so that ``config.model.width`` works again."""

        def nested(value: Any) -> Any:
            if type(value) is dict:
                return AttributeDict((key, nested(inner)) for key, inner in value.items())
            return [nested(inner) for inner in value] if type(value) is list else value

        return {TAG: "attributes", "items": self.items({key: nested(value) for key, value in values.items()}, path)}

    def array(self, obj: np.ndarray | np.generic, path: tuple[Key, ...]) -> dict[str, Any]:
        values = np.asarray(obj)
        scalar = isinstance(obj, np.generic)
        if values.dtype.hasobject:
            if values.dtype != np.dtype(object):
                raise CheckpointError(
                    f"cannot keep {describe(path)}: a numpy record of Python objects; use plain columns"
                )
            flat = self.sequence(values.ravel().tolist(), path)
            return {TAG: "ndarray.object", "shape": list(values.shape), "value": flat}
        raw = np.frombuffer(np.ascontiguousarray(values).tobytes(), dtype=np.uint8)
        descr = np.lib.format.dtype_to_descr(values.dtype)
        data = torch.tensor(raw, dtype=torch.uint8)
        return {TAG: "ndarray", "dtype": descr, "shape": list(values.shape), "data": data, "scalar": scalar}


_LEAVES: dict[type, Callable[[Any], Any]] = {
    complex: lambda v: {TAG: "complex", "value": (v.real, v.imag)},
    slice: lambda v: {TAG: "slice", "value": (v.start, v.stop, v.step)},
    # As text, a character a byte: torch writes bytes so that its own safe unpickler refuses the empty ones.
    bytes: lambda v: {TAG: "bytes", "value": v.decode("latin-1")},
    bytearray: lambda v: {TAG: "bytearray", "value": v.decode("latin-1")},
    range: lambda v: {TAG: "range", "value": (v.start, v.stop, v.step)},
    torch.Size: lambda v: {TAG: "torch.Size", "value": list(v)},
    torch.dtype: lambda v: {TAG: "torch.dtype", "value": str(v).removeprefix("torch.")},
    torch.layout: lambda v: {TAG: "torch.layout", "value": str(v).removeprefix("torch.")},
    torch.device: lambda v: {TAG: "torch.device", "value": str(v)},
    datetime.datetime: lambda v: {TAG: "datetime", "value": v.isoformat()},
    datetime.date: lambda v: {TAG: "date", "value": v.isoformat()},
    datetime.time: lambda v: {TAG: "time", "value": v.isoformat()},
    datetime.timedelta: lambda v: {TAG: "timedelta", "value": (v.days, v.seconds, v.microseconds)},
    decimal.Decimal: lambda v: {TAG: "decimal", "value": str(v)},
    uuid.UUID: lambda v: {TAG: "uuid", "value": v.hex},
}

Decode = Callable[[Any], Any]


def _decode_items(obj: dict[str, Any], decode: Decode) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(value)) for key, value in obj["items"]]


def _decode_array(obj: dict[str, Any], decode: Decode) -> Any:
    dtype = np.lib.format.descr_to_dtype(obj["dtype"])
    if dtype.hasobject:
        raise CheckpointError(
            "the checkpoint holds an array of raw object pointers; it was not written by drivetrain, do not use it"
        )
    values = np.frombuffer(obj["data"].numpy().tobytes(), dtype=dtype).reshape(obj["shape"]).copy()
    return values[()] if obj["scalar"] else values


def _decode_object_array(obj: dict[str, Any], decode: Decode) -> Any:
    values = np.empty(len(obj["value"]), dtype=object)
    for index, value in enumerate(obj["value"]):
        values[index] = decode(value)
    return values.reshape(obj["shape"])


def _decode_numpy_generator(obj: dict[str, Any], decode: Decode) -> Any:
    state = decode(obj["state"])
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise CheckpointError(
            f"the checkpoint holds a numpy generator of the unknown kind {name!r}; known: {', '.join(_BIT_GENERATORS)}"
        )
    bits = getattr(np.random, name)()
    bits.state = state
    return np.random.Generator(bits)


def _decode_torch_generator(obj: dict[str, Any], decode: Decode) -> Any:
    generator = torch.Generator(device=obj["device"])
    generator.set_state(obj["state"])
    return generator


def _torch_constant(kind: type) -> Callable[[dict[str, Any], Decode], Any]:
    def decode(obj: dict[str, Any], _: Decode) -> Any:
        value = getattr(torch, obj["value"], None)
        if not isinstance(value, kind):
            raise CheckpointError(
                f"the checkpoint names torch.{obj['value']}, which this version of torch does not have; "
                "use the one that wrote it"
            )
        return value

    return decode


_DECODERS: dict[str, Callable[[dict[str, Any], Decode], Any]] = {
    "dict": lambda o, d: dict(_decode_items(o, d)),
    "attributes": lambda o, d: AttributeDict(_decode_items(o, d)),
    CONFIG: lambda o, d: config_of(d(o["value"])),
    ENUM: lambda o, d: enum_member.find(o["module"], o["class"], o["names"], d(o["value"])),
    "OrderedDict": lambda o, d: OrderedDict(_decode_items(o, d)),
    "Counter": lambda o, d: Counter(dict(_decode_items(o, d))),
    "defaultdict": lambda o, d: defaultdict(_FACTORIES.get(o["factory"] or ""), _decode_items(o, d)),
    "set": lambda o, d: {d(value) for value in o["value"]},
    "frozenset": lambda o, d: frozenset(d(value) for value in o["value"]),
    "deque": lambda o, d: deque((d(value) for value in o["value"]), o["maxlen"]),
    "path": lambda o, d: pathlib.Path(o["value"]),
    "complex": lambda o, d: complex(*o["value"]),
    "bytes": lambda o, d: o["value"].encode("latin-1"),
    "bytearray": lambda o, d: bytearray(o["value"], "latin-1"),
    "range": lambda o, d: range(*o["value"]),
    "slice": lambda o, d: slice(*o["value"]),
    "torch.Size": lambda o, d: torch.Size(o["value"]),
    "torch.dtype": _torch_constant(torch.dtype),
    "torch.layout": _torch_constant(torch.layout),
    "torch.device": lambda o, d: torch.device(o["value"]),
    "torch.Generator": _decode_torch_generator,
    "datetime": lambda o, d: datetime.datetime.fromisoformat(o["value"]),
    "date": lambda o, d: datetime.date.fromisoformat(o["value"]),
    "time": lambda o, d: datetime.time.fromisoformat(o["value"]),
    "timedelta": lambda o, d: datetime.timedelta(*o["value"]),
    "decimal": lambda o, d: decimal.Decimal(o["value"]),
    "uuid": lambda o, d: uuid.UUID(hex=o["value"]),
    "ndarray": _decode_array,
    "ndarray.object": _decode_object_array,
    "numpy.Generator": _decode_numpy_generator,
}
