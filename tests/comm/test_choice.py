"""All ranks choose alike, by rank 0's calibration; without one nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ranks
import torch

from drivetrain.comm import choice
from drivetrain.comm.bucket_hook import ScheduledAllReduce
from drivetrain.comm.calibration import Calibration, place
from drivetrain.comm.communicator import Communicator
from drivetrain.comm.cost import CostModel, Link, predict
from drivetrain.comm.schedules import make
from drivetrain.errors import ConfigurationError

SIZES = (4e2, 4e4, 4e6)


def faster_than_native(world_size: int) -> Calibration:
    """By which trees are best for short tensors, rings for long ones, and native for none."""
    latency, bandwidth = CostModel(Link(1e-6, 1e-7)), CostModel(Link(1e-4, 1e-9))
    times = {
        "tree": {size: predict(make("tree", world_size), size, latency) for size in SIZES},
        "ring": {size: predict(make("ring", world_size), size, bandwidth) for size in SIZES},
        "native": dict.fromkeys(SIZES, 1.0),
    }
    return Calibration.of({(world_size,): times})


def used(comm: Communicator, size: int) -> str:
    """Which algorithm an automatic all-reduce takes."""
    comm.statistics.reset()
    tensor = torch.full((size,), comm.rank + 1.0)
    comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((size,), comm.world_size * (comm.world_size + 1) / 2))
    (name,) = (name for name in comm.statistics.operations if name != "plain")
    return name


def choices(comm: Communicator, folder: str) -> list[str]:
    os.environ["XDG_CACHE_HOME"] = str(Path(folder, str(comm.rank)))
    found = [used(comm, 100)]
    assert not choice.knows(comm)
    # Only rank 0 has a calibration, and another communicator asks anew.
    if comm.is_master:
        faster_than_native(comm.world_size).save(place("cpu"))
    after = comm.sub(range(comm.world_size), "after")
    assert after is not None
    found += [used(after, 100), used(after, 10**6), used(after, 100)]
    assert choice.knows(after)
    # The hook's own group takes over what is known, and sums gradients by it.
    with ScheduledAllReduce("auto", after) as hook:
        average = hook.submit(0, torch.full((10,), float(comm.rank))).wait()
        assert torch.equal(average, torch.full((10,), (comm.world_size - 1) / 2))
        found += list(hook.communicator.statistics.operations)
    if comm.is_master:
        place("cpu").write_text("{}")
    broken = comm.sub(range(comm.world_size), "broken")
    assert broken is not None
    with pytest.raises(ConfigurationError, match="rank 0 holds no calibration"):
        broken.all_reduce(torch.ones(3))
    if comm.is_master:
        place("cpu").unlink()
        place("cpu").mkdir()
    unreadable = comm.sub(range(comm.world_size), "unreadable")
    assert unreadable is not None
    with pytest.raises(ConfigurationError, match=r"calibration of rank 0 cannot be read.*calibrate again"):
        unreadable.all_reduce(torch.ones(3))
    return found


def test_rank_0_decides(tmp_path: Path) -> None:
    for found in ranks.run(choices, 3, str(tmp_path)):
        assert found == ["all_reduce", "tree", "ring", "tree", "tree"]


def hosts(comm: Communicator, names: list[str]) -> tuple[object, bool]:
    from drivetrain.comm import groups

    groups.host_name = lambda: names[comm.rank]  # type: ignore[assignment]
    schedule = choice.schedule_of("hierarchical", comm)
    return choice.ranks_per_host(comm), schedule.equals(make("hierarchical", 3, [1, 2]))


def test_a_hierarchy_follows_the_hosts() -> None:
    assert ranks.run(hosts, 3, ["a", "b", "b"]) == [((1, 2), True)] * 3
    assert ranks.run(hosts, 3, ["a", "b", "a"]) == [(None, False)] * 3
