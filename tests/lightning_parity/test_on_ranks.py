"""Projects on two ranks, and on one: Lightning's ``ddp`` over Gloo and drivetrain's, rank by rank."""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch.distributed as dist

import drivetrain.lightning
from tests.distributed import run_ranks
from tests.lightning_parity import on_ranks
from tests.lightning_parity.comparison import differences, unexpected
from tests.lightning_parity.laboratory import run
from tests.ports import free_port

NAMES = sorted(found.name for found in pkgutil.iter_modules(on_ranks.__path__))


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("name", NAMES)
def test_same_figures_on_ranks(name: str, ranks: int, tmp_path: Path) -> None:
    module = importlib.import_module(f"{on_ranks.__name__}.{name}")

    def both(rank: int, world_size: int) -> dict[str, str]:
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
        of_torchrun |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in of_torchrun.items()}, TORCHELASTIC_RUN_ID="test")

        def settled() -> None:
            if world_size > 1:  # drivetrain makes no group for one
                dist.barrier()

        options: dict[str, Any] = {"strategy": "ddp", "devices": world_size, "settled": settled}
        theirs = run(module.project, lightning.pytorch, tmp_path / "there", **options)
        dist.barrier()
        dist.destroy_process_group()  # Lightning takes the group that is there, drivetrain makes its own
        return differences(theirs, run(module.project, drivetrain.lightning, tmp_path / "here", **options))

    port = free_port()
    found: dict[str, str] = {}
    for rank, lines in enumerate(run_ranks(both, ranks)):
        found |= {name: f"rank {rank}: {line}" for name, line in lines.items()}
    lines = unexpected(found, getattr(module, "DIFFERENCES", {}) if ranks > 1 else {})
    assert not lines, "\n" + "\n".join(lines)
