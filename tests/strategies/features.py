"""What projects do beside plain training, under every exact strategy, held to one process.

``python -m tests.strategies.features [FEATURE ...]`` runs all pairs of a feature and a place, some of which are
refused, and prints those that are not equal; the tests run a part of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from drivetrain import Callback
from drivetrain.callbacks import GradientAccumulationScheduler
from drivetrain.errors import ConfigurationError
from tests.runs import Classifier, Outcome, dataset, difference, seeded, train

# Names of places, with what a Trainer is given there.
PLACES: dict[str, tuple[Any, int]] = {
    "ddp": ("ddp", 3),
    "ddp, unused": ({"name": "ddp", "find_unused_parameters": True}, 2),
    "ring": ("ring", 2),
    "hierarchical": ("hierarchical", 4),
    "fsdp": ("fsdp", 3),
    "fsdp, layers": ({"name": "fsdp", "wrap": "Linear"}, 2),
    "data x tensor": ({"name": "mesh", "data": 2, "shard": 1, "tensor": 2}, 4),
    "shards": ({"name": "mesh", "data": 1, "shard": 2, "tensor": 1}, 2),
    "tensor_parallel": ("tensor_parallel", 2),
    "pipeline": ("pipeline", 2),
    "server": ("parameter_server", 3),
    "embedded server": ({"name": "parameter_server", "embedded": True}, 2),
    **{f"zero {stage}": ({"name": "zero", "stage": stage}, 3 if stage == 2 else 2) for stage in range(4)},
}
ZERO = frozenset(f"zero {stage}" for stage in range(4))


class Planned(Classifier):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}


class Groups(Planned):
    """Two groups and two schedules, by step and by epoch."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.parameters() if (p.ndim == 1) == bias]} for bias in (False, True)]
        optimizer = torch.optim.AdamW([groups[0] | {"weight_decay": 0.1}, groups[1] | {"lr": 0.05}], lr=0.01)
        schedules = torch.optim.lr_scheduler
        by_step = schedules.OneCycleLR(optimizer, [0.02, 0.05], total_steps=40)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, schedules.ExponentialLR(optimizer, 0.9)]


class Accumulated(Planned):
    """An optimizer that has states from its beginning, with two groups and a schedule."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.parameters() if (p.ndim == 1) == bias]} for bias in (False, True)]
        groups = [groups[0] | {"weight_decay": 0.1}, groups[1] | {"lr": 0.2}]
        optimizer = torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Planned):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, nesterov=True, momentum=0.8)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/worst"}}


def with_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> type[Classifier]:
    def configure_optimizers(self: Classifier) -> torch.optim.Optimizer:
        return kind(self.parameters(), **options)

    return type(kind.__name__, (Planned,), {"configure_optimizers": configure_optimizers})


class HalvesGradients(Planned):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Frozen(Planned):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Checkpointed(Planned):
    def loss(self, batch: Any) -> torch.Tensor:
        hidden = checkpoint(self.net[:2], batch[0], use_reentrant=False)
        return F.cross_entropy(self.net[2:](hidden), batch[1])


class Weighted(Planned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = 1.0 + (batch[1] == 0).double()
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum(), "weight": weights.sum()}


class Late(Planned):
    """Built by ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = Classifier().net


class OwnRate(Planned):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class TwoPasses(Planned):
    def loss(self, batch: Any) -> torch.Tensor:
        scores, others = self.net(batch[0]), self.net(batch[0] + 0.1)
        return F.cross_entropy(scores, batch[1]) + 0.3 * ((scores - others) ** 2).mean()


class OfNames(Planned):
    """Its batches are dictionaries, with text."""

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))


class OfTwo(Planned):
    def loss(self, batch: Any) -> torch.Tensor:
        return sum((F.cross_entropy(self.net(x), y) for x, y in batch.values()), torch.zeros(()))


class Teacher(Planned):
    """Its own average teaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = seeded(lambda: nn.Linear(16, 4)).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.net[:4](batch[0])
        scores = self.net[4](hidden)
        return F.cross_entropy(scores, batch[1]) + 0.1 * ((scores - self.teacher(hidden)) ** 2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.net[4].parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)


class Estimated(Planned):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class Clamps(Callback):
    """As critics are held to a range."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.3, 0.3)


