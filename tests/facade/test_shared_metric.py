"""One metric object that training and validation both log, so that validation resets it before the epoch ends."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import drivetrain.lightning
from tests.facade.recorder import QUIET


def seen(library: Any, metric: type) -> list[dict[str, Any]]:
    """What is in ``callback_metrics`` at the end of each epoch."""
    found = []

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.metric = metric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).mean()
            self.metric(loss)
            self.log("train", self.metric, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric(batch.mean())
            self.log("val", self.metric)

        def on_train_epoch_end(self) -> None:
            found.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    loader = DataLoader(torch.randn(1, 2))
    library.Trainer(max_epochs=2, logger=False, **QUIET).fit(Module(), loader, loader)
    return found


def test_it_has_the_value_of_no_data() -> None:
    theirs, ours = seen(lightning.pytorch, MeanMetric), seen(drivetrain.lightning, MeanMetric)
    assert [sorted(one) for one in ours] == [sorted(one) for one in theirs] == [["train", "val"]] * 2
    for here, there in zip(ours, theirs, strict=True):
        assert here["val"] == there["val"] and math.isnan(here["train"]) and math.isnan(there["train"])
