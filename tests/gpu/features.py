"""What projects do beside plain training (:mod:`tests.strategies.features`) on more ranks than there are GPUs, over
NCCL: ``python -m tests.gpu.features RANKS [FEATURE ...]``, in all places with so many ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.gpu.held import Check, main
from tests.runs import Outcome
from tests.strategies.features import FEATURES, PLACES, ZERO, Feature


def checks(task: argparse.Namespace) -> Iterable[Check]:
    for feature in task.features or FEATURES:
        one = FEATURES[feature]
        for place, (strategy, devices) in PLACES.items():
            if devices != task.ranks or place in one.without:
                continue
            precision, bound = ("32-true", 2e-6) if place in ZERO else ("64-true", 1e-10)

            def run(
                folder: Path,
                *,
                one: Feature = one,
                strategy: Any = strategy,
                precision: str = precision,
                num_nodes: int = 1,
                **places: Any,
            ) -> Outcome:
                return one.run(strategy if num_nodes > 1 else "single", 1, precision, num_nodes=num_nodes, **places)

            yield Check(f"{feature}, {place}", run, (feature, precision), bound, bound)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.gpu.features", description=__doc__)
    made.add_argument("ranks", type=int, help="2 to 4")
    made.add_argument("features", nargs="*", choices=[*FEATURES, []], metavar="FEATURE", help="all without")
    return made


if __name__ == "__main__":
    sys.exit(main(__spec__.name, checks, parser(), sys.argv[1:]))
