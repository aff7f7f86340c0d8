"""Whole runs, noted call by call under Lightning 2.6 and under drivetrain.lightning: the diaries are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from tests.facade.recorder import Stream, first_difference, loader, net, pair

cross_entropy = nn.functional.cross_entropy


def classifier(L: Any) -> dict[str, Any]:
    """Every way to log, a shuffled loader, dropout, a schedule by step, hyper-parameters."""

    class Module(L.LightningModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.log("plain", loss)
            self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("epoch", loss, on_step=False, on_epoch=True, reduce_fx="max")
            self.log("quiet", loss, logger=False, prog_bar=True)
            self.log("sum", float(batch_idx), on_epoch=True, on_step=False, reduce_fx=torch.sum)
            self.log_dict({"d/a": loss * 2, "d/b": torch.tensor([3])}, on_step=False, on_epoch=True)
            return {"loss": loss, "extra": batch_idx}

        def on_train_epoch_start(self) -> None:
            self.log("at_start", 1.0 + self.current_epoch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("after_batch", float(batch_idx))

        def on_train_epoch_end(self) -> None:
            self.log("at_end", 2.0 + self.current_epoch, prog_bar=True)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = cross_entropy(self.net(x), y)
            self.log("val", loss, prog_bar=True)
            self.log("val_both", loss, on_step=True, on_epoch=True)
            return loss

        def on_validation_epoch_end(self) -> None:
            self.log("val_end", 3.0)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log_dict({"test/loss": cross_entropy(self.net(x), y), "test/n": float(len(x))}, batch_size=len(x))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
            steps = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    fit = {"train_dataloaders": loader(shuffle=True), "val_dataloaders": loader(10, 4, shuffle=True)}
    return {
        "module": Module,
        "fit": fit,
        "validate": {"dataloaders": loader(10)},
        "test": {"dataloaders": loader(9)},
        "predict": {"dataloaders": loader(9)},
    }


def several_loaders(L: Any) -> dict[str, Any]:
    """A data module, two validation loaders, torchmetrics objects, a plateau schedule."""

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(shuffle=True)

        def val_dataloader(self) -> Any:
            return [loader(10), loader(7, seed=3)]

        def test_dataloader(self) -> Any:
            return [loader(10), loader(7, seed=3)]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.accuracy = MulticlassAccuracy(3)
            self.val_accuracy = nn.ModuleList([MulticlassAccuracy(3), MulticlassAccuracy(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any) -> Any:  # no batch_idx
            x, y = batch
            scores = self(x)
            self.accuracy(scores, y)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            return cross_entropy(scores, y)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            x, y = batch
            scores = self(x)
            self.log("val", cross_entropy(scores, y))
            self.log(f"common_{dataloader_idx}", 1.0 * batch_idx, add_dataloader_idx=False)
            metric = self.val_accuracy[dataloader_idx]
            metric.update(scores, y)
            self.log("val_accuracy", metric, on_step=False, on_epoch=True)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("test", cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val/dataloader_idx_1"}

    return {"module": Module, "data": Data}


def gan(L: Any) -> dict[str, Any]:
    """Manual optimisation: two optimizers, toggled, two schedules stepped by hand."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, _ = batch
            first, second = self.optimizers()
            softplus = nn.functional.softplus
            self.toggle_optimizer(first)
            loss = softplus(-self.critic(self.generator(x))).mean()
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.log("seen_steps", float(self.global_step))
            if batch_idx % 2 == 0:
                self.toggle_optimizer(second)
                other = softplus(self.critic(self.generator(x).detach())).mean() + softplus(-self.critic(x)).mean()
                second.zero_grad()
                self.manual_backward(other)
                self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                second.step()
                self.untoggle_optimizer(second)
                self.log("critic", other, prog_bar=True)
            self.log("generator", loss, prog_bar=True, on_epoch=True)
            if self.trainer.is_last_batch:
                for scheduler in self.lr_schedulers():
                    scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizers = [
                torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.5),
                torch.optim.Adam(self.critic.parameters(), lr=0.01),
            ]
            return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

    return {"module": Module, "fit": {"train_dataloaders": loader(shuffle=True)}}


