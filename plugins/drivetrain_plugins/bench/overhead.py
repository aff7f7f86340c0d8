"""What a trainer costs beside a hand-written loop: CPU time per optimizer step of a model so small that the rest shows.

Every contestant trains the same MLP (20-64-2, batch 32, SGD) on the same list of batches, in this process, on one
torch thread. Each run of a contestant is paired with one of the hand-written loop and judged by the ratio of that pair.
The two take turns, ``STINT`` steps each, so that a machine that slows down or speeds up meanwhile slows both. Only the
training itself is timed (between the hooks ``on_train_start`` and ``on_train_end``), not the set-up.

drivetrain steps without torch's record for a profiler, which the hand-written loop has (see ``drivetrain.unprofiled``):
that is how it can come out below the loop. With a learning-rate scheduler both have it.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from drivetrain.command_line import Parser, positive

Batch = tuple[Tensor, Tensor]
# Trains on the batches; the CPU seconds that this took, and those of the hand-written loop on the same batches.
Contestant = Callable[["Batches"], tuple[float, float]]

WARM_UP_STEPS = 20
STINT = 50  # steps: some milliseconds


@dataclass(frozen=True)
class Result:
    """Medians over the pairs. ``ratio``: to the hand-written loop of the same pair; ``ratios``: all of them."""

    name: str
    microseconds: float
    loop_microseconds: float
    ratio: float
    ratios: list[float]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


class Batches:
    """Batches prepared beforehand, as a loader. (To Lightning a plain list is a list of loaders.)

    Args:
        steps: how many batches of ``(32, 20)`` inputs and ``(32,)`` labels; 64 of them are different.
    """

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pool = [
            (torch.randn(32, 20, generator=generator), torch.randint(2, (32,), generator=generator))
            for _ in range(min(steps, 64))
        ]
        self.batches: list[Batch] = [pool[i % len(pool)] for i in range(steps)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class HandWritten:
    """The loop that everyone is measured against."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = SGD(self.net.parameters(), lr=0.01)

    def __call__(self, batches: Sequence[Batch]) -> float:
        """Train on ``batches``; the CPU seconds that it took."""
        net, optimizer = self.net, self.optimizer
        began = time.process_time()
        for inputs, labels in batches:
            loss = cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.process_time() - began


class Pair:
    """A contestant's run on ``batches`` and the hand-written loop's, by turns.

    Attributes:
        seconds: CPU time of the contestant and of the loop so far.
    """

    def __init__(self, batches: Sequence[Batch], loop: Callable[[Sequence[Batch]], float] | None = None) -> None:
        self.batches, self.loop = batches, HandWritten() if loop is None else loop
        self.seconds = (0.0, 0.0)
        self._done = 0
        self._since = 0.0

    def start(self) -> None:
        """The contestant begins."""
        self._since = time.process_time()

    def turn(self, step: int) -> None:
        """The contestant has done ``step`` steps: now as many by hand."""
        theirs = time.process_time() - self._since
        by_hand = self.loop(self.batches[self._done : step])
        self.seconds = self.seconds[0] + theirs, self.seconds[1] + by_hand
        self._done = step
        self._since = time.process_time()


def timed(base: type, log: bool, pair: Pair) -> Any:
    """The MLP as a module on ``base`` (Lightning's class or ours: same hooks), which times its own training."""
    steps = len(pair.batches)

    class Timed(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), lr=0.01)

        def on_train_start(self) -> None:
            pair.start()

        def on_train_end(self) -> None:
            pair.turn(steps)

    class TimedAndLogged(Timed):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if not batch_idx % STINT and batch_idx:
                pair.turn(batch_idx)
            inputs, labels = batch
            loss = cross_entropy(self.net(inputs), labels)
            self.log("loss", loss)
            return loss

    class TimedOnly(Timed):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if not batch_idx % STINT and batch_idx:
                pair.turn(batch_idx)
            inputs, labels = batch
            return cross_entropy(self.net(inputs), labels)

    return TimedAndLogged() if log else TimedOnly()


def fit(trainer: Any, base: type, log: bool, data: Batches) -> tuple[float, float]:
    pair = Pair(data.batches)
    trainer.fit(timed(base, log, pair), train_dataloaders=data)
    if trainer.global_step != len(data):
        raise RuntimeError(
            f"{trainer.global_step} steps were trained instead of {len(data)}: the timing means nothing."
        )
    return pair.seconds


def quiet(log: bool) -> dict[str, Any]:
    """Trainer arguments of the two set-ups: nothing but the training, or what ``self.log`` needs and no files."""
    if not log:
        return {"barebones": True}
    return {
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "logger": False,
    }