class Shrinks(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(0.9)


class Reloads(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict({name: value * 0.5 for name, value in pl_module.state_dict().items()})


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 51

    def __getitem__(self, index: int) -> Any:
        x, y = dataset()[index]
        return {"x": x, "y": y, "name": f"sample {index}"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        samples = dataset()
        return iter([samples[index] for index in range(len(samples))])


def loaders(samples: int = 51, batch_size: int = 8, **options: Any) -> Callable[[], dict[str, Any]]:
    def made() -> dict[str, Any]:
        training = DataLoader(dataset(samples), batch_size=batch_size, **{"shuffle": True, **options})
        return {"data": training, "validation": DataLoader(dataset(23), batch_size=5)}

    return made


def only(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"data": make()}


def drawn() -> dict[str, Any]:
    weights = [1.0 + index % 3 for index in range(51)]
    sampler = WeightedRandomSampler(weights, 51, generator=torch.Generator().manual_seed(4))
    return loaders(shuffle=False, sampler=sampler)()


@dataclass(frozen=True)
class Feature:
    """A module, its data and the Trainer's options; ``without`` are places that refuse it, or tell that it is not the
    same there."""

    make: Callable[[], Any] = Planned
    data: Callable[[], dict[str, Any]] = field(default_factory=loaders)
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Callback], ...] = ()
    without: frozenset[str] = frozenset()

    def run(self, strategy: Any, devices: int, precision: str, **more: Any) -> Outcome:
        callbacks = [make() for make in self.callbacks]
        options = {"timeout": 20, "callbacks": callbacks, "precision": precision, **self.options, **more}
        return train(self.make, strategy, devices, **self.data(), **options)


PIPELINE = frozenset({"pipeline"})
EMPTY = frozenset({"zero 3"})  # whose parameters are empty in hooks
OPTIMIZERS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.Adam: {"lr": 0.01, "amsgrad": True},
    torch.optim.RMSprop: {"lr": 0.01, "centered": True, "momentum": 0.5},
    torch.optim.Adagrad: {"lr": 0.05},
    torch.optim.Adadelta: {"lr": 1.0},
    torch.optim.NAdam: {"lr": 0.01},
    torch.optim.RAdam: {"lr": 0.01},
    torch.optim.Adamax: {"lr": 0.01},
    torch.optim.ASGD: {"lr": 0.1},
    torch.optim.SGD: {"lr": 0.1, "maximize": True},
}
FEATURES: dict[str, Feature] = {
    "windows of three": Feature(options={"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}),
    "clipping by value": Feature(options={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, without=ZERO),
    "groups": Feature(Groups, options={"accumulate_grad_batches": 2}),
    "states from the beginning": Feature(Accumulated),
    "plateau": Feature(Plateau, options={"max_epochs": 4}),
    **{kind.__name__: Feature(with_optimizer(kind, **options)) for kind, options in OPTIMIZERS.items()},
    "gradients halved in a hook": Feature(HalvesGradients, without=frozenset({"zero 2", "zero 3"})),
    "frozen": Feature(Frozen),
    "checkpointed": Feature(Checkpointed, without=PIPELINE),
    "weighted": Feature(Weighted, options={"accumulate_grad_batches": 3}),
    "late": Feature(Late),
    "own rate": Feature(OwnRate),
    "two passes": Feature(TwoPasses, without=PIPELINE),
    "few samples": Feature(data=loaders(7, 2)),
    "one sample": Feature(data=loaders(1, 2)),
    "tail of one": Feature(data=loaders(17, 8)),
    "without the tail": Feature(data=loaders(drop_last=True)),
    "drawn samples": Feature(data=drawn),
    "validation within epochs": Feature(Plateau, options={"val_check_interval": 0.5, "max_epochs": 3}),
    "validation of every other epoch": Feature(options={"check_val_every_n_epoch": 2, "max_epochs": 4}),
    "limits": Feature(options={"limit_train_batches": 0.4, "limit_val_batches": 2}),
    "overfitting": Feature(options={"overfit_batches": 2}),
    "steps": Feature(options={"max_steps": 9, "max_epochs": -1}),
    "loaders anew": Feature(options={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "names": Feature(OfNames, only(lambda: DataLoader(Named(), batch_size=8, shuffle=True))),
    "two loaders": Feature(
        OfTwo,
        only(lambda: {name: DataLoader(dataset(), batch_size=8, shuffle=name == "a") for name in "ab"}),
        without=PIPELINE,
    ),
    "stream": Feature(data=only(lambda: DataLoader(Stream(), batch_size=8))),
    "teacher": Feature(Teacher, without=PIPELINE | EMPTY),
    "estimated steps": Feature(Estimated, options={"accumulate_grad_batches": 2}),
    "windows by epoch": Feature(
        callbacks=(lambda: GradientAccumulationScheduler({0: 1, 1: 3, 3: 2}),), options={"max_epochs": 4}
    ),
    "clamped weights": Feature(callbacks=(Clamps,), without=EMPTY),
    "weights changed after validation": Feature(callbacks=(Shrinks,), options={"max_epochs": 3}, without=EMPTY),
    "weights loaded in a hook": Feature(callbacks=(Reloads,), options={"max_epochs": 3}, without=EMPTY),
}


def largest(feature: str, place: str) -> tuple[float, float]:
    """The largest difference from one process of losses, weights and metrics, and what it may be."""
    one, (strategy, devices) = FEATURES[feature], PLACES[place]
    precision, bound = ("32-true", 2e-6) if place in ZERO else ("64-true", 1e-10)
    runs = one.run("single", 1, precision), one.run(strategy, devices, precision)
    return max(difference(*runs).values()), bound


def main(names: list[str]) -> int:
    failed = 0
    for feature in names or FEATURES:
        for place in PLACES:
            try:
                found, bound = largest(feature, place)
                told = "" if found < bound else f"{found:.2g} away"
            except ConfigurationError as error:
                told = "" if place in FEATURES[feature].without else f"refused: {error}"
            failed += bool(told) and place not in FEATURES[feature].without
            if told:
                print(f"{feature}, {place}: {told}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
