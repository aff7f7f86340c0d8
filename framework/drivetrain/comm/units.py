"""Sizes, rates and times as people write them: ``100MB``, ``10Gbps``, ``50us``."""

from __future__ import annotations

import re

from drivetrain.errors import ConfigurationError

_SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_RATES = {
    f"{prefix}bps": factor / 8 for prefix, factor in {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
}
_RATES |= {name.replace("bps", "bit/s"): factor for name, factor in _RATES.items()}
_RATES |= {f"{name}/s": factor for name, factor in _SIZES.items()}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_size(text: str) -> float:
    """Bytes; ``MB`` is 10^6 of them, ``MiB`` 2^20.

    Raises:
        ConfigurationError: it is no positive number with a unit.
    """
    return _parse(text, _SIZES, "a size", "100MB or 25MiB")


def parse_bandwidth(text: str) -> float:
    """Bytes per second; ``Gbps`` and ``Gbit/s`` are 10^9 bits, ``GB/s`` 10^9 bytes.

    Raises:
        ConfigurationError: it is no positive number with a unit.
    """
    return _parse(text, _RATES, "a bandwidth", "10Gbps or 1.2GB/s")


def parse_time(text: str) -> float:
    """Seconds.

    Raises:
        ConfigurationError: it is no positive number with a unit, and not 0 either.
    """
    return _parse(text, _TIMES, "a time", "50us or 1.5ms", zero=True)


def _parse(text: str, units: dict[str, float], what: str, example: str, *, zero: bool = False) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*(\S*)\s*", text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not {what}: write a number and a unit, such as {example}.")
    number, unit = float(match[1]), match[2]
    if zero and number == 0:
        return 0.0
    if unit not in units:
        problem = f"has the unit {unit!r}" if unit else "has no unit"
        raise ConfigurationError(f"{text!r} {problem}, {what} is written such as {example}; known: {', '.join(units)}.")
    if not 0 < number * units[unit] < float("inf"):
        raise ConfigurationError(f"{text!r} must be above zero and finite: write {what} such as {example}.")
    return number * units[unit]


def shown_size(size: float) -> str:
    """For a reader: ``100 MB``."""
    return _shown(size, ("B", "kB", "MB", "GB", "TB"), 1e3)


def shown_rate(rate: float) -> str:
    """For a reader: ``1.2 GB/s``."""
    return _shown(rate, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"), 1e3)


def shown_time(seconds: float) -> str:
    """For a reader: ``12.3 ms``."""
    return _shown(seconds * 1e6, ("us", "ms", "s"), 1e3)


def _shown(value: float, units: tuple[str, ...], base: float) -> str:
    for unit in units[:-1]:
        if value < base * 0.9995:  # not 1e+03
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.4g} {units[-1]}"
