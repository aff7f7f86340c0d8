"""``torch.compile`` for the networks of a module, for as long as a stage lasts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from drivetrain.errors import ConfigurationError, nearest


def check_compile(value: bool | str) -> None:
    """Raise :class:`ConfigurationError` where ``value`` is neither yes, no nor the name of a backend of dynamo."""
    if isinstance(value, bool):
        return
    import torch._dynamo

    known = torch._dynamo.list_backends(exclude_tags=())
    if value not in known:
        raise ConfigurationError(
            f"compile={value!r}: give true, false or a backend of torch.compile; {nearest(value, known)}"
        )


# How ``torch.compile`` was to compile the modules that were given to it whole; not known in other processes.
_contexts: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def uncompiled(module: Any) -> Any:
    """The module within what ``torch.compile`` made of it, which is compiled in the same way while a stage lasts; any
    other as it is."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds, and who compiled has it
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return module
    inner = module._orig_mod
    _contexts[inner] = module.dynamo_ctx
    return inner


def forget(module: nn.Module) -> bool:
    """Let ``module``, which :func:`uncompiled` gave, not be compiled any more; False where it was not to be."""
    return _contexts.pop(module, None) is not None


@contextmanager
def compiled(module: nn.Module, compile: bool | str) -> Iterator[None]:
    """While it lasts, the networks that ``module`` consists of are compiled in place: names of parameters and
    hooks stay as they are. The module's own steps are not compiled, as logging would break their graph everywhere.
    """
    context = _contexts.get(module)
    wanted = compile or context is not None
    networks = [one for one in _networks(module) if one._compiled_call_impl is None] if wanted else []
    for one in networks:
        if compile:
            one.compile(backend="inductor" if compile is True else compile)
        elif context is not None:
            from torch._dynamo.external_utils import wrap_inline  # torch's own networks are not looked into otherwise

            one._compiled_call_impl = context(wrap_inline(one._call_impl))
    try:
        yield
    finally:
        for one in networks:
            one._compiled_call_impl = None


def _networks(module: nn.Module) -> list[nn.Module]:
    """The children that are called; a list of modules is not, but its items are."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _networks(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return [one for one in found if any(True for _ in one.parameters())]
