"""Whether a checkpoint may make objects of any class, which can run code."""

from __future__ import annotations

import os


def trusted(weights_only: bool | None) -> bool:
    """``weights_only=False`` says so; where a call says nothing, so does torch's ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``,
    with which a user trusts every file that the process loads."""
    if weights_only is None:
        return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true")
    return not weights_only
