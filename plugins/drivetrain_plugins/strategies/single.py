"""One process on one device: the contract's defaults, unchanged."""

from __future__ import annotations

from drivetrain.strategy import Strategy


class Single(Strategy):
    """The reference that every exact strategy is compared with."""
