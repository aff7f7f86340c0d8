"""Which matrices of a module are cut by columns and which by rows (Shoeybi et al., "Megatron-LM", 2019).

The matrices into a block's inner width are cut by their outputs (columns), the one out of it by its inputs (rows); so
a block exchanges one sum forward and one backward, and what is elementwise in between needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError

_PROJECTIONS = ["query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv"]
COLUMNS = frozenset([*_PROJECTIONS, "up", "up_proj", "gate", "gate_proj", "fc1", "w1", "w3", "c_fc", "linear1", "lin1"])
ROWS = frozenset(
    ["output", "out", "o_proj", "out_proj", "wo", "down", "down_proj", "fc2", "w2", "c_proj", "linear2", "lin2"]
)
METHOD = "tensor_parallel_plan"
_KEYS = frozenset(["key", "value", "k", "v", "k_proj", "v_proj", "wk", "wv"])
_HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")
_KEY_HEADS = ("kv_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads")
_HEAD_WIDTHS = ("head_width", "head_dim", "head_size")
# The methods that may know how many heads there are in all: they do not compute with a rank's part of them.
_BUILDING = frozenset({"__init__", "extra_repr", "reset_parameters", METHOD})


def plan_of(module: nn.Module) -> dict[str, Any]:
    """``{name of a submodule: "columns", "rows" or a torch ParallelStyle}``.

    From ``tensor_parallel_plan()`` of the module or of one of its children (names relative to it; ``*`` stands for one
    part of a name), else found: linear layers with the usual names, where a parent has both kinds.

    Raises:
        ConfigurationError: nothing can be cut.
    """
    given = _given(module)
    if given is not None:
        return given
    found: dict[str, Any] = {}
    for name, parent in module.named_modules():
        linear = {child for child, one in parent.named_children() if isinstance(one, nn.Linear)}
        columns, rows = linear & COLUMNS, linear & ROWS
        if columns and rows:
            found |= {f"{name}.{child}" if name else child: "columns" for child in sorted(columns)}
            found |= {f"{name}.{child}" if name else child: "rows" for child in sorted(rows)}
    if not found:
        raise ConfigurationError(
            f"{type(module).__name__} has no layers that tensor parallelism would know how to cut: define"
            f" {METHOD}() and return names with 'columns' or 'rows', or use strategy=fsdp."
        )
    return found


def _given(module: nn.Module) -> dict[str, Any] | None:
    """The plan that the module or one of its children has of its own."""
    for prefix, owner in [("", module), *((f"{name}.", child) for name, child in module.named_children())]:
        method = getattr(owner, METHOD, None)
        if callable(method):
            return {f"{prefix}{name}": style for name, style in method().items()}
    return None


def check_plan(module: nn.Module, size: int) -> None:
    """Refuse a plan that names what is not there, that ``size`` ranks do not divide, or that was found for layers
    whose parent counts on all heads.

    Raises:
        ConfigurationError: with the first layer that does not go.
    """
    if size == 1 and _given(module) is None:
        return  # nothing is cut, and nobody has to say where
    named = dict(module.named_modules())
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for place, owner in named.items():
        for parameter in owner._parameters.values():
            owners.setdefault(id(parameter), []).append((place, owner))
    for pattern, style in plan_of(module).items():
        names = _matching(named, pattern)
        if not names:
            raise ConfigurationError(f"{METHOD}() names {pattern!r}, which {type(module).__name__} does not have.")
        for name in names:
            _check_layer(name, named[name], named[name.rpartition(".")[0]], style, size)
            if size > 1:
                _check_is_own(name, named[name], owners)
    if size > 1 and _given(module) is None:
        for name in dict.fromkeys(name.rpartition(".")[0] for name in plan_of(module)):
            _check_heads_are_open(name, named[name])


def _matching(named: Iterable[str], pattern: str) -> list[str]:
    """Those of the names in which each part matches that of ``pattern``."""
    from fnmatch import fnmatchcase

    parts = pattern.split(".")
    return [
        name
        for name in named
        if len(name.split(".")) == len(parts)
        and all(fnmatchcase(one, part) for one, part in zip(name.split("."), parts, strict=True))
    ]


def cut_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters, by name, of the layers that the plan of ``module`` cuts."""
    named = dict(module.named_modules())
    layers = [name for pattern in plan_of(module) for name in _matching(named, pattern)]
    return [(f"{layer}.{name}", one) for layer in layers for name, one in named[layer].named_parameters()]


def _check_layer(name: str, layer: nn.Module, parent: nn.Module, style: Any, size: int) -> None:
    if style not in ("columns", "rows"):
        return  # one of torch's own styles, which knows itself
    if not isinstance(layer, nn.Linear):
        raise ConfigurationError(f"{METHOD}() cuts {name}, a {type(layer).__name__}: only linear layers can be cut so.")
    width = layer.out_features if style == "columns" else layer.in_features
    heads = _heads(parent, name.rpartition(".")[2], width)
    if heads is not None and heads % size:
        raise ConfigurationError(
            f"the {heads} heads of {name.rpartition('.')[0]} cannot be divided among {size} ranks of a tensor"
            f" group: use a number of ranks that divides {heads}."
        )
    if width % size:
        raise ConfigurationError(
            f"the {width} {'outputs' if style == 'columns' else 'inputs'} of {name} cannot be divided among {size}"
            f" ranks of a tensor group: use a number of ranks that divides {width}."
        )


def _check_is_own(name: str, layer: nn.Module, owners: dict[int, list[tuple[str, nn.Module]]]) -> None:
    """Refuse a layer whose weights another layer has, too: it alone would get its parts of them, and the two train
    apart without an error."""
    inside = set(layer.modules())
    for own, parameter in layer.named_parameters():
        other = next((place for place, owner in owners[id(parameter)] if owner not in inside), None)
        if other is not None:
            raise ConfigurationError(
                f"{METHOD}() cuts {name}, whose {own} is that of {other or 'the module'}, too: leave {name} out of the"
                " plan, give it weights of its own, or use strategy=fsdp."
            )


def _heads(parent: nn.Module, layer: str, width: int) -> int | None:
    """Attention heads among the ``width`` channels of ``layer``, where ``parent`` says how wide or how many they are;
    of keys and values there may be fewer than of queries."""
    for name in _HEAD_WIDTHS:
        if isinstance(getattr(parent, name, None), int):
            return width // int(getattr(parent, name))
    for name in (*_KEY_HEADS, *_HEADS) if layer in _KEYS else _HEADS:
        if isinstance(getattr(parent, name, None), int):
            return int(getattr(parent, name))
    return None


def _check_heads_are_open(name: str, parent: nn.Module) -> None:
    """Refuse a parent that computes with the number of all heads: it would cut its part of the channels into as many,
    narrower ones, and train something else without an error."""
    for owner in type(parent).__mro__:
        if owner is nn.Module:
            break
        for method, function in vars(owner).items():
            code = getattr(function, "__code__", None)
            counted = set() if code is None or method in _BUILDING else _names(code) & {*_HEADS, *_KEY_HEADS}
            if counted:
                raise ConfigurationError(
                    f"{type(parent).__name__}.{method} ({name}) computes with {min(counted)}, the number of all heads,"
                    " of which a rank of a tensor group has some: leave it open, as in view(batch, length, -1,"
                    f" head_width), or define {METHOD}() if it is right as it stands."
                )


def _names(code: CodeType) -> set[str]:
    """The attributes and globals that ``code`` reads, comprehensions within it included."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
