"""Where Lightning keeps what its Trainer and its Fabric share; there is no Fabric here."""

from __future__ import annotations

from drivetrain.lightning import deep_names
from drivetrain.lightning.seed import seed_everything as seed_everything

__all__ = ["seed_everything"]
__path__: list[str] = []

deep_names.name_below(__name__)
