"""Checks of more ranks than there are GPUs, over NCCL: ``python -m tests.gpu.hosts RANKS [WORD ...]``, where a word is
how the names of the checks begin (all without).

Messages go through sockets (:mod:`tests.gpu.one_gpu`), which is slow: what can be seen is what comes out of it and
whether it ends. The exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.gpu import one_gpu
from tests.runs import train
from tests.strategies import parity, test_absent_batches, test_skipped_batches
from tests.strategies.cells import cells
from tests.strategies.gpt import TinyGPT, three_heads, tiny_gpt, token_loader

LIMIT = 60.0  # seconds that a check may take before its ranks are killed
Saved = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A run on all ranks whose ``compared`` are those of one process to ``tolerance``."""

    name: str
    make: Callable[[], Any]
    strategy: dict[str, Any]
    tolerance: float
    compared: tuple[str, ...] = ("curve", "weights", "metrics")
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, strategy: Any, **more: Any) -> Saved:
        data, validation = token_loader(), token_loader(23, 5, shuffle=False)
        options = {"data": data, "validation": validation, "accelerator": "gpu", **self.options, **more}
        outcome = train(self.make, strategy, 1, **options)
        used = outcome.trainer.strategy.device.type
        assert used == "cuda", f"it ran on {used}"
        weights = {name: value.cpu() for name, value in outcome.weights.items()}
        return {"weights": weights, **{name: getattr(outcome, name) for name in ("curve", "metrics", "steps")}}


class Deep(test_skipped_batches.SkippingGPT):
    """Whose passes are long."""

    def __init__(self) -> None:
        super().__init__()
        deep = TinyGPT(layers=24)
        self.model = deep.model


def checks(ranks: int) -> Iterable[Check]:
    for cell in cells():
        if cell.exact and cell.devices == ranks:
            make = three_heads if ranks == 3 else tiny_gpt
            options = {**parity.OPTIONS, "precision": cell.precision}
            yield Check(f"parity {cell}", make, cell.strategy, cell.declaration.support.tolerance, options=options)
    shards = {"name": "mesh", "data": 1, "shard": ranks, "tensor": 1}
    places = {"fsdp": {"name": "fsdp"}, "fsdp-whole": test_skipped_batches.WHOLE, "mesh": shards}
    ways: dict[str, dict[str, Any]] = {
        "clipping": {"gradient_clip_val": 0.3},
        "windows": {"accumulate_grad_batches": 2},
    }
    for place, strategy in places.items():
        for kind in (test_skipped_batches.SkippingGPT, Deep):
            for way, options in ways.items():
                made = test_skipped_batches.of(kind, ranks)
                name = f"skipped {place} {kind.__name__} {way}"
                yield Check(name, made, strategy, 1e-10, ("weights",), {"max_epochs": 2, "validation": None, **options})
    for way, options in ways.items():
        made = test_skipped_batches.of(test_skipped_batches.SkippingGPT, ranks)
        options = {"max_epochs": 2, "validation": None, "precision": "32-true", **options}
        yield Check(f"skipped zero {way}", made, {"name": "zero", "stage": 2}, 1e-6, ("weights",), options)
    for name in ("ddp", "ring"):
        made = test_skipped_batches.of(test_skipped_batches.SkippingClassifier, ranks)
        data = test_skipped_batches.data_of(made)
        # Small enough for one sample's gradients too: those of the mean of several are smaller, and steps were skipped
        # on two ranks that one process makes.
        options = {"max_epochs": 2, "data": data, "validation": None, "precision": "16-mixed", "loss_scale": 1024.0}
        yield Check(f"skipped {name} 16-mixed", made, {"name": name}, 1e-4, ("weights",), options)
    if ranks == 2:
        for place, strategy in {"ddp": {"name": "ddp"}, **places}.items():
            data = test_absent_batches.on_one_rank()
            options = {"max_epochs": 2, "data": data, "validation": None, "precision": "64-true"}
            made = test_absent_batches.Skipping
            yield Check(f"absent {place}", made, strategy, 1e-10, ("weights",), options)


