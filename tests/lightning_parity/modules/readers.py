"""Callbacks of a project's own that read the Trainer in every way that published ones do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class PrintTable(L.Callback):
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.sanity_checking:
                return
            self.rows.append(
                [trainer.current_epoch, {k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()}]
            )

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.rows.append(
                ["epoch", trainer.logged_metrics["train/loss_epoch"].item() > 0, len(trainer.progress_bar_metrics)]
            )

    class StageReader(L.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def look(self, hook: str, trainer: Any) -> None:
            flags = [
                name
                for name in ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
                if getattr(trainer, name)
            ]
            self.seen.append((hook, flags, trainer.is_last_batch, trainer.global_step, str(trainer.state.fn.value)))

        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            self.look("sanity", trainer)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.look("fit", trainer)
            self.found = [
                trainer.max_epochs,
                trainer.num_devices,
                trainer.world_size,
                trainer.precision,
                trainer.num_nodes,
            ]
            self.found += [
                trainer.is_global_zero,
                trainer.global_rank,
                trainer.local_rank,
                trainer.node_rank,
                trainer.accumulate_grad_batches,
            ]
            self.found += [
                str(pl_module.device),
                str(trainer.strategy.root_device),
                trainer.log_every_n_steps,
                trainer.fast_dev_run,
            ]
            self.found += [
                trainer.model is not None,
                trainer.gradient_clip_val,
                trainer.check_val_every_n_epoch,
                trainer.datamodule is None,
            ]

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            assert trainer.fit_loop.epoch_loop.batch_idx == batch_idx
            if batch_idx in (0, trainer.num_training_batches - 1):
                self.look("batch", trainer)

        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.look(f"val {batch_idx} {dataloader_idx} {float(outputs):.4f}", trainer)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.look("end", trainer)
            self.found += [
                len(trainer.optimizers),
                len(trainer.lr_scheduler_configs),
                trainer.lr_scheduler_configs[0].interval,
            ]
            self.found += [
                len(trainer.train_dataloader),
                len(trainer.train_dataloader.dataset),
                type(trainer.val_dataloaders).__name__,
            ]
            self.found += [
                trainer.checkpoint_callback is not None,
                trainer.early_stopping_callback is None,
                len(trainer.loggers),
            ]
            self.found += [
                trainer.interrupted,
                trainer.received_sigterm,
                str(trainer.log_dir).rpartition("/")[2],
                trainer.ckpt_path,
            ]

        def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.look("test", trainer)

    class ParameterDrift(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                self.start = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step % trainer.log_every_n_steps == 0:
                drift = sum((p - self.start[n]).pow(2).sum() for n, p in pl_module.named_parameters()).sqrt()
                trainer.logger.log_metrics({"drift": float(drift)}, step=trainer.global_step)
                pl_module.log("drift_too", drift, on_step=True, on_epoch=False)

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.groups = len(optimizer.param_groups)

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 2)

        def step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.step(batch)
            self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.step(batch)
            self.log("val/loss", loss)
            return loss

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"test/loss": self.step(batch), "epoch_seen": float(self.current_epoch)})

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def script(lab: Any) -> None:
        x = torch.randn(26, 5)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)
        table, stages, drift = PrintTable(), StageReader(), ParameterDrift()
        trainer = lab.trainer(max_epochs=2, callbacks=[table, stages, drift], log_every_n_steps=2)
        model = Net()
        trainer.fit(model, loader, loader)
        trainer.test(model, loader, verbose=False)
        for name, value in {"table": table.rows, "stages": stages.seen, "found": stages.found}.items():
            lab.note(name, value)

    return script
