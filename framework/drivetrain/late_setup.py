"""A data module whose ``setup`` ran in workers runs it in the caller's process as well, when something is asked of it
that only ``setup`` makes: a script looks at ``data.val_dataloader()`` or ``data.val_set`` after a fit.

Not before: making data sets can take long, and most scripts ask for nothing. The random generators are meanwhile where
the first worker's were, so that ``random_split`` gives the parts that were trained on.
"""

from __future__ import annotations

from typing import Any

from drivetrain.checkpoint import rng
from drivetrain.data_hooks import DataHooks

_OWED = "_setup_owed"

Owed = list[tuple[Any, dict[str, Any]]]


def owe(data: DataHooks, stage: Any, random: dict[str, Any]) -> None:
    """Remember that ``data.setup(stage)`` ran elsewhere, from these states of the generators."""
    if type(data).setup is not DataHooks.setup:
        vars(data)[_OWED] = [(stage, random)]


def put_by(data: Any) -> Owed:
    """What ``data`` owes, which it is not to make while a stage uses it; for :func:`put_back`. Nothing, where it is no
    data module, which is refused elsewhere."""
    found: Owed = vars(data).pop(_OWED, []) if isinstance(data, DataHooks) else []
    return found


def put_back(data: DataHooks | None, earlier: Owed) -> None:
    """After the stage, in which a later ``setup`` may have run elsewhere: of the same stage that one counts."""
    if data is not None and earlier:
        later: Owed = vars(data).get(_OWED, [])
        stages = [stage for stage, _ in later]
        vars(data)[_OWED] = [*(one for one in earlier if one[0] not in stages), *later]


def owes(data: DataHooks) -> bool:
    return _OWED in vars(data)


def pay(data: DataHooks) -> None:
    """Run each ``setup`` that ran elsewhere only."""
    for stage, random in put_by(data):
        with rng.kept():
            rng.restore(random)
            data.setup(stage=stage)
