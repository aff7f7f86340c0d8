"""The classes that hooks come from may be mixed into modules, as Lightning's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import lightning.pytorch.core.hooks as their_hooks
import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
import drivetrain.lightning.core.hooks as our_hooks
from tests.facade.recorder import QUIET, loader, net

both = pytest.mark.parametrize(
    ("L", "hooks"), [(theirs, their_hooks), (ours, our_hooks)], ids=["lightning", "drivetrain"]
)


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_they_have_the_same_hooks() -> None:
    assert _public(our_hooks.CheckpointHooks) == _public(their_hooks.CheckpointHooks)
    assert _public(our_hooks.ModelHooks) >= _public(their_hooks.ModelHooks)


@both
def test_a_mixin_of_them_stands_before_what_it_is_mixed_into_and_after_none_of_its_hooks(
    L: Any, hooks: Any, tmp_path: Path
) -> None:
    called: list[str] = []

    class Counting(hooks.ModelHooks, hooks.CheckpointHooks):  # type: ignore[misc, name-defined]
        def on_train_start(self) -> None:
            called.append("mixin")
            super().on_train_start()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mixed"] = 7
            super().on_save_checkpoint(checkpoint)

    class Base(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def on_train_start(self) -> None:
            called.append("module")

        def on_train_epoch_start(self) -> None:  # the mixin's base has it as well, and must not stand before this
            called.append("epoch")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Model(Counting, Base): ...

    model = Model()
    assert isinstance(Base(), hooks.ModelHooks) and isinstance(Base(), hooks.CheckpointHooks)
    trainer = L.Trainer(**QUIET, max_epochs=1, default_root_dir=str(tmp_path))
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert called == ["mixin", "module", "epoch"]
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["mixed"] == 7
