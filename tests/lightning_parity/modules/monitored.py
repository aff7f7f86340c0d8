"""Watching a run: device statistics, a pruned model, a profiler's actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02)

    def script(lab: Any) -> None:
        x = torch.randn(48, 6)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True)
        model = Net()
        layers = [(model.net[0], "weight"), (model.net[2], "weight")]
        pruning = L.callbacks.ModelPruning(
            "l1_unstructured", parameters_to_prune=layers, amount=0.3, apply_pruning=lambda epoch: epoch == 1
        )
        trainer = lab.trainer(max_epochs=3, callbacks=[pruning], log_every_n_steps=2)
        trainer.fit(model, loader)
        lab.note("zeros", [float((layer.weight == 0).float().mean()) for layer, _ in layers])

        stats = L.callbacks.DeviceStatsMonitor(cpu_stats=True)
        logger = L.loggers.CSVLogger(str(lab.folder / "monitored"))
        second = lab.trainer(max_epochs=2, callbacks=[stats], logger=logger, log_every_n_steps=2, profiler="simple")
        second.fit(Net(), loader)
        table = lab.folder / "monitored/lightning_logs/version_0/metrics.csv"
        names = {name for name in table.read_text().splitlines()[0].split(",") if "/" in name}
        lab.note("statistics", sorted(name for name in names if name.startswith("DeviceStats"))[:3])
        table.unlink()
        profiler = second.profiler
        lab.note("profiled", sorted(set(profiler.recorded_durations) & {"run_training_epoch", "run_training_batch"}))

    return script
