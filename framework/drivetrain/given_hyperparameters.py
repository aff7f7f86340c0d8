"""Hyper-parameters in place of the arguments of an ``__init__``: as they were configured, before objects were made of
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_given: ContextVar[tuple[type, Mapping[str, Any]] | None] = ContextVar("given", default=None)


@contextmanager
def given(kind: type, hyperparameters: Mapping[str, Any]) -> Iterator[None]:
    """Within this, an object of ``kind`` that saves its hyper-parameters saves these. What it makes for itself, of
    other classes, saves its own."""
    token = _given.set((kind, hyperparameters))
    try:
        yield
    finally:
        _given.reset(token)


def given_to(owner: Any) -> dict[str, Any] | None:
    """What was given to ``owner``, which is being made; None where nothing was."""
    found = _given.get()
    return dict(found[1]) if found is not None and found[0] is type(owner) else None
