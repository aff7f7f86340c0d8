"""Runs that are drawn: a module, its data, the Trainer's options and callbacks, a place, and often a checkpoint from
which another place goes on; each held to one process.

``python -m tests.strategies.drawn FIRST COUNT`` runs the seeds from FIRST on and prints those that are not equal, with
what was drawn; what is refused is counted. The tests run a few.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, WeightedRandomSampler

from drivetrain import Callback
from drivetrain.callbacks import EarlyStopping, EMAWeightAveraging, GradientAccumulationScheduler, ModelCheckpoint
from drivetrain.errors import ConfigurationError, TrainingError
from tests.runs import Outcome, dataset, difference, train
from tests.strategies import features
from tests.strategies.features import OPTIMIZERS, PLACES, ZERO, Planned, with_optimizer


class Counted(Planned):
    """Buffers that change, of which one is a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.mean.mul_(0.5).add_(self.seen)


class Logging(Planned):
    """Logs with every reduction and from several hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        self.log("train/samples", float(len(batch[1])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train/least", batch[0].min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("train/most", batch[1].double().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("train/inputs", batch[0].mean(), on_step=True, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val/end", 3.0)

    def on_train_epoch_end(self) -> None:
        self.log("train/end", float(self.current_epoch))


class Skips(Planned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


MODULES: tuple[Callable[[], Any], ...] = (
    *(Planned, Counted, Logging, Skips, features.Groups, features.Accumulated, features.Plateau, features.Frozen),
    *(features.HalvesGradients, features.Checkpointed, features.Weighted, features.Late, features.OwnRate),
    *(features.TwoPasses, features.Teacher),
    *(with_optimizer(kind, **options) for kind, options in OPTIMIZERS.items()),
)
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "clamps": features.Clamps,
    "shrinks": features.Shrinks,
    "reloads": features.Reloads,
    "windows": lambda: GradientAccumulationScheduler({0: 1, 1: 3}),
    "stops": lambda: EarlyStopping("train/loss", patience=1, mode="max"),
    "averages": lambda: EMAWeightAveraging(decay=0.9),
}
CHANGING = {"clamps", "shrinks", "reloads"}  # weights in hooks, which stage 3 of zero has empty there
READ = ("shuffled", "shuffled", "in order", "weighted", "without tail", "batches", "stream", "process", "subset")


@dataclass(frozen=True)
class Drawn:
    """A run as plain data.

    Attributes:
        module: number of the module.
        samples, batch_size, read: the training data and the way in which it is read.
        validation: samples and batch size, None for none.
        place, step, second: where it is trained, and the step from whose checkpoint ``second`` goes on (0: none does).
    """

    module: int
    samples: int
    batch_size: int
    read: str
    validation: tuple[int, int] | None
    options: dict[str, Any]
    callbacks: tuple[str, ...]
    place: str
    step: int
    second: str

    alone = False  # whether it is held to the undisturbed run of the place, and not to one process

    @property
    def precision(self) -> str:
        return "32-true" if {self.place, self.second} & ZERO else "64-true"

    @property
    def bound(self) -> float:
        """Some optimizers divide by what may be all but nothing, which makes a hundredfold of rounding."""
        return 0.0 if self.alone else 1e-4 if self.precision == "32-true" else 1e-8

    def told_to_differ(self) -> bool:
        """Whether a warning says so: hooks of ``zero`` that find no gradients or no weights."""
        made, places = MODULES[self.module], {self.place, self.second}
        if "zero 3" in places and (made is features.Teacher or CHANGING & set(self.callbacks)):
            return True
        return made is features.HalvesGradients and bool({"zero 2", "zero 3"} & places)

    def loaders(self) -> dict[str, Any]:
        data, size = dataset(self.samples), self.batch_size
        weights = [1.0 + i % 3 for i in range(self.samples)]
        generator = torch.Generator().manual_seed(4)
        made: dict[str, Callable[[], Any]] = {
            "shuffled": lambda: DataLoader(data, size, shuffle=True),
            "in order": lambda: DataLoader(data, size),
            "weighted": lambda: DataLoader(
                data, size, sampler=WeightedRandomSampler(weights, self.samples, generator=generator)
            ),
            "without tail": lambda: DataLoader(data, size, shuffle=True, drop_last=self.samples >= size),
            "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), size, False)),
            "stream": lambda: DataLoader(Stream(self.samples), size),
            "process": lambda: DataLoader(data, size, shuffle=True, num_workers=1),
            "subset": lambda: DataLoader(Subset(data, range(0, self.samples, 2)), size, shuffle=True),
        }
        validation = None if self.validation is None else DataLoader(dataset(self.validation[0]), self.validation[1])
        return {"data": made[self.read](), "validation": validation}

    def train(self, place: str, **more: Any) -> Outcome:
        strategy, devices = ("single", 1) if place == "single" else PLACES[place]
        devices = more.pop("devices", devices)
        callbacks = [CALLBACKS[name]() for name in self.callbacks] + more.pop("saving", [])
        options = {"timeout": 40, "precision": self.precision, "callbacks": callbacks, **self.options, **more}
        return train(MODULES[self.module], strategy, devices, **self.loaders(), **options)

    def outcome(self, folder: Path, **more: Any) -> Outcome:
        """Of the second place where there was a checkpoint, else of the first."""
        if not self.step:
            return self.train(self.place, **more)
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=self.step, save_top_k=-1)
        found = self.train(self.place, saving=[saving], enable_checkpointing=True, **more)
        saved = folder / f"step={self.step}.ckpt"
        return self.train(self.second, resume=saved, **more) if saved.exists() and found.steps > self.step else found


class Stream(features.Stream):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        data = dataset(self.samples)
        return iter([data[index] for index in range(self.samples)])


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    samples = rng.choice([1, 3, 7, 17, 29, 40, 51, 64])
    options: dict[str, Any] = {"max_epochs": rng.choice([1, 2, 2, 3])}
    validation = rng.choice([None, (23, 5), (23, 5), (2, 1), (9, 4)])
    for share, name, values in (
        (0.45, "accumulate_grad_batches", [2, 3, 4]),
        (0.5, "gradient_clip_val", [0.02, 0.3]),
        (0.15, "gradient_clip_algorithm", ["value"]),
        (0.15, "max_steps", [3, 7, 11]),
        (0.2, "limit_train_batches", [0.5, 0.3, 3, 1]),
        (0.15, "limit_val_batches", [0.5, 1, 0]),
        (0.2, "val_check_interval", [0.5, 0.25, 1, 2]),
        (0.1, "check_val_every_n_epoch", [2]),
        (0.07, "overfit_batches", [1, 2, 0.4]),
        (0.1, "reload_dataloaders_every_n_epochs", [1]),
        (0.2, "num_sanity_val_steps", [2, -1]),
        (0.1, "min_epochs", [2]),
    ):
        if rng.random() < share and not (name == "gradient_clip_algorithm" and "gradient_clip_val" not in options):
            options[name] = rng.choice(values)
    place = rng.choice([*PLACES])
    return Drawn(
        module=rng.randrange(len(MODULES)),
        samples=samples,
        batch_size=rng.choice([1, 2, 4, 5, 8, 8, 16] if samples < 30 else [4, 5, 8, 8, 16]),
        read=rng.choice(READ),
        validation=validation,
        options=options,
        callbacks=tuple(name for name in CALLBACKS if rng.random() < 0.08),
        place=place,
        step=rng.randrange(1, 12) if rng.random() < 0.5 else 0,
        second=rng.choice([place, "single", *PLACES]),
    )


def judged(seed: int, draw: Callable[[int], Drawn] = draw) -> str:
    """``"equal"``, ``"refused"``, ``"told"`` where a warning says that it may differ, else what is not equal."""
    drawn = draw(seed)
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            single = drawn.train(drawn.place if drawn.alone else "single")
            found = drawn.outcome(Path(folder))
        except (ConfigurationError, TrainingError):
            return "refused"
    if drawn.told_to_differ():
        return "told"
    if single.steps != found.steps or single.metrics.keys() != found.metrics.keys():
        return f"{found.steps} steps, not {single.steps}; metrics {sorted(found.metrics)}, not {sorted(single.metrics)}"
    differences = difference(single, found)
    return "equal" if max(differences.values()) <= drawn.bound else f"differs: {differences}"


def main(first: int, count: int, draw: Callable[[int], Drawn] = draw) -> int:
    counted: Counter[str] = Counter()
    for seed in range(first, first + count):
        said = judged(seed, draw)
        known = said in ("equal", "refused", "told")
        counted[said if known else "not equal"] += 1
        if not known:
            print(f"{seed}: {said}, {draw(seed)}", flush=True)
    print(", ".join(f"{number} {said}" for said, number in counted.most_common()))
    return int("not equal" in counted)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
