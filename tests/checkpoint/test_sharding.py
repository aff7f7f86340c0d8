"""Saved by several ranks, loaded by another number of them, whatever the sharding."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from drivetrain.checkpoint import consolidate, find, load, save, weights_digest
from drivetrain.errors import CheckpointError

from .ranks import GlooCommunicator, run_ranks

SHAPES = {"matrix": (7, 3), "vector": (5,), "short": (1, 4), "empty": (0, 2)}


def full_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return state | {"step": torch.tensor(3.0), "count": torch.arange(4)}


def sharded(values: dict[str, torch.Tensor], world_size: int) -> dict[str, torch.Tensor]:
    """Every tensor of the table over the ranks, as FSDP would: rows, unevenly; the rest is replicated."""
    mesh = init_device_mesh("cpu", (world_size,))
    return {k: distribute_tensor(v, mesh, [Shard(0)]) if k in SHAPES else v for k, v in values.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicated_on_many_loads_on_one(world_size: int, tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> list[str]:
        shared = {"state_dict": full_state(), "epoch": 4}
        path = save(tmp_path / "c", shared, {"rank": rank}, communicator=GlooCommunicator())
        back = load(path, rank=rank, world_size=world_size)
        assert back.own == {"rank": rank}
        return [str(path), weights_digest(back.shared["state_dict"])]

    expected = weights_digest(full_state())
    assert run_ranks(rank_main, world_size) == [[str(tmp_path / "c"), expected]] * world_size
    back = load(tmp_path / "c")
    assert weights_digest(back.shared["state_dict"]) == expected
    assert (back.own, back.shared["epoch"], back.meta["world_size"]) == (None, 4, world_size)
    tensor_bytes = sum(v.numel() * v.element_size() for v in full_state().values())
    files = list((tmp_path / "c" / "weights").glob("*.distcp"))
    assert sum(file.read_bytes().count(b"archive/data/0") for file in files) >= 1
    assert len(files) == world_size, "the work of writing is shared out"
    assert sum(file.stat().st_size for file in files) < tensor_bytes + 2500 * len(full_state()), "written once"


def test_sharded_on_two_loads_whole_on_one_and_resharded_on_three(tmp_path: Path) -> None:
    def write(rank: int, world_size: int) -> str:
        state = sharded(full_state(), world_size)
        save(tmp_path / "c", {"state_dict": state, "x": rank}, {"r": rank}, communicator=GlooCommunicator())
        return weights_digest(state)

    expected = weights_digest(full_state())
    assert run_ranks(write, 2) == [expected, expected]
    assert weights_digest(consolidate(tmp_path / "c")) == expected
    assert torch.equal(consolidate(tmp_path / "c")["count"], torch.arange(4))

    def read(rank: int, world_size: int, columns: bool) -> list[Any]:
        mesh = init_device_mesh("cpu", (world_size,))
        placement: list[Placement] = [Shard(1) if columns else Shard(0)]
        template = {
            name: distribute_tensor(
                torch.zeros(shape, dtype=torch.float64), mesh, placement if len(shape) > 1 else [Replicate()]
            )
            for name, shape in SHAPES.items()
        }
        back = load(tmp_path / "c", rank=rank, world_size=world_size, template={"state_dict": template})
        state = back.shared["state_dict"]
        assert all(isinstance(state[name], DTensor) for name in SHAPES)
        assert state["matrix"].to_local() is template["matrix"].to_local() or torch.equal(
            state["matrix"].to_local(), template["matrix"].to_local()
        )
        return [weights_digest(state), weights_digest(template | {"step": state["step"]}), back.own, back.shared["x"]]

    for columns in (False, True):
        assert run_ranks(read, 3, columns) == [[expected, expected, None, 0]] * 3


def test_two_dimensions_of_sharding(tmp_path: Path) -> None:
    value = torch.arange(35.0).reshape(5, 7)

    def write(rank: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        state = {
            "w": distribute_tensor(value, mesh, [Replicate(), Shard(1)]),
            "v": distribute_tensor(value, mesh, [Shard(0), Shard(1)]),
        }
        save(tmp_path / "c", {"state_dict": state}, {}, communicator=GlooCommunicator())

    run_ranks(write, 4)
    assert torch.equal(consolidate(tmp_path / "c")["w"], value)
    assert torch.equal(consolidate(tmp_path / "c")["v"], value)


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    def attempt(rank: int, world_size: int, case: str) -> str:
        shared: dict[str, Any] = {"state_dict": full_state()}
        own: dict[str, Any] = {"noise": torch.zeros(10)}
        if rank == 1 and case == "unkeepable":
            own["hook"] = print
        if rank == 1 and case == "disk full":
            own["noise"] = torch.zeros(100_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == 1 and case == "other shape":
            shared["state_dict"]["matrix"] = torch.zeros(2, 2)
        if rank == 1 and case == "other names":
            shared["state_dict"]["extra"] = torch.zeros(2, 2)
        if case == "partial":
            mesh = init_device_mesh("cpu", (world_size,))
            shared["sum"] = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        try:
            save(tmp_path / "c", shared, own, communicator=GlooCommunicator())
        except CheckpointError as error:
            return str(error)
        return "no error"

    expected = {
        "unkeepable": "rank 1: cannot keep hook",
        "other shape": "holds 'state_dict/matrix' as float32 [2, 2]",
        "other names": "do not save the same tensors ('state_dict/extra' is missing on one side)",
        "partial": "rank 0: cannot keep sum: a partial DTensor",
        "disk full": "rank 1: File too large",
    }

    def rank_main(rank: int, world_size: int) -> list[Any]:
        save(tmp_path / "c", {"version": 1}, {}, communicator=GlooCommunicator())
        attempts = []
        for case in expected:
            message = attempt(rank, world_size, case)
            dist.barrier()  # rank 0 has cleaned up when it raises; look only then
            attempts.append([message, [child.name for child in tmp_path.iterdir()]])
            dist.barrier()
        return attempts

    both = run_ranks(rank_main, 2)
    assert both[0] == both[1]
    for (case, part), (first, names) in zip(expected.items(), both[0], strict=True):
        assert f"the checkpoint {tmp_path / 'c'} was not saved: " in first and part in first, first
        assert "\n" not in first
        assert names == ["c"], case
    assert load(tmp_path / "c").shared == {"version": 1}


def test_an_unwritable_folder_is_raised_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    def rank_main(rank: int, world_size: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "file" / "c", {"x": 1}, {}, communicator=GlooCommunicator())
        return str(caught.value)

    first, second = run_ranks(rank_main, 2)
    assert first == second
    assert "was not saved: rank 0: " in first


def test_rank_0_killed_while_saving_keeps_the_old_one(tmp_path: Path) -> None:
    """The survivor's collective fails (the launcher ends it); what was complete stays complete."""
    path = tmp_path / "c"

    def rank_main(rank: int, world_size: int) -> None:
        communicator = GlooCommunicator()
        save(path, {"w": torch.zeros(100_000), "version": 1}, {}, communicator=communicator)
        dist.barrier()
        if rank == 0:
            real = torch.save

            def deadly(*args: Any, **kwargs: Any) -> None:
                real(*args, **kwargs)
                signal.raise_signal(signal.SIGKILL)

            torch.save = deadly
        save(path, {"w": torch.ones(100_000), "version": 2}, {}, communicator=communicator)

    with pytest.raises(AssertionError, match="rank"):
        run_ranks(rank_main, 2)
    back = load(path)
    assert back.shared["version"] == 1 and not back.shared["w"].any()
    assert find.resolve("auto", tmp_path) == path
    save(tmp_path / "d", {}, {})
    assert sorted(child.name for child in tmp_path.iterdir()) == ["c", "d"]