def overriding(L: Any) -> dict[str, Any]:
    """Hooks of the optimisation overridden; a stream; batches without a loss; an epoch cut short."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch == 1 and batch_idx == 4 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (1 + min(self.trainer.global_step, 5))
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            value = 0.5 if self.current_epoch == 0 else gradient_clip_val
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="value")

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).sum()
            self.log("norm", norm)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return {"module": Module, "fit": {"train_dataloaders": torch.utils.data.DataLoader(Stream(), batch_size=4)}}


def skipping(L: Any) -> dict[str, Any]:
    """training_step returns None now and then."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True)
            return None if batch_idx == 1 else loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

    return {"module": Module, "fit": {"train_dataloaders": loader(shuffle=True)}}


def together(L: Any) -> dict[str, Any]:
    """A dict of training loaders of different lengths."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (x, y), (u, _) = batch["labelled"], batch["more"][0]
            loss = cross_entropy(self.net(x), y) + self.net(u).pow(2).mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loaders = {"labelled": loader(9, 4, shuffle=True), "more": [loader(22, 4, shuffle=True, seed=4)]}
    return {"module": Module, "fit": {"train_dataloaders": loaders}}


def by_hand(L: Any) -> dict[str, Any]:
    """Manual optimisation that steps on every second batch; nested hyper-parameters; a value called step."""

    class Module(L.LightningModule):
        def __init__(self, sizes: Any = (6, 3), **more: Any) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["more"])
            self.net = nn.Linear(*sizes)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss / 2)
            if (batch_idx + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            self.log("loss", loss, prog_bar=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("step", 10.0 * self.current_epoch)
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}

    return {"module": Module, "fit": {"train_dataloaders": loader(shuffle=True)}}


class Augmented(torch.utils.data.Dataset[Any]):
    """Draws from torch's generator for each sample."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6) + index, index % 3


def sampled(L: Any) -> dict[str, Any]:
    """A weighted sampler, augmentation, a stream validated on by number of batches, a closure that is called often."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, *args: Any) -> None:
            self.log("val", cross_entropy(self.net(batch[0]), batch[1]), on_step=True)

        def on_validation_epoch_end(self) -> None:
            self.seen = float(self.trainer.callback_metrics.get("val", -1.0))
            self.log("seen", self.seen)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)

    weights = torch.utils.data.WeightedRandomSampler([1.0 + i for i in range(18)], 12)
    train = torch.utils.data.DataLoader(Augmented(), batch_size=4, sampler=weights)
    return {
        "module": Module,
        "fit": {"train_dataloaders": train, "val_dataloaders": torch.utils.data.DataLoader(Stream(), batch_size=4)},
    }


def augmented(L: Any) -> dict[str, Any]:
    """Data, dropout and the loaders of validation all draw from torch's generator."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    train = torch.utils.data.DataLoader(Augmented(), batch_size=3, shuffle=True)
    return {"module": Module, "fit": {"train_dataloaders": train, "val_dataloaders": loader(10, shuffle=True)}}


def read_by_workers(L: Any) -> dict[str, Any]:
    """Loader processes, augmentation in them, a batch sampler of the project's own."""
    parts = sampled(L)
    order = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(Augmented()), 5, drop_last=True)
    train = torch.utils.data.DataLoader(Augmented(), batch_sampler=order, num_workers=1)
    parts["fit"] = {"train_dataloaders": train, "val_dataloaders": [loader(10)]}
    return parts


