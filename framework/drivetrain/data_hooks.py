"""Where the data comes from and how a batch reaches the device; shared by TrainModule and DataModule."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from drivetrain.errors import MissingHookError


class _MovableType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return callable(getattr(instance, "to", None)) and not isinstance(instance, torch.nn.Module)


class Movable(metaclass=_MovableType):
    """``isinstance(x, Movable)``: ``x.to(device)`` moves it (tensors, PackedSequence, graph batches...)."""


def move(batch: Any, device: torch.device) -> Any:
    """``batch`` with all its tensors on ``device``; nothing is touched or copied where they already are."""
    if device.type == "cpu" and isinstance(batch, torch.Tensor) and batch.device.type == "cpu":
        return batch

    blocking = device.type == "cpu"  # what a device is still writing must not be read on the host

    def to(item: Any) -> Any:
        return item.to(device, non_blocking=not blocking) if isinstance(item, torch.Tensor) else item.to(device)

    return apply_to_collection(batch, dtype=Movable, function=to)


def _without(owner: Any, name: str) -> MissingHookError:
    return MissingHookError(
        f"{type(owner).__name__} has no {name}: define it, or pass loaders to the Trainer's method."
    )


class DataHooks:
    """Data hooks with Lightning's names.

    Attributes:
        prepare_data_per_node: whether each node prepares the data; False where all of them see one file system, which
            the first process of all prepares then.
    """

    prepare_data_per_node = True

    def prepare_data(self) -> None:
        """Download or convert; on one process of each node, or of all, before ``setup``. Assign no state here."""

    def setup(self, stage: str) -> None:
        """On every rank, before ``stage`` ("fit", "validate", "test" or "predict")."""

    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        raise _without(self, "train_dataloader")

    def val_dataloader(self) -> Any:
        raise _without(self, "val_dataloader")

    def test_dataloader(self) -> Any:
        raise _without(self, "test_dataloader")

    def predict_dataloader(self) -> Any:
        raise _without(self, "predict_dataloader")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return move(batch, device)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch
