"""What a stranger's annotations say of his arguments, whatever they are written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.cli.schema import refuse_texts
from drivetrain.errors import ConfigurationError


def typed(
    rate: float | None = None,
    active: bool = True,
    function: Callable[[int, list[int]], int] | None = None,
    method: Callable[[], int] = int,
    widths: list[int] | int = 3,
    free=None,
) -> None: ...


def odd(rate: "3 of them" = 0) -> None: ...  # noqa: F722


@pytest.mark.parametrize(("name", "wanted"), [("rate", "a number or null"), ("active", "true or false")])
def test_a_text_for_a_number_is_refused(name: str, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"model\.{name}=abc must be {wanted}"):
        refuse_texts(typed, {name: "abc"}, "model")


def test_what_may_be_a_text_or_cannot_be_told_is_let_through() -> None:
    given: dict[str, Any] = {"function": "abc", "method": "abc", "widths": "abc", "free": "abc", "unknown": "abc"}
    refuse_texts(typed, {**given, "rate": 0.5}, "model")
    refuse_texts(odd, {"rate": "abc"}, "model")
