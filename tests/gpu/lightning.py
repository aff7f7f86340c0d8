"""The projects of :mod:`tests.lightning_parity` on a GPU, under Lightning and under drivetrain: ``python -m
tests.gpu.lightning [PROJECT ...]``. Each line says where they differ beyond what the project declares; the command ends
with the number of projects that agree, and fails where one does not.

A project that fails under Lightning as well, because it makes tensors on the CPU say, is named and not counted.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is initialised: sums in one order

import lightning.pytorch
import torch

import drivetrain.lightning
from tests.lightning_parity import modules
from tests.lightning_parity.comparison import differences, unexpected
from tests.lightning_parity.laboratory import run


def compared(name: str, folder: Path) -> list[str] | None:
    """Where the libraries differ; None where Lightning does not run the project on a GPU."""
    module = importlib.import_module(f"{modules.__name__}.{name}")
    try:
        theirs = run(module.project, lightning.pytorch, folder / "there", accelerator="gpu")
    except Exception as error:
        print(f"{name}: not on a GPU under Lightning: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        return None
    try:
        ours = run(module.project, drivetrain.lightning, folder / "here", accelerator="gpu")
    except Exception:
        return traceback.format_exc().splitlines()[-6:]
    return unexpected(differences(theirs, ours), getattr(module, "DIFFERENCES", {}))


def main(names: list[str]) -> int:
    if not torch.cuda.is_available():
        print("There is no GPU: run this on a machine that has one.", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    counts = {"agree": 0, "differ": 0, "not there": 0}
    for name in names or sorted(found.name for found in pkgutil.iter_modules(modules.__path__)):
        with tempfile.TemporaryDirectory() as folder:
            lines = compared(name, Path(folder))
        counts["not there" if lines is None else "differ" if lines else "agree"] += 1
        for line in lines or []:
            print(f"{name}: {line}")
    print(
        f"{counts['agree']} projects agree, {counts['differ']} differ, {counts['not there']} are for CPUs", flush=True
    )
    return int(counts["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
