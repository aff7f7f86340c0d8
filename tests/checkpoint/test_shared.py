"""A folder that not all ranks see is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.checkpoint.shared import refuse_unshared
from drivetrain.comm import world_communicator
from drivetrain.errors import ConfigurationError
from tests.distributed import run_ranks


def test_ranks_that_see_another_folder_are_named(tmp_path: Path) -> None:
    for name in ("all", "other"):
        (tmp_path / name).mkdir()

    def look(rank: int, world_size: int) -> str:
        communicator = world_communicator()
        refuse_unshared(tmp_path / "all", communicator)
        with pytest.raises(ConfigurationError) as refusal:  # on every rank
            refuse_unshared(tmp_path / ("all" if rank != 1 else "other"), communicator, patience=0.2)
        with pytest.raises(ConfigurationError, match="rank 0, 1, 2 does not see"):
            refuse_unshared(tmp_path / "absent", communicator, patience=0.2)
        return str(refusal.value).partition("but ")[2]

    words = run_ranks(look, 3)
    assert len(set(words)) == 1
    assert words[0].startswith("rank 1 does not see what rank 0 makes there: choose a folder")
    assert not list(tmp_path.glob("*/*")) and not list(tmp_path.glob("*/.*"))
