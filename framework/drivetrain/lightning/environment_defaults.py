"""Arguments of a class from the environment, as projects decorate the ``__init__`` of a Trainer of their own."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any


def _parse_env_variables(cls: type, template: str = "PL_%(cls_name)s_%(cls_argument)s") -> Namespace:
    """What the environment says of the arguments of ``cls``: ``PL_TRAINER_DEVICES=2`` is 2, what is no Python value
    stays text, what is empty is passed over."""
    found = {}
    for name in inspect.signature(cls).parameters:
        text = os.environ.get(template % {"cls_name": cls.__name__.upper(), "cls_argument": name.upper()})
        if text:
            try:
                found[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                found[name] = text
    return Namespace(**found)


def _defaults_from_env_vars(init: Callable[..., None]) -> Callable[..., None]:
    """Let the environment take the place of defaults of ``init``; what is given in code stays."""

    @functools.wraps(init)
    def with_defaults(self: Any, *unnamed: Any, **given: Any) -> None:
        cls = type(self)
        by_name = dict(zip(inspect.signature(cls).parameters, unnamed, strict=False))
        init(self, **{**vars(_parse_env_variables(cls)), **given, **by_name})

    return with_defaults
