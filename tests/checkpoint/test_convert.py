"""Every type that a checkpoint keeps comes back, through a file that loads with weights_only=True."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, ListConfig, OmegaConf

from drivetrain.checkpoint.convert import TAG, AttributeDict, from_safe, to_safe
from drivetrain.errors import CheckpointError


def through_file(obj: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(to_safe(obj), buffer)
    buffer.seek(0)
    return from_safe(torch.load(buffer, weights_only=True))


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class _Loud(type):
    def __getattr__(cls, name: str) -> Any:
        raise AssertionError(f"{name} was looked up through code of the class")


class Lazy(metaclass=_Loud): ...


class Name(str):
    __slots__ = ()


@dataclasses.dataclass
class Options:
    width: int
    folder: pathlib.Path
    inner: dict[str, Any]


EXACT = [
    None,
    True,
    -(2**100),
    1.5,
    "text",
    b"\x00\xff",
    1 + 2j,
    bytearray(b"ab"),
    (1, (2, [3])),
    {"a": {1: "int key", None: 2, 1.5: 3, False: 4}},
    {(1, "b"): [()], pathlib.Path("k"): 1},
    {TAG: "a user's own key"},
    {1, 2},
    frozenset({"x"}),
    deque([1, 2], maxlen=3),
    Counter("aab"),
    OrderedDict([("b", 1), ("a", 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {"a": 1}),
    pathlib.Path("runs/1"),
    pathlib.Path("not-utf8-\udcff"),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
    datetime.date(2024, 1, 2),
    datetime.time(1, 2, 3),
    datetime.timedelta(days=-1, microseconds=7),
    decimal.Decimal("1.10"),
    uuid.UUID(int=5),
    range(1, 9, 2),
    slice(None, 3),
    torch.float16,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    torch.strided,
]


@pytest.mark.parametrize("value", EXACT, ids=lambda value: f"{type(value).__name__}")
def test_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = through_file({"deep": [value]})["deep"][0]
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen
    if isinstance(value, defaultdict):
        assert back.default_factory == value.default_factory
    if isinstance(value, dict):
        assert list(back) == list(value)


ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3).T,
    np.array([np.nan, -0.0, np.inf], dtype=np.float64),
    np.zeros((0, 3), dtype=np.float32),
    np.array(3.5),
    np.array(["ab", "c"]),
    np.array([True, False]),
    np.array(["2024-01-02"], dtype="datetime64[ns]"),
    np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    np.arange(3, dtype=">i4"),
    np.array([1 + 2j], dtype=np.complex64),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: str(value.dtype))
def test_arrays_keep_dtype_shape_and_bytes(value: np.ndarray) -> None:
    back = through_file([value])[0]
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert back.flags.writeable


def test_object_arrays_and_scalars() -> None:
    values = np.array([[pathlib.Path("a"), None]], dtype=object)
    back = through_file(values)
    assert back.dtype == object
    assert back.tolist() == values.tolist()
    for scalar in (np.float32(0.1), np.int64(-1), np.bool_(True), np.str_("s")):
        again = through_file(scalar)
        assert again == scalar
        assert type(again) is type(scalar)


def test_generators_go_on_with_the_same_numbers() -> None:
    numpy_generator, torch_generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    numpy_generator.random(5)
    back_numpy, back_torch = through_file((numpy_generator, torch_generator))
    assert back_numpy.random(4).tolist() == numpy_generator.random(4).tolist()
    assert torch.equal(torch.rand(4, generator=back_torch), torch.rand(4, generator=torch_generator))


def test_structures_come_back_as_attribute_dictionaries() -> None:
    config = OmegaConf.create({"model": {"width": 8, "twice": "${model.width}", "layers": [{"k": 3}]}})
    options = Options(4, pathlib.Path("x"), {"a": {"b": 1}})
    back = through_file(
        {"n": argparse.Namespace(lr=0.1, sub={"x": 1}), "c": config, "d": options, "l": config.model.layers}
    )
    assert isinstance(back["n"], AttributeDict)
    assert (back["n"].lr, back["n"].sub.x) == (0.1, 1)
    assert isinstance(back["c"], DictConfig) and isinstance(back["l"], ListConfig)
    assert (back["c"].model.twice, back["c"].model.layers[0].k) == (8, 3)
    assert (back["d"].width, back["d"].folder, back["d"].inner.a.b) == (4, pathlib.Path("x"), 1)
    assert back["l"] == [{"k": 3}]
    with pytest.raises(AttributeError, match="known: lr, sub"):
        _ = back["n"].absent
    back["n"].fresh = 2
    assert back["n"]["fresh"] == 2


def test_a_config_that_refers_outside_keeps_its_text() -> None:
    back = through_file(OmegaConf.create({"a": "${nowhere}", "b": "???"}))
    assert OmegaConf.to_container(back) == {"a": "${nowhere}", "b": "???"}


def test_a_config_that_holds_what_it_may_not_in_general_comes_back_as_an_attribute_dictionary() -> None:
    config = OmegaConf.create({"on": torch.device("cpu")}, flags={"allow_objects": True})
    back = through_file(config)
    assert isinstance(back, AttributeDict) and back.on == torch.device("cpu")


def test_other_types_come_back_as_their_plain_kin() -> None:
    point = namedtuple("point", "x y")
    values = [
        Name("n"),
        point(1, 2),
        types.MappingProxyType({"a": 1}),
        defaultdict(lambda: 1, {"a": 2}),
    ]
    back = through_file(values)
    assert back == ["n", (1, 2), {"a": 1}, {"a": 2}]
    assert [type(value) for value in back] == [str, tuple, dict, OrderedDict]


def test_a_member_of_an_enum_comes_back_where_its_class_is(monkeypatch: pytest.MonkeyPatch) -> None:
    Local = enum.Enum("Local", {"ONE": 1})
    values = [Colour.RED, Level.HIGH, Access.READ | Access.WRITE, Access.READ, Access(0), {Colour.RED: [Level.HIGH]}]
    back = through_file([*values, Local.ONE])
    assert back == [*values[:4], 0, values[5], 1]
    assert [type(value) for value in back] == [Colour, Level, Access, Access, int, dict, int]
    member = to_safe(Colour.RED)
    monkeypatch.setattr(Colour.RED, "_value_", "crimson")  # as a later version of the project has it
    assert from_safe(member) == "red"


class OnDemand(types.ModuleType):
    """A module that is run when a name in it is looked up, as one that is imported on demand."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked up")


