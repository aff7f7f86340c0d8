"""A train set that each epoch has anew, of another length: a run resumed in the middle goes on as if undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain.lightning as L


class Growing(L.LightningModule):
    def __init__(self, by: int) -> None:
        super().__init__()
        self.net, self.by = nn.Linear(4, 2), by
        self.seen: list[tuple[int, int, int, float]] = []
        self.ends: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.current_epoch, batch_idx, int(self.trainer.num_training_batches), float(batch[0].sum())))
        return self.net(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.ends.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        samples = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples[: 16 + self.by * self.current_epoch]), batch_size=2, shuffle=True)


class Saves(L.Callback):
    """At step 10: within the second epoch; and at step 8, the last batch of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step in (8, 10):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.parametrize("by", [4, -4])
def test_it_goes_on_with_the_next_batch(by: int, tmp_path: Path) -> None:
    def fit(**options: Any) -> Growing:
        torch.manual_seed(3)
        module = Growing(by)
        quiet: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = L.Trainer(
            max_epochs=3, accelerator="cpu", devices=1, reload_dataloaders_every_n_epochs=1,
            default_root_dir=tmp_path, callbacks=options.pop("callbacks", []), **quiet,
        )  # fmt: skip
        trainer.fit(module, **options)
        return module

    whole = fit(callbacks=[Saves(tmp_path)])
    for step in (8, 10):
        rest = fit(ckpt_path=tmp_path / f"{step}.ckpt")
        assert rest.seen == whole.seen[step:]
        assert rest.ends == [0, 1, 2][0 if step == 8 else 1 :]
        assert torch.equal(rest.net.weight, whole.net.weight)
