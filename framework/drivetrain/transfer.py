"""How a batch reaches the device: converted by the precision, moved by the module's or data module's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from drivetrain.data_hooks import DataHooks, move
from drivetrain.precision import Precision

if TYPE_CHECKING:
    from drivetrain.sharding import MicroBatch
    from drivetrain.trainer import Trainer


class BatchTransfer:
    """Finds out once who moves batches, and whether anything has to be done at all.

    A data module's hook is used where it overrides it, else the module's.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.device = trainer.strategy.device
        self.precision = trainer.precision_plugin
        hooks, default = [], True
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            owner: Any = trainer.lightning_module
            if trainer.datamodule is not None and _overrides(trainer.datamodule, name):
                owner = trainer.datamodule
            default = default and not _overrides(owner, name)
            hooks.append(getattr(owner, name))
        self._before, self._move, self._after = hooks
        self._convert = self.precision.convert_input
        self._stays = default and self.device.type == "cpu"
        self._as_it_is = self._stays and type(self.precision).convert_input is Precision.convert_input

    def __call__(self, micro: MicroBatch) -> Any:
        """The batch in the precision's format on the device."""
        if self._as_it_is:
            return micro.batch if isinstance(micro.batch, _PLAIN) else move(micro.batch, self.device)
        batch = self._convert(micro.batch)
        if self._stays:
            return batch
        batch = self._before(batch, micro.loader)
        return self._after(self._move(batch, self.device, micro.loader), micro.loader)


# An object of another kind may have its to(). The frequent ones come first, as each is asked for at every step.
_PLAIN = (tuple, list, dict, torch.Tensor, str, int, float, type(None))


def _overrides(owner: Any, name: str) -> bool:
    return name in vars(owner) or getattr(type(owner), name) is not getattr(DataHooks, name)