@pytest.mark.parametrize(
    "named",
    [
        {"module": "os", "class": "environ", "names": ["clear"]},
        {"module": "not.imported", "class": "Colour", "names": ["RED"]},
        {"module": __name__, "class": "Colour", "names": ["__class__"]},
        {"module": __name__, "class": "Lazy.Colour", "names": ["RED"]},
        {"module": "on.demand", "class": "Colour", "names": ["RED"]},
        {"module": __name__, "class": 2, "names": ["RED"]},
        {"module": __name__, "class": "Colour", "names": [[]]},
        {"module": __name__, "class": "Colour", "names": 3},
    ],
)
def test_what_a_file_names_for_a_member_is_not_run(named: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "on.demand", OnDemand("on.demand"))
    assert from_safe({**to_safe(Colour.RED), **named}) == "red"


def test_a_view_does_not_drag_its_storage_along() -> None:
    buffer = io.BytesIO()
    torch.save(to_safe(torch.arange(100_000)[5:7]), buffer)
    assert len(buffer.getvalue()) < 10_000


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"hyper_parameters": {"layers": [1, Opaque()]}}, r"hyper_parameters\.layers\[1\].*test_convert\.Opaque"),
        ({"f": len}, r"keep f in a checkpoint: builtins\.builtin_function_or_method"),
        ({"m": {"net": torch.nn.Linear(1, 1)}}, r"m\.net.*Linear"),
        ({"kind": dict}, r"keep kind in"),
        ([torch.empty(1, device="meta")], r"\[0\].*meta device"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_safe(value)


def test_a_cycle_is_named() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = [loop]
    with pytest.raises(CheckpointError, match=r"self\[0\]: it contains itself"):
        to_safe(loop)


def test_unknown_tags_are_refused() -> None:
    with pytest.raises(CheckpointError, match="unknown kind 'teapot'"):
        from_safe({TAG: "teapot"})
    with pytest.raises(CheckpointError, match=r"torch\.load"):
        from_safe({TAG: "torch.dtype", "value": "load"})
    with pytest.raises(CheckpointError, match="object pointers"):
        from_safe(
            {TAG: "ndarray", "dtype": "|O", "shape": [1], "data": torch.zeros(8, dtype=torch.uint8), "scalar": False}
        )


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=12
)


@settings(max_examples=30)
@given(NESTED)
def test_any_nesting_of_plain_data_comes_back(value: Any) -> None:
    assert through_file(value) == value


class Labelled(torch.Tensor):
    """A package's own tensor, which carries the names of its columns, as PINA's does."""

    labels: list[str]


def test_a_tensor_of_a_package_s_own_class_is_read_back_without_trust(tmp_path: pathlib.Path) -> None:
    points = torch.arange(6.0).view(3, 2).as_subclass(Labelled)
    points.labels = ["x", "y"]
    torch.save(to_safe({"points": points, "weight": torch.nn.Parameter(points)}), tmp_path / "state.pt")
    back = from_safe(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [type(value) for value in back.values()] == [torch.Tensor, torch.Tensor]
    assert all(torch.equal(value, torch.arange(6.0).view(3, 2)) for value in back.values())
