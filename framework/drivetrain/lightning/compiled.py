"""Modules that ``torch.compile`` was given whole, as modules again."""

from __future__ import annotations

from typing import Any

from drivetrain.compilation import forget, uncompiled
from drivetrain.module import TrainModule


def from_compiled(model: Any) -> TrainModule:
    """The module within ``torch.compile(module)``. Its networks are compiled while a stage lasts; its steps, which log,
    are not.

    Raises:
        ValueError: ``model`` is no compiled LightningModule.
    """
    module = uncompiled(model)
    if module is model or not isinstance(module, TrainModule):
        raise ValueError(f"from_compiled takes torch.compile(module) of a LightningModule, not a {_kind(model)}.")
    return module


def to_uncompiled(model: Any) -> TrainModule:
    """The module within ``torch.compile(module)``, or one of :func:`from_compiled`, which is then not compiled.

    Raises:
        ValueError: it is none of both.
    """
    module = uncompiled(model)
    if not isinstance(module, TrainModule) or not forget(module):
        raise ValueError(f"to_uncompiled takes a LightningModule that is compiled, not a {_kind(model)}.")
    return module


def _kind(model: Any) -> str:
    inner = getattr(model, "_orig_mod", model)
    return f"compiled {type(inner).__name__}" if inner is not model else type(model).__name__
