"""What a stranger's annotations say of his arguments, whatever they are written with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from drivetrain.cli.schema import check_numbers, checked, written
from drivetrain.errors import ConfigurationError


def typed(
    rate: float | None = None,
    active: bool = True,
    size: int = 1,
    function: Callable[[int, list[int]], int] | None = None,
    method: Callable[[], int] = int,
    widths: list[int] | int = 3,
    free=None,
) -> None: ...


def odd(rate: "3 of them" = 0) -> None: ...  # noqa: F722


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("rate", "abc", "a number or null"),
        ("rate", True, "a number or null"),
        ("active", "abc", "true or false"),
        ("active", 1, "true or false"),
        ("size", 1.5, "a whole number"),
        ("size", [1, 2], "a whole number"),
        ("size", {"a": 1}, "a whole number"),
        ("size", None, "a whole number"),
    ],
)
def test_what_is_no_such_number_is_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(f'model.{name}={written(value)} must be {wanted}')}"):
        check_numbers(typed, {name: value}, "model")


def test_what_may_be_a_text_or_cannot_be_told_is_let_through() -> None:
    given: dict[str, Any] = {"function": "abc", "method": "abc", "widths": "abc", "free": "abc", "unknown": "abc"}
    check_numbers(typed, {**given, "rate": 0.5, "size": 3}, "model")
    check_numbers(typed, {"rate": 1, "active": False}, "model")
    check_numbers(typed, {"rate": None}, "model")
    check_numbers(odd, {"rate": "abc"}, "model")


def test_an_arguments_own_default_and_what_a_target_made_are_let_through() -> None:
    def loose(rate: float = None, steps: int = 1e3, moved: float = 0.5) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    check_numbers(loose, {"rate": None, "steps": 1000.0, "moved": np.float64(0.25)}, "model")
    with pytest.raises(ConfigurationError, match=r"^model\.moved=null must be a number"):
        check_numbers(loose, {"moved": None}, "model")


def test_a_number_that_is_none_is_refused_where_it_is_not_the_default() -> None:
    @dataclass
    class Numbers:
        some: float = 1.0
        endless: float = float("inf")

    assert checked(Numbers, {"endless": float("inf"), "some": 2}).some == 2.0
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ConfigurationError, match=rf"^of\.some={value} must be finite$"):
            checked(Numbers, {"some": value}, "of")
