"""A checkpoint that one rank makes by itself while the others go on, as callbacks of MLflow do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn

import drivetrain.lightning as ours
from tests.lightning_parts.both import classifier, loader, trainer


def test_the_first_rank_alone_makes_a_checkpoint(tmp_path: Path) -> None:
    """As MLflow's callback does. The others are not waited for, and the run is the one without that callback."""

    class Own(ours.Callback):
        def _write(self, trainer: Any, name: str) -> None:
            if trainer.is_global_zero:
                _ = dict(trainer.callback_metrics)
                for weights_only in (False, True):
                    content = trainer._checkpoint_connector.dump_checkpoint(weights_only)
                    trainer.strategy.save_checkpoint(content, tmp_path / f"{name}-{weights_only}.ckpt")

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self._write(trainer, "batch")  # also where gradients are being accumulated

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self._write(trainer, "validation")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self._write(trainer, "epoch")

    def run(*callbacks: Any) -> tuple[Any, Any]:
        module = classifier(ours, training_step=training_step, validation_step=training_step)
        module.accuracy = torchmetrics.classification.BinaryAccuracy()
        options = {"accumulate_grad_batches": 2, "compression": "topk", "callbacks": list(callbacks)}
        one = trainer(ours, tmp_path, strategy="ddp", devices=2, max_epochs=2, timeout=60, **options)
        one.fit(module, loader(), loader(8))
        return one, module

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        self.accuracy(out.argmax(1), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        loss = nn.functional.cross_entropy(out, y)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    one, module = run(Own())
    other, undisturbed = run()
    for name, weight in undisturbed.state_dict().items():
        assert torch.equal(weight, module.state_dict()[name]), name
    assert one.callback_metrics == other.callback_metrics
    assert one.loss_curve == other.loss_curve
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        f"{name}-{weights_only}.ckpt" for name in ("batch", "validation", "epoch") for weights_only in (False, True)
    }
    trainer(ours, tmp_path, max_epochs=3).fit(undisturbed, loader(), ckpt_path=tmp_path / "epoch-False.ckpt")