def trainer(log: bool) -> Contestant:
    from drivetrain import Trainer, TrainModule

    def run(data: Batches) -> tuple[float, float]:
        return fit(Trainer(strategy="single", devices=1, max_epochs=1, **quiet(log)), TrainModule, log, data)

    return run


def lightning(log: bool) -> Contestant:
    import lightning.pytorch as pl

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def run(data: Batches) -> tuple[float, float]:
        options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet(log)}
        return fit(pl.Trainer(**options), pl.LightningModule, log, data)

    return run


def accelerate() -> Contestant:
    from accelerate import Accelerator

    def run(data: Batches) -> tuple[float, float]:
        accelerator = Accelerator(cpu=True)
        net = network()
        net, optimizer = accelerator.prepare(net, SGD(net.parameters(), lr=0.01))
        pair = Pair(data.batches)
        pair.start()
        for number, (inputs, labels) in enumerate(data):
            if not number % STINT and number:
                pair.turn(number)
            loss = cross_entropy(net(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        pair.turn(len(data))
        return pair.seconds

    return run


# Each is made only if asked for: importing Lightning alone takes seconds.
CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "trainer": lambda: trainer(log=False),
    "trainer-log": lambda: trainer(log=True),
    "lightning": lambda: lightning(log=False),
    "lightning-log": lambda: lightning(log=True),
    "accelerate": accelerate,
}
OPTIONAL = {"lightning": "lightning", "lightning-log": "lightning", "accelerate": "accelerate"}


def assemble(names: Sequence[str]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """The contestants that can run, and why each of the others cannot."""
    ready, left_out = {}, {}
    for name in names:
        try:
            ready[name] = CONTESTANTS[name]()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != OPTIONAL.get(name):
                raise
            left_out[name] = f"{OPTIONAL[name]} is not installed (pip install 'drivetrain[bench]')"
    return ready, left_out


@contextmanager
def undisturbed() -> Iterator[None]:
    """One torch thread and no warnings, as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def compare(contestants: dict[str, Contestant], steps: int, pairs: int) -> list[Result]:
    """Run ``pairs`` rounds of every contestant beside the hand-written loop."""
    data, few = Batches(steps), Batches(WARM_UP_STEPS)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    with undisturbed():
        for run in contestants.values():
            run(few)
        for _ in range(pairs):
            for name, run in contestants.items():
                gc.collect()
                theirs, loop = run(data)
                times[name].append((theirs / steps * 1e6, loop / steps * 1e6))
    return [
        Result(
            name=name,
            microseconds=median(theirs for theirs, _ in found),
            loop_microseconds=median(loop for _, loop in found),
            ratio=median(theirs / loop for theirs, loop in found),
            ratios=[theirs / loop for theirs, loop in found],
        )
        for name, found in times.items()
    ]


def table(results: Sequence[Result], steps: int, pairs: int) -> str:
    lines = [
        "CPU time per optimizer step: MLP 20-64-2, batch 32, SGD, one thread",
        f"{steps} steps a run; medians of {pairs} pairs with the hand-written loop (lowest to highest ratio)",
        "",
        f"{'':16}{'us/step':>10}{'by hand':>10}{'ratio':>8}",
    ]
    for r in results:
        spread = f"({min(r.ratios):.2f} to {max(r.ratios):.2f})"
        lines.append(f"{r.name:16}{r.microseconds:10.1f}{r.loop_microseconds:10.1f}{r.ratio:8.2f}  {spread}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison. Returns 0, or 1 when nothing that was asked for could run."""
    parser = Parser(
        prog="python -m drivetrain.bench overhead",
        description="CPU time per step under each trainer, beside a hand-written loop.",
        epilog="The names ending in -log call self.log in every step; the others run with barebones=True.",
    )
    parser.add_argument("--steps", type=positive, default=1000, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--pairs", type=positive, default=7, help="runs of each beside the loop (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help=f"of: {', '.join(CONTESTANTS)}")
    options = parser.parse_args(argv)

    contestants, left_out = assemble(options.only or list(CONTESTANTS))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    if not contestants:
        return 1
    results = compare(contestants, options.steps, options.pairs)
    if options.json:
        outcome = {"steps": options.steps, "pairs": options.pairs, "left_out": left_out}
        print(json.dumps({**outcome, "results": [asdict(result) for result in results]}, indent=2))
    else:
        print(table(results, options.steps, options.pairs))
    return 0
