"""The rank by which ``rank_zero_warn`` and its like of ``lightning_utilities`` speak, before a Trainer knows its own: a
module is made, and a script goes on after its workers, where there is none."""

from __future__ import annotations

import os

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_only", "rank_zero_warn"]

if getattr(rank_zero_only, "rank", None) is None:
    setattr(rank_zero_only, "rank", int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0))  # noqa: B010
