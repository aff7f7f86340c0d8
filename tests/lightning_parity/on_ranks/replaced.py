"""As PINA has them: other optimizers given to the strategy in mid-run, torch's own optimizers stepped by hand and
counted, what ranks combine logged by step in a validation. And gradients clipped by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("val", loss, sync_dist=True, on_step=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class ByHand(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            optimizer = self.optimizers().optimizer
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed += 1

    class Clipped(Net):
        """Clips and looks at gradients between the backward pass and the step, which must be global by then."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.3))
            optimizer.step()
            return loss

    class Switch(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.strategy.optimizers[0] is trainer.optimizers[0]
            if trainer.current_epoch == 1:
                trainer.strategy.optimizers = [torch.optim.Adam(pl_module.parameters(), lr=0.01)]

    def script(lab: Any) -> None:
        L.seed_everything(3)
        data = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
        for module in (Net(), ByHand(), Clipped()):
            saver = L.callbacks.ModelCheckpoint(save_top_k=-1, filename="{epoch}-{step}")
            trainer = lab.trainer(max_epochs=3, callbacks=[saver, Switch()], log_every_n_steps=1)
            trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
            lab.note(
                f"steps of {type(module).__name__}",
                [trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped],
            )

    return script
