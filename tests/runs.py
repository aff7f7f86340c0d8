"""Small modules and runs that tests compare: the same training under different strategies and world sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Declaration, Trainer, TrainModule

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def dataset(samples: int = 51, features: int = 6, classes: int = 4) -> TensorDataset:
    """Random fp64 features and labels; 51 samples leave a tail under every batch size that is used."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(classes, (samples,), generator=generator))


def loader(samples: int = 51, batch_size: int = 8, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=batch_size, shuffle=shuffle)


class Classifier(TrainModule):
    """A small tanh network; smooth, so that rounding does not grow."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = seeded(
            lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)
        self.log("val/loss", nn.functional.cross_entropy(scores, y))
        self.log("val/accuracy", (scores.argmax(1) == y).double().mean())
        self.log("val/hits", (scores.argmax(1) == y).double().sum(), reduce_fx="sum")
        self.log("val/worst", nn.functional.cross_entropy(scores, y, reduction="none").max(), reduce_fx="max")

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        kind = self.hparams.optimizer
        if kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        if kind == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"},
        }


class Gan(TrainModule):
    """Two optimizers, toggled in turn and stepped by the module itself."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = seeded(lambda: nn.Linear(6, 6))
        self.critic = seeded(lambda: nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        softplus = nn.functional.softplus
        self.toggle_optimizer(first)
        loss = softplus(-self.critic(self.generator(x))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        with self.toggled_optimizer(second):
            other = (softplus(-self.critic(x)) + softplus(self.critic(self.generator(x).detach()))).mean()
            second.zero_grad()
            self.manual_backward(other)
            second.step()
        self.log_dict({"generator": loss, "critic": other}, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.5),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """``make()`` under a fixed seed, leaving the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@dataclass
class Outcome:
    """What a run ended with."""

    curve: list[tuple[int, float]]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]
    steps: int
    trainer: Trainer
    module: TrainModule


def train(
    make: Callable[[], TrainModule] = Classifier,
    strategy: str | dict[str, Any] | Declaration = "single",
    devices: int = 1,
    *,
    data: Any = None,
    validation: Any = None,
    precision: str = "64-true",
    resume: Path | None = None,
    **options: Any,
) -> Outcome:
    """Fit a new module, or go on from a checkpoint, and return what came of it."""
    settings = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, "seed": 3, **options}
    trainer = Trainer(strategy=strategy, devices=devices, precision=precision, **settings)
    module = make()
    trainer.fit(module, data if data is not None else loader(), validation, ckpt_path=resume)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(list(trainer.loss_curve), weights, metrics, trainer.global_step, trainer, module)


def difference(a: Outcome, b: Outcome) -> dict[str, float]:
    """Largest absolute differences of loss curve, weights and metrics; the runs must have the same shape."""
    assert [step for step, _ in a.curve] == [step for step, _ in b.curve]
    assert a.weights.keys() == b.weights.keys()
    assert a.metrics.keys() == b.metrics.keys()
    assert a.steps == b.steps
    assert a.curve or not a.module.automatic_optimization
    return {
        "curve": max((abs(x - y) for (_, x), (_, y) in zip(a.curve, b.curve, strict=True)), default=0.0),
        "weights": max(float((a.weights[k] - b.weights[k]).abs().max()) for k in a.weights),
        "metrics": max((abs(a.metrics[k] - b.metrics[k]) for k in a.metrics), default=0.0),
    }