def own_loaders(L: Any) -> dict[str, Any]:
    """The module's own loaders, a callback of the module, early stopping by hand, evaluation before and after."""

    class Telling(L.Callback):
        def __init__(self) -> None:
            self.times = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.times += 1
            pl_module.log("times", float(self.times), on_step=True, on_epoch=False)
            trainer.callback_metrics["by_hand"] = torch.tensor(1.0)

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking and trainer.current_epoch >= 1:
                trainer.should_stop = True

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("from_callback", float(trainer.current_epoch), prog_bar=True)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.kept: list[Any] = []

        def configure_callbacks(self) -> Any:
            return Telling()

        def setup(self, stage: str) -> None:
            self.scale = 2.0 if stage == "fit" else 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            opt = self.optimizers()
            self.log("lr", opt.param_groups[0]["lr"], prog_bar=True)
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log_dict({"train/loss": loss, "train/scaled": loss * self.scale}, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            scores = self.net(batch[0])
            self.kept.append(scores)
            self.log("val/best", scores.max(), reduce_fx="max")
            self.log("val/all", scores.mean(), on_step=False, on_epoch=True, prog_bar=True, batch_size=1)

        def on_validation_epoch_end(self) -> None:
            self.log("val/kept", torch.cat(self.kept).mean())
            self.kept.clear()

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.net(batch[0]) + dataloader_idx

        def train_dataloader(self) -> Any:
            return loader(shuffle=True)

        def val_dataloader(self) -> Any:
            return {"one": loader(10), "other": loader(6, seed=2)} if self.trainer.validating else loader(10)

        def predict_dataloader(self) -> Any:
            return [loader(6), loader(5, seed=3)]

        def configure_optimizers(self) -> Any:
            first = torch.optim.AdamW(self.net.parameters(), lr=0.1)
            warm = torch.optim.lr_scheduler.LinearLR(first, 0.5, total_iters=4)
            decay = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
            return [first], [{"scheduler": warm, "interval": "step", "frequency": 1}, decay]

    return {"module": Module}


CASES: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "classifier, all stages": (classifier, ("fit", "validate", "test", "predict"), {}),
    "classifier, validation in mid-epoch, clipping": (
        classifier,
        ("fit",),
        {"val_check_interval": 0.5, "gradient_clip_val": 0.1, "log_every_n_steps": 1},
    ),
    "classifier, accumulation": (
        classifier,
        ("fit",),
        {"accumulate_grad_batches": 2, "limit_train_batches": 4, "check_val_every_n_epoch": 2},
    ),
    "classifier, fast_dev_run": (classifier, ("fit", "test"), {"fast_dev_run": 2, "logger": None}),
    "classifier, overfit": (classifier, ("fit",), {"overfit_batches": 2}),
    "classifier, max_steps": (classifier, ("fit",), {"max_steps": 8, "max_epochs": -1}),
    "several loaders": (several_loaders, ("fit", "test"), {"max_epochs": 3}),
    "several loaders, reloaded": (several_loaders, ("fit",), {"reload_dataloaders_every_n_epochs": 1}),
    "gan": (gan, ("fit",), {}),
    "gan, max_steps": (gan, ("fit",), {"max_steps": 7, "max_epochs": 5}),
    "overriding": (overriding, ("fit",), {"max_epochs": 3}),
    "skipping": (skipping, ("fit",), {}),
    "by hand": (by_hand, ("fit",), {"max_epochs": 3}),
    "sampled": (sampled, ("fit",), {"val_check_interval": 2, "limit_val_batches": 2}),
    "sampled, over epochs": (sampled, ("fit",), {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "read by workers": (read_by_workers, ("fit",), {"min_epochs": 1}),
    "own loaders": (own_loaders, ("validate", "fit", "validate", "predict"), {"max_epochs": 4}),
    "own loaders, no epoch by time": (
        own_loaders,
        ("fit",),
        {"max_steps": 5, "limit_val_batches": 0.5, "min_steps": 3},
    ),
    "own loaders, stopped within a window": (
        own_loaders,
        ("fit",),
        {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 3},
    ),
    "augmented, validated within windows": (
        augmented,
        ("fit",),
        {"accumulate_grad_batches": 3, "val_check_interval": 2, "log_every_n_steps": 1},
    ),
    "together": (together, ("fit",), {}),
    "together, reloaded": (together, ("fit",), {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_diary(case: str) -> None:
    project, stages, options = CASES[case]
    (a, their, _), (b, our, _) = pair(project, stages, **options)
    assert first_difference(a, b) == ""
    assert first_difference(a.rows, b.rows) == ""
    for name in ("global_step", "current_epoch", "num_training_batches", "num_val_batches"):
        assert getattr(our, name) == getattr(their, name), name
