"""How a batch reaches the device: converted by the precision, moved by the module's or data module's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.data_hooks import DataHooks, move
from drivetrain.module import TrainModule
from drivetrain.precision import Precision

if TYPE_CHECKING:
    from drivetrain.sharding import MicroBatch
    from drivetrain.trainer import Trainer

Transfer = Callable[["MicroBatch"], Any]


def batch_transfer(trainer: Trainer) -> Transfer:
    """What gives a batch in the precision's format on the device.

    Who moves batches, and whether anything has to be done at all, is found out here, once. A data module's hook is used
    where it overrides it, else the module's.
    """
    device, precision = trainer.strategy.device, trainer.precision_plugin
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    owners = [transfer_owner(trainer, name) for name in names]
    before, moved, after = (getattr(owner, name) for owner, name in zip(owners, names, strict=True))
    default = not any(_overrides(owner, name) for owner, name in zip(owners, names, strict=True))
    own = getattr(trainer.lightning_module, "_apply_batch_transfer_handler", None)
    if getattr(own, "__func__", TrainModule._apply_batch_transfer_handler) is TrainModule._apply_batch_transfer_handler:
        own = None  # as it is, it calls the hooks
    default = default and own is None
    convert = precision.convert_input
    stays = default and device.type == "cpu"

    def as_it_is(micro: MicroBatch) -> Any:
        return micro.batch if isinstance(micro.batch, _PLAIN) else move(micro.batch, device)

    def converted(micro: MicroBatch) -> Any:
        return convert(micro.batch)

    def through_hooks(micro: MicroBatch) -> Any:
        batch = before(convert(micro.batch), micro.loader)
        if own is not None:
            return own(batch, device, micro.loader)
        return after(moved(batch, device, micro.loader), micro.loader)

    if stays and type(precision).convert_input is Precision.convert_input:
        return as_it_is
    return converted if stays else through_hooks


def transfer_owner(trainer: Trainer, name: str) -> Any:
    """Whose hook counts: the data module's where it overrides it, else the module's."""
    data = trainer.datamodule
    return data if data is not None and _overrides(data, name) else trainer.lightning_module


# An object of another kind may have its to(). The frequent ones come first, as each is asked for at every step.
_PLAIN = (tuple, list, dict, torch.Tensor, str, int, float, type(None))


def _overrides(owner: Any, name: str) -> bool:
    return name in vars(owner) or getattr(type(owner), name) is not getattr(DataHooks, name)