def differences(check: Check, reference: Saved, found: Saved) -> dict[str, float]:
    """The largest, of what is compared; ranks that took other steps differ infinitely."""
    if reference["steps"] != found["steps"] or not found["steps"]:
        return {"steps": float("inf")}
    fp64 = check.tolerance <= 1e-10
    # See tests.strategies.parity.check_parity for what is held how in fp32.
    left_out, least = (" ", 0.0) if fp64 else ("key.bias", 1.0)
    weights, metrics = reference["weights"], reference["metrics"]
    worst = {
        "curve": [abs(a[1] - b[1]) for a, b in zip(reference["curve"], found["curve"], strict=True)],
        "weights": [
            float((value - found["weights"][name]).abs().max())
            for name, value in weights.items()
            if not name.endswith(left_out)
        ],
        "metrics": [
            abs(value - found["metrics"][name]) / (max(least, abs(value)) if least else 1.0)
            for name, value in metrics.items()
        ],
    }
    return {name: max(worst[name], default=0.0) for name in check.compared}


def within(check: Check, told: dict[str, float]) -> bool:
    """Weights in fp32 may be a hundred times as far, as in tests.strategies.parity."""
    weights = 1.0 if check.tolerance <= 1e-10 else 100.0
    return all(far <= check.tolerance * (weights if name == "weights" else 1.0) for name, far in told.items())


def as_rank(folder: Path, ranks: int, names: list[str]) -> int:
    """Run the checks of these names as one of the ranks, told which by the environment."""
    for number, name in enumerate(names):
        [check] = [check for check in checks(ranks) if check.name == name]
        found = check.run(check.strategy, num_nodes=ranks)
        if os.environ["RANK"] == "0":
            torch.save(found, folder / f"{number}.partial")
            (folder / f"{number}.partial").rename(folder / f"{number}.pt")
    return 0


def start(folder: Path, ranks: int, names: list[str]) -> list[subprocess.Popen[bytes]]:
    return one_gpu.start(ranks, [sys.executable, "-m", __spec__.name, "--as-rank", str(folder), str(ranks), *names])


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore", UserWarning)  # each would be there once a rank and check
    if arguments[:1] == ["--as-rank"]:
        return as_rank(Path(arguments[1]), int(arguments[2]), arguments[3:])
    ranks, words = int(arguments[0]), tuple(arguments[1:])
    todo = [check for check in checks(ranks) if not words or check.name.startswith(words)]
    failed, references = 0, dict[Any, Saved]()
    while todo:
        with tempfile.TemporaryDirectory() as place:
            folder, started = Path(place), time.monotonic()
            running = start(folder, ranks, [check.name for check in todo])
            try:
                names = [f"{number}.pt" for number in range(len(todo))]
                ended = next(filter(None, (one_gpu.awaited(folder / name, running, LIMIT) for name in names)), None)
            finally:
                for process in running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5.0 if ended is None else 0.0)
                    process.kill()
            done = [torch.load(folder / f"{number}.pt") for number in range(len([*folder.glob("*.pt")]))]
        print(f"{len(done)} of {len(todo)} came to an end in {time.monotonic() - started:.0f} s", flush=True)
        for check, found in zip(todo, done, strict=False):
            key = check.make, tuple(sorted((name, str(value)) for name, value in check.options.items()))
            if key not in references:
                references[key] = check.run("single")
            told = differences(check, references[key], found)
            right = within(check, told)
            failed += not right
            print(f"{check.name}: {'right' if right else 'WRONG'}, {told}", flush=True)
        todo = todo[len(done) :]
        if todo:
            failed += 1
            print(f"{todo[0].name}: WRONG, {ended}", flush=True)
            todo = todo[1:]
    print(f"{failed} of the checks on {ranks} ranks went wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
