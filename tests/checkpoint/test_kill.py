"""SIGKILL at any instant leaves the complete old checkpoint or the complete new one."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import find, load, save

from . import ranks  # noqa: F401  keeps torch at one thread, so that forking is safe

NUMBERS = 10_000_000  # 40 MB


def write(path: Path, weights: torch.Tensor, version: int) -> None:
    weights.fill_(version)
    save(path, {"w": weights, "version": version}, {"version": version}, meta={"global_step": version})
    find.point_last(path.parent, path.name)


def check(path: Path) -> int:
    """The version of the checkpoint, which must be the same all through it."""
    state = load(path)
    version = state.shared["version"]
    assert state.own == {"version": version} and state.meta["global_step"] == version
    assert torch.equal(state.shared["w"], torch.full((NUMBERS,), float(version)))
    return version


def test_random_kills_while_saving_over_one_name(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    chance = random.Random(5)
    weights = torch.zeros(NUMBERS)
    began = time.monotonic()
    write(path, weights, 1)
    long = 5 * (time.monotonic() - began)  # some kills hit the first save, others come after several
    versions = [1]
    left_behind = 0
    for number in range(60):
        if number >= 8 and left_behind and max(versions) > 1:
            break
        pid = os.fork()
        if pid == 0:
            for version in itertools.count(versions[-1] + 1):
                write(path, weights, version)
        try:
            time.sleep(chance.uniform(0, long * (1 + number // 8)))  # a busy machine finishes fewer saves
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        versions.append(check(path))
        assert find.newest(tmp_path) == find.last(tmp_path) == path
        left_behind += any(child.name.startswith(".") for child in tmp_path.iterdir())
    assert versions == sorted(versions)
    assert left_behind > 0, "no kill ever hit a save: the test proves nothing"
    assert max(versions) > 1, "no save ever finished: the test proves little"
    save(tmp_path / "two.ckpt", {}, {})
    assert sorted(child.name for child in tmp_path.iterdir()) == ["last.ckpt", "one.ckpt", "two.ckpt"]


class Deadly(dict[str, Any]):
    """Kills its process when it is converted, or at a chosen file operation."""

    def items(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_at(call: str, path: Path, count: int) -> bool:
    """Save version 2 in a child that kills itself at the ``count``-th ``os.<call>``; whether it got there."""
    pid = os.fork()
    if pid == 0:
        real = getattr(os, call)
        left = [count]

        def deadly(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, call, deadly)
        save(path, {"version": 2}, {})
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("call", ["fsync", "rename", "open", "mkdir"])
def test_kill_at_every_file_operation(call: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    count, seen = 1, set()
    save(path, {"version": 1}, {})
    while killed_at(call, path, count):
        seen.add(load(path).shared["version"])
        save(path, {"version": 1}, {})
        assert [child.name for child in tmp_path.iterdir()] == ["c"]
        count += 1
    assert load(path).shared == {"version": 2}
    assert count > 1 or call == "rename", "the call is never made"
    assert seen <= {1, 2}


def test_kill_inside_conversion(tmp_path: Path) -> None:
    save(tmp_path / "c", {"version": 1}, {})
    pid = os.fork()
    if pid == 0:
        save(tmp_path / "c", {"version": 2, "bad": Deadly(a=1)}, {})
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert load(tmp_path / "c").shared == {"version": 1}


def test_kill_inside_pickling(tmp_path: Path) -> None:
    save(tmp_path / "c", {"version": 1}, {})
    pid = os.fork()
    if pid == 0:
        real = torch.save

        def half(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            real(obj, file, *args, **kwargs)
            if file.name.endswith("state.pt"):
                file.truncate(20)
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = half
        save(tmp_path / "c", {"version": 2}, {})
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert load(tmp_path / "c").shared == {"version": 1}
    assert find.resolve("auto", tmp_path) == tmp_path / "c"
    assert any(child.name.startswith(".c.") for child in tmp_path.iterdir())
    save(tmp_path / "d", {}, {})
    assert sorted(child.name for child in tmp_path.iterdir()) == ["c", "d"]
