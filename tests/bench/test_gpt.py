"""The benchmark of the strategies beside loops by hand, on the small size that CPUs train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drivetrain_plugins.bench import gpt


def test_a_row_for_each_strategy_with_what_every_turn_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "rows.json"
    words = "--strategies ddp,fsdp --devices 2 --steps 3 --warmup 1 --turns 1 --accelerator cpu --json"
    assert gpt.main([*words.split(), str(written)]) == 0
    out, err = capsys.readouterr()
    rows = {row["strategy"]: row for row in json.loads(written.read_text())["rows"]}
    assert sorted(rows) == ["ddp", "fsdp"] and [line.split()[0] for line in out.splitlines()[1:]] == ["ddp", "fsdp"]
    for name, row in rows.items():
        assert len(row["losses"]) == 4 and row["difference"] < 1e-3, row
        assert row["ours"] == [row["tokens_per_second"]] and row["theirs"] == [row["by_hand"]]
        for turn, words, speed in ((1, "ours", row["ours"]), (2, "by hand", row["theirs"])):
            assert speed[0] > 0 and f"{name}, turn {turn} of 2: {words} {speed[0]:,.0f}\n" in err
