"""Losses of the GPT of ``python -m drivetrain.bench gpt`` on more ranks than there are GPUs, over NCCL, beside those of
``single`` on the same batches: ``python -m tests.gpu.losses RANKS [--precision bf16-mixed]``. (The size gpt2 is too
much for four ranks of one GPU: its first row does not come within a minute.)

The exit code is 1 where one that is exact is further from ``single`` than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import Trainer
from drivetrain_plugins.bench.gpt import CONTESTS, Contest
from drivetrain_plugins.bench.gpt_sizes import SIZES
from drivetrain_plugins.bench.gpt_worker import Language, Sequences
from tests.gpu import one_gpu


def losses(strategy: Any, nodes: int, pieces: int, task: argparse.Namespace) -> list[float]:
    """Of the steps; a batch has ``pieces`` micro-batches, which one process takes one after another."""
    size = SIZES[task.size]
    windows = pieces if nodes == 1 else 1
    trainer = Trainer(
        strategy=strategy,
        devices=1,
        num_nodes=nodes,
        accelerator=task.accelerator,
        precision=task.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=windows,
        log_every_n_steps=1000,
        return_weights=False,
        seed=0,
    )
    data = Sequences(size, task.steps * task.batch * pieces)
    loader = DataLoader(data, batch_size=task.batch * pieces // windows, collate_fn=lambda whole: whole)
    trainer.fit(Language(size), loader)
    used = trainer.strategy.device.type
    assert used == {"gpu": "cuda"}.get(task.accelerator, task.accelerator), f"it ran on {used}"
    trainer.close()
    return [loss for _, loss in trainer.loss_curve]


def contests(task: argparse.Namespace) -> list[Contest]:
    return [one for one in CONTESTS if one.fits(task.ranks) and one.strategy.startswith(tuple(task.strategies))]


def as_rank(task: argparse.Namespace) -> int:
    for number, contest in enumerate(contests(task)):
        began = time.monotonic()
        found = losses(contest.options, task.ranks, contest.scale(task.ranks), task)
        if os.environ["RANK"] == "0":
            partial = task.as_rank / f"{number}.partial"
            partial.write_text(json.dumps({"losses": found, "seconds": time.monotonic() - began}))
            partial.rename(task.as_rank / f"{number}.json")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.gpu.losses", description=__doc__)
    made.add_argument("ranks", type=int)
    made.add_argument("--strategies", type=lambda text: text.split(","), default=[""])
    made.add_argument("--size", choices=sorted(SIZES), default="small")
    made.add_argument("--precision", default="32-true", help="bf16-mixed differs by some 1e-3")
    made.add_argument("--accelerator", default="gpu")
    made.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--tolerance", type=float, default=1e-4)
    made.add_argument("--limit", type=float, default=90.0, help="seconds that a row may take")
    made.add_argument("--as-rank", type=Path, default=None, help=argparse.SUPPRESS)
    return made


def main(argv: list[str]) -> int:
    task = parser().parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    if task.as_rank is not None:
        return as_rank(task)
    todo, wrong = contests(task), 0
    pieces = {contest.scale(task.ranks) for contest in todo}
    single = {number: losses("single", 1, number, task) for number in sorted(pieces)}
    with tempfile.TemporaryDirectory() as folder:
        running = one_gpu.start(task.ranks, [sys.executable, "-m", __spec__.name, *argv, "--as-rank", folder], 1 << 27)
        try:
            for number, contest in enumerate(todo):
                result = Path(folder) / f"{number}.json"
                ended = one_gpu.awaited(result, running, task.limit)
                if ended is not None:
                    print(f"{contest.strategy} on {task.ranks} ranks: WRONG, {ended}", flush=True)
                    return 1
                found = json.loads(result.read_text())
                wrong += not right(contest, found, single[contest.scale(task.ranks)], task)
        finally:
            for process in running:
                process.kill()
    return int(wrong > 0)


def right(contest: Contest, found: dict[str, Any], single: list[float], task: argparse.Namespace) -> bool:
    """Say how far the losses are from those of ``single``, and whether that is near enough."""
    pairs = list(zip(found["losses"], single, strict=True))
    furthest = max(abs(ours - theirs) for ours, theirs in pairs)
    near = contest.strategy.startswith("local_sgd") or furthest <= task.tolerance  # whose weights part between averages
    print(
        f"{contest.strategy:<32} {task.ranks} ranks: {pairs[0][0]:.4f} to {pairs[-1][0]:.4f}, at most {furthest:.1e}"
        f" from single, {found['seconds']:.0f} s{'' if near else ': WRONG'}",
        flush=True,
    )
    return near


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
