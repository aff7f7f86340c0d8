"""What ``--help`` says of a subcommand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def first_sentence(method: Callable[..., Any]) -> str:
    """Of what is said of ``method`` where it is defined."""
    text = " ".join((inspect.getdoc(method) or "").split("\n\n")[0].split())
    return f"{text.partition('. ')[0].rstrip('.')}." if text else ""
