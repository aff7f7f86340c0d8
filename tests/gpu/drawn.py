"""Runs that are drawn (:mod:`tests.strategies.drawn`) on more ranks than there are GPUs, over NCCL:
``python -m tests.gpu.drawn RANKS FIRST COUNT``. Their places are drawn among those with so many ranks."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.held import Check, main
from tests.runs import Outcome
from tests.strategies.drawn import Drawn, draw
from tests.strategies.features import PLACES


def drawn(ranks: int, seed: int) -> Drawn:
    able, rng = [place for place, (_, devices) in PLACES.items() if devices == ranks], random.Random(seed)
    return replace(draw(seed), place=rng.choice(able), second=rng.choice(able))


def checks(task: argparse.Namespace) -> Iterable[Check]:
    for seed in range(task.first, task.first + task.count):
        one = drawn(task.ranks, seed)

        def run(folder: Path, *, one: Drawn = one, num_nodes: int = 1, **places: Any) -> Outcome:
            if num_nodes == 1:
                return one.train("single", **places)
            return one.outcome(folder, devices=1, num_nodes=num_nodes, **places)

        bound = float("inf") if one.told_to_differ() else one.bound
        name = f"{seed} {one.place}" + (f", then {one.second}" if one.step else "")
        yield Check(name, run, seed, bound, bound)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.gpu.drawn", description=__doc__)
    for name, told in (("ranks", "2 to 4"), ("first", "seed"), ("count", "of seeds")):
        made.add_argument(name, type=int, help=told)
    return made


if __name__ == "__main__":
    sys.exit(main(__spec__.name, checks, parser(), sys.argv[1:]))
