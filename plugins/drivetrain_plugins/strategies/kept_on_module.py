"""What a step keeps on its module in plain Python: a list of outputs, a count, an average meter."""

from __future__ import annotations

from typing import Any

from drivetrain.module import TrainModule
from drivetrain_plugins.strategies.kept_content import Attributes, Copies, attributes_of, is_holder


class KeptOnModule:
    """The plain attributes of ``module``, of the project's own modules within it and of its own objects that are
    attributes of it, as they are now.

    What is within them is copied; submodules, parameters and buffers are none of them.

    Args:
        values: whether tensors and arrays are copied, which :meth:`restore` needs. See
            :class:`drivetrain_plugins.strategies.kept_content.Copies`.
    """

    def __init__(self, module: TrainModule, values: bool = True) -> None:
        copies = Copies(values=values)
        within = [one for one in module.modules() if one is not module and is_holder(one)]
        owners: list[Any] = [module, *(one for one in attributes_of(module).values() if is_holder(one)), *within]
        first = [owner for owner in owners if copies.first(owner)]
        self._owners = [(owner, Attributes(owner, copies)) for owner in first]

    def changed(self, draws: bool = True) -> list[str]:
        """Names of the attributes that are something else now; those that are drawn from only where ``draws``."""
        return [name for owner, then in self._owners for name in then.changed(owner, draws)]

    def restore(self) -> None:
        """Make them again what they were; containers and tensors stay the objects that they are."""
        for owner, then in self._owners:
            then.put_back(owner)
