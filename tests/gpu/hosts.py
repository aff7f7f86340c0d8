"""Checks of more ranks than there are GPUs, over NCCL: ``python -m tests.gpu.hosts RANKS [WORD ...]``, where a word is
how the names of the checks begin (all without).

Messages go through sockets (:mod:`tests.gpu.one_gpu`), which is slow: what can be seen is what comes out of it and
whether it ends. The exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.gpu.held import Check, main
from tests.runs import Outcome, train
from tests.strategies import parity, test_absent_batches, test_skipped_batches
from tests.strategies.cells import cells
from tests.strategies.gpt import TinyGPT, three_heads, tiny_gpt, token_loader


def check(
    name: str,
    make: Callable[[], Any],
    strategy: dict[str, Any],
    bound: float,
    compared: tuple[str, ...] = ("curve", "weights", "metrics"),
    **options: Any,
) -> Check:
    """A run on all ranks whose ``compared`` are those of one process."""

    def run(folder: Path, *, num_nodes: int = 1, **places: Any) -> Outcome:
        given = {"data": token_loader(), "validation": token_loader(23, 5, shuffle=False), **options, **places}
        return train(make, strategy if num_nodes > 1 else "single", 1, num_nodes=num_nodes, **given)

    # See tests.strategies.parity.check_parity for what is held how in fp32.
    exact = bound <= 1e-10
    left_out = " " if exact else "key.bias"
    alike = make, tuple(sorted((name, str(value)) for name, value in options.items()))
    return Check(name, run, alike, bound, bound * (1 if exact else 100), compared, left_out)


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
            yield check(f"parity {cell}", make, cell.strategy, cell.declaration.support.tolerance, **options)
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
                yield check(name, made, strategy, 1e-10, ("weights",), max_epochs=2, validation=None, **options)
    for way, options in ways.items():
        made = test_skipped_batches.of(test_skipped_batches.SkippingGPT, ranks)
        options = {"max_epochs": 2, "validation": None, "precision": "32-true", **options}
        yield check(f"skipped zero {way}", made, {"name": "zero", "stage": 2}, 1e-6, ("weights",), **options)
    for name in ("ddp", "ring"):
        made = test_skipped_batches.of(test_skipped_batches.SkippingClassifier, ranks)
        data = test_skipped_batches.data_of(made)
        # Small enough for one sample's gradients too: those of the mean of several are smaller, and steps were skipped
        # on two ranks that one process makes.
        options = {"max_epochs": 2, "data": data, "validation": None, "precision": "16-mixed", "loss_scale": 1024.0}
        yield check(f"skipped {name} 16-mixed", made, {"name": name}, 1e-4, ("weights",), **options)
    if ranks == 2:
        for place, strategy in {"ddp": {"name": "ddp"}, **places}.items():
            data = test_absent_batches.on_one_rank()
            options = {"max_epochs": 2, "data": data, "validation": None, "precision": "64-true"}
            made = test_absent_batches.Skipping
            yield check(f"absent {place}", made, strategy, 1e-10, ("weights",), **options)


def chosen(task: argparse.Namespace) -> Iterable[Check]:
    return [one for one in checks(task.ranks) if not task.words or one.name.startswith(tuple(task.words))]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.gpu.hosts", description=__doc__)
    made.add_argument("ranks", type=int)
    made.add_argument("words", nargs="*", help="how the names of checks begin; all without")
    return made


if __name__ == "__main__":
    sys.exit(main(__spec__.name, chosen, parser(), sys.argv[1:]))
