"""One line that is drawn again and again, with the names of the package tqdm, which need not be installed."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

_WIDTH = 20
_DIGITS = 5
_NUMBER = re.compile(r"-?\d+(\.\d*)?")


class Tqdm:
    """``Epoch 1:  40%|████████            | 25/63 [00:03<00:05, 7.90it/s, loss=0.231]``, on a terminal; elsewhere
    nothing is drawn, but ``n``, ``total``, ``desc`` and ``postfix`` are kept.

    Args:
        desc, total, initial: what stands before the bar, its end (None where that is not known) and its beginning.
        leave: whether the line stays when the bar is closed.
        file: where to draw; the standard output where nothing is said.
        disable: draw nothing at all.
        mininterval: seconds between two draws at least.
        tty: whether ``file`` is a terminal; it is asked where nothing is said.
        bar_format: another line, with tqdm's fields (``{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]``).
        options: others of tqdm's, which have no effect.
    """

    def __init__(
        self,
        desc: str | None = None,
        total: float | None = None,
        initial: float = 0,
        leave: bool = True,
        file: IO[str] | None = None,
        disable: bool | None = False,
        mininterval: float = 0.1,
        tty: bool | None = None,
        bar_format: str | None = None,
        **options: Any,
    ) -> None:
        self.bar_format = bar_format
        self.desc = desc or ""
        self.total, self.initial, self.n = total, initial, initial
        self.leave, self.disable, self.mininterval = leave, bool(disable), mininterval
        self.options = options
        self.postfix = ""
        self._file, self._tty = file, tty
        self._started = time.monotonic()
        self._drawn = 0.0
        self._shown = False

    @property
    def fp(self) -> IO[str]:
        """Where it draws."""
        return sys.stdout if self._file is None else self._file

    def update(self, n: float = 1) -> bool:
        """Go on by ``n``; whether it was drawn."""
        self.n += n
        return self.refresh(force=False)

    def reset(self, total: float | None = None) -> None:
        """Begin again, with this ``total`` if one is given."""
        self.n, self._started = self.initial, time.monotonic()
        if total is not None:
            self.total = total
        self.refresh()

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Set what stands before the bar, with a colon after it."""
        self.set_description_str(f"{desc}: " if desc else "", refresh)

    def set_description_str(self, desc: str | None = None, refresh: bool = True) -> None:
        self.desc = desc or ""
        if refresh:
            self.refresh()

    def set_postfix(self, ordered_dict: Mapping[str, Any] | None = None, refresh: bool = True, **named: Any) -> None:
        """Set the metrics that stand behind the bar."""
        values = {**(ordered_dict or {}), **named}
        self.set_postfix_str(", ".join(f"{name}={self.format_num(value)}" for name, value in values.items()), refresh)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self.postfix = s
        if refresh:
            self.refresh()

    @staticmethod
    def format_num(n: Any) -> str:
        """A number with three digits, anything else as it is. What is no whole number is filled up with zeros to five
        characters, so that the line keeps its length."""
        if isinstance(n, int):
            return str(n)
        text = n if isinstance(n, str) else _shortest(float(n))
        if not _NUMBER.fullmatch(text):
            return text
        return f"{text if '.' in text or len(text) >= _DIGITS else text + '.':0<{_DIGITS}}"

    def _fields(self) -> dict[str, Any]:
        """What a ``bar_format`` may name."""
        passed = time.monotonic() - self._started
        rate = self.n / passed if passed > 0 else 0.0
        total, share = self.total or None, min(1.0, self.n / self.total) if self.total else 0.0
        left = (total - self.n) / rate if total and rate else None
        speed, pace = f"{rate:.2f}it/s", f"{1 / rate:.2f}s/it" if rate else "?s/it"
        filled = int(_WIDTH * share)
        fields = {
            **{"desc": self.desc, "percentage": 100 * share, "bar": "█" * filled + " " * (_WIDTH - filled)},
            **{"n": self.n, "n_fmt": f"{self.n:g}", "total": total, "total_fmt": f"{total:g}" if total else "?"},
            **{"elapsed": _clock(passed), "elapsed_s": passed, "ncols": None, "unit": "it", "unit_divisor": 1000},
            **{"remaining": "?" if left is None else _clock(left), "remaining_s": left or 0.0, "rate": rate},
            **{"rate_fmt": speed if rate >= 1 else pace, "rate_noinv": rate, "rate_noinv_fmt": speed},
            **{"rate_inv": 1 / rate if rate else None, "rate_inv_fmt": pace, "colour": None},
            "postfix": f", {self.postfix}" if self.postfix else "",
        }
        fields["l_bar"] = f"{self.desc}{share:4.0%}|" if total else self.desc
        fields["r_bar"] = "| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]".format_map(fields)
        return fields

    def __str__(self) -> str:
        if self.bar_format is not None:
            return self.bar_format.format_map(self._fields())
        passed = time.monotonic() - self._started
        rate = self.n / passed if passed > 0 else 0.0
        tail = f"{rate:.2f}it/s" + (f", {self.postfix}" if self.postfix else "")
        if not self.total:
            return f"{self.desc}{self.n:g}it [{_clock(passed)}, {tail}]"
        share = min(1.0, self.n / self.total)
        filled = int(_WIDTH * share)
        left = _clock((self.total - self.n) / rate) if rate else "?"
        bar = "█" * filled + " " * (_WIDTH - filled)
        return f"{self.desc}{share:4.0%}|{bar}| {self.n:g}/{self.total:g} [{_clock(passed)}<{left}, {tail}]"

    def refresh(self, force: bool = True) -> bool:
        """Draw now; not ``force``: if that is due."""
        now = time.monotonic()
        terminal = self.fp.isatty() if self._tty is None else self._tty
        if self.disable or not terminal or (not force and now - self._drawn < self.mininterval):
            return False
        self._drawn, self._shown = now, True
        self.fp.write(f"\r{self}\033[K")
        self.fp.flush()
        return True

    def clear(self) -> None:
        """Take the line away until it is drawn again."""
        if self._shown:
            self.fp.write("\r\033[K")
            self.fp.flush()

    def close(self) -> None:
        """Draw no more; the line stays if it is to be left."""
        if self._shown:
            if self.leave:
                self.refresh()
                self.fp.write("\n")
                self.fp.flush()
            else:
                self.clear()
        self.disable, self._shown = True, False

    @staticmethod
    def write(s: str, file: IO[str] | None = None, end: str = "\n") -> None:
        """Print above the bar."""
        out = sys.stdout if file is None else file
        out.write(("\r\033[K" if out.isatty() else "") + s + end)
        out.flush()


def _shortest(number: float) -> str:
    rounded, whole = f"{number:.3g}".replace("e-0", "e-").replace("e+0", "e+"), str(number)
    return rounded if len(rounded) < len(whole) else whole


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
