"""Which matrices of a module are cut by columns and which by rows (Shoeybi et al., "Megatron-LM", 2019).

The matrices into a block's inner width are cut by their outputs (columns), the one out of it by its inputs (rows); so
a block exchanges one sum forward and one backward, and what is elementwise in between needs nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError

_PROJECTIONS = ["query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv"]
COLUMNS = frozenset([*_PROJECTIONS, "up", "up_proj", "gate", "gate_proj", "fc1", "w1", "w3", "c_fc", "linear1", "lin1"])
ROWS = frozenset(
    ["output", "out", "o_proj", "out_proj", "wo", "down", "down_proj", "fc2", "w2", "c_proj", "linear2", "lin2"]
)
METHOD = "tensor_parallel_plan"


def plan_of(module: nn.Module) -> dict[str, Any]:
    """``{name of a submodule: "columns", "rows" or a torch ParallelStyle}``.

    From ``tensor_parallel_plan()`` of the module or of one of its children (names relative to it; ``*`` stands for one
    part of a name), else found: linear layers with the usual names, where a parent has both kinds.

    Raises:
        ConfigurationError: nothing can be cut.
    """
    for prefix, owner in [("", module), *((f"{name}.", child) for name, child in module.named_children())]:
        given = getattr(owner, METHOD, None)
        if callable(given):
            return {f"{prefix}{name}": style for name, style in given().items()}
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


def check_plan(module: nn.Module, size: int) -> None:
    """Refuse a plan that names what is not there, or that ``size`` ranks do not divide.

    Raises:
        ConfigurationError: with the first layer that does not go.
    """
    from fnmatch import fnmatchcase

    named = dict(module.named_modules())
    for pattern, style in plan_of(module).items():
        parts = pattern.split(".")
        names = [
            name
            for name in named
            if len(name.split(".")) == len(parts)
            and all(fnmatchcase(one, part) for one, part in zip(name.split("."), parts, strict=True))
        ]
        if not names:
            raise ConfigurationError(f"{METHOD}() names {pattern!r}, which {type(module).__name__} does not have.")
        for name in names:
            _check_layer(name, named[name], named[name.rpartition(".")[0]], style, size)


def _check_layer(name: str, layer: nn.Module, parent: nn.Module, style: Any, size: int) -> None:
    if style not in ("columns", "rows"):
        return  # one of torch's own styles, which knows itself
    if not isinstance(layer, nn.Linear):
        raise ConfigurationError(f"{METHOD}() cuts {name}, a {type(layer).__name__}: only linear layers can be cut so.")
    width = layer.out_features if style == "columns" else layer.in_features
    heads = _heads(parent, width)
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


def _heads(parent: nn.Module, width: int) -> int | None:
    """Attention heads of ``parent``, where it says how many or how wide they are."""
    for name in ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads"):
        if isinstance(getattr(parent, name, None), int):
            return int(getattr(parent, name))
    for name in ("head_width", "head_dim", "head_size"):
        if isinstance(getattr(parent, name, None), int):
            return width // int(getattr(parent, name))
    return None
