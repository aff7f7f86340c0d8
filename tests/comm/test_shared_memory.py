"""Schedules through memory that ranks of one host share: who may, what a lost rank does, and that nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

from drivetrain.comm import meeting
from drivetrain.comm.communicator import CollectiveFailed, CommunicationError, Communicator
from drivetrain.comm.execute import Executor
from drivetrain.comm.schedules import chain, recursive_doubling, ring
from drivetrain.comm.shared_memory import SLOT_BYTES, SLOTS
from tests.patience import SOON

LONG = 8 * SLOTS * SLOT_BYTES // 4  # elements: many times what the slots hold


def summed(comm: Communicator, numel: int = 1000) -> bool:
    """Whether the ranks' sum is right, and went through memory."""
    tensor = torch.full((numel,), float(comm.rank + 1))
    Executor(ring(comm.world_size), comm)(tensor)
    assert torch.equal(tensor, torch.full_like(tensor, comm.world_size * (comm.world_size + 1) / 2))
    return comm.links is not None


# -- who may ------------------------------------------------------------------------------------------------------
def long_messages(comm: Communicator) -> bool:
    return summed(comm, LONG) and summed(comm, LONG + 1)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_more_messages_than_slots(world_size: int) -> None:
    assert all(ranks.run(long_messages, world_size))


def switched_off_on_one(comm: Communicator) -> bool:
    os.environ[meeting.SWITCH] = "0" if comm.rank == 1 else "1"
    return summed(comm)


def without_memory_on_one(comm: Communicator) -> bool:
    def refuse(*arguments: object) -> int:
        raise OSError("no memory today")

    if comm.rank == 1:
        os.memfd_create = refuse
    return summed(comm)


def with_a_long_path(comm: Communicator) -> bool:
    meeting._LONGEST_PATH = 10 if comm.rank == 0 else 100
    return summed(comm)


def in_a_group_too_large(comm: Communicator) -> bool:
    meeting._MOST = comm.world_size - 1
    return summed(comm)


@pytest.mark.parametrize("case", [switched_off_on_one, without_memory_on_one, with_a_long_path, in_a_group_too_large])
def test_what_one_rank_cannot_do_none_does(case: object) -> None:
    assert ranks.run(case, 3) == [False] * 3


# -- a rank is gone -------------------------------------------------------------------------------------------------
def survive(comm: Communicator, folder: Path) -> None:
    """The last rank dies in the midst; the others write down how long it took to know, and what they were told."""
    assert summed(comm)
    if comm.rank == comm.world_size - 1:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(CollectiveFailed) as error:
        Executor(ring(comm.world_size), comm)(torch.ones(LONG))
    (folder / f"{comm.rank}.txt").write_text(f"{time.monotonic() - began} {error.value}")
    os._exit(1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_death_is_told_at_once(world_size: int, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a result"):
        ranks.run(survive, world_size, tmp_path)
    for rank in range(world_size - 1):
        seconds, said = (tmp_path / f"{rank}.txt").read_text().split(" ", 1)
        assert float(seconds) < SOON and f"rank {rank} lost rank {world_size - 1} of group 'world'" in said


def linger(told: Path) -> None:
    until = time.monotonic() + SOON
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.01)


def outlived(comm: Communicator, folder: Path) -> None:
    """A process that the last rank forked, as loaders do, lives on when the rank has died."""
    assert summed(comm)
    if comm.rank == 1:
        multiprocessing.get_context("fork").Process(target=linger, args=(folder / "told",)).start()
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(CollectiveFailed):
        Executor(ring(2), comm)(torch.ones(5))
    (folder / "told").write_text(str(time.monotonic() - began))


def test_a_death_is_told_while_a_fork_lives(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a result"):
        ranks.run(outlived, 2, tmp_path)
    assert float((tmp_path / "told").read_text()) < SOON


def a_last_word(comm: Communicator) -> bool:
    """A rank that has sent all and ends has lost nothing of it."""
    assert summed(comm)
    if comm.rank == 1:
        time.sleep(0.5)  # so that the other has filled the slots, and is gone
    tensor = torch.arange(8.0) if comm.rank == 0 else torch.zeros(8)
    Executor(chain(2, "broadcast"), comm)(tensor)
    if comm.rank == 0:
        assert comm.links is not None
        comm.links.close()
    return torch.equal(tensor, torch.arange(8.0))


def test_what_was_sent_before_the_end_arrives() -> None:
    assert ranks.run(a_last_word, 2) == [True, True]


def late(comm: Communicator, of_its_own: bool) -> str:
    """What a rank is told that waits longer than the communicator, or the group of somebody's own, lets it."""
    patience = timedelta(seconds=2)
    hasty = Communicator(comm.group, label="hasty", timeout=patience)
    if of_its_own:
        hasty = Communicator(dist.new_group(timeout=patience), label="hasty")
    assert summed(hasty)
    if comm.rank == 1:
        time.sleep(5)
        return ""
    with pytest.raises(CollectiveFailed) as error:
        Executor(ring(2), hasty)(torch.ones(5))
    return str(error.value)


@pytest.mark.parametrize("of_its_own", [False, True])
def test_patience_ends(of_its_own: bool) -> None:
    said, _ = ranks.run(late, 2, of_its_own)
    assert "rank 0 lost rank 1 of group 'hasty' (timed out after 2 s)" in said


def too_late(comm: Communicator) -> tuple[str, str]:
    """The first rank gives up and goes on; what the late one finds in its slots is of what failed."""
    patient = Communicator(comm.group, label="hasty", timeout=timedelta(seconds=1))
    assert summed(patient)
    if comm.rank == 1:
        time.sleep(2)
    said = []
    for value in (1.0, 10.0):
        with pytest.raises(CollectiveFailed) as error:
            Executor(ring(2), patient)(torch.full((5,), value))
        said.append(str(error.value))
    return said[0], said[1]


def test_what_failed_is_not_taken_for_what_follows() -> None:
    (first, again), (late, _) = ranks.run(too_late, 2)
    assert "timed out" in first and "make a new group" in again and "lost rank 0" in late


UNLIKE = {
    "longer": lambda rank: (3 + rank, torch.float32, "sum", "ring"),
    "many segments": lambda rank: (3_000_000 + 100 * rank, torch.float32, "sum", "ring"),
    "as many bytes": lambda rank: (8 // (1 + rank), (torch.float32, torch.float64)[rank], "sum", "ring"),
    "another operation": lambda rank: (4, torch.float32, ("sum", "max")[rank], "ring"),
    "another way": lambda rank: (4, torch.float32, "sum", ("ring", "recursive_doubling")[rank]),
}


def unlike(comm: Communicator, case: str) -> str:
    group = comm.split(0)
    assert group is not None
    numel, dtype, op, algorithm = UNLIKE[case](comm.rank)
    try:
        group.all_reduce(torch.ones(numel, dtype=dtype), op, algorithm)  # type: ignore[arg-type]
    except CommunicationError as error:
        said = str(error)
    else:
        said = "nothing"
    comm.barrier()  # who left first would be lost to the other
    return said


@pytest.mark.parametrize("case", UNLIKE)
def test_ranks_that_do_not_do_the_same_are_told(case: str) -> None:
    for rank, said in enumerate(ranks.run(unlike, 2, case)):
        assert "the ranks do not do the same" in said and f"rank {1 - rank}: " in said, said


def of_any_mode(comm: Communicator) -> None:
    """Values travel of tensors with and without a history, and of those made for inference, whatever came first."""
    own = comm.sub(range(2), "own")
    assert own is not None
    for schedule in (recursive_doubling(2), chain(2, "broadcast")):
        executor = Executor(schedule, own)
        with torch.inference_mode():
            made = executor(torch.ones(LONG))
        leaf = torch.ones(LONG, requires_grad=True)
        for tensor in (torch.ones(LONG), made, leaf, leaf * 1):
            executor(tensor)
        assert bool((leaf == made / (2 if schedule.kind == "all_reduce" else 1)).all())
    assert own.links is not None and own.links.links[1 - comm.rank].outgoing.grad_fn is None


def test_values_travel_in_any_mode() -> None:
    ranks.run(of_any_mode, 2)


def aborted(comm: Communicator) -> tuple[str, float]:
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None and summed(own)
    if comm.rank == 0:
        threading.Timer(0.3, own.abort).start()
    else:
        time.sleep(0.6)  # the first one waits for this one when it is aborted
    began = time.monotonic()
    with pytest.raises(CollectiveFailed) as error:
        Executor(ring(comm.world_size), own)(torch.ones(5))
    return str(error.value), time.monotonic() - began


def test_who_waits_can_be_woken() -> None:
    (first, took), (second, at_once) = ranks.run(aborted, 2)
    assert "the group was aborted" in first and "lost rank 0" in second
    assert took < SOON and at_once < SOON


# -- what is left ---------------------------------------------------------------------------------------------------
def opened(comm: Communicator) -> tuple[int, int, int]:
    """Files that are open before, while and after a communicator shares memory, which knows executors of its own."""
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None
    own.all_reduce(torch.ones(1), algorithm="native")
    before = len(os.listdir("/proc/self/fd"))
    assert summed(own)
    own.all_reduce(torch.ones(5), algorithm="tree")
    between = len(os.listdir("/proc/self/fd"))
    del own
    gc.collect()
    return before, between, len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # its path has room for sockets, as tmp_path may not
        monkeypatch.setattr(tempfile, "tempdir", folder)
        for before, between, after in ranks.run(opened, 3):
            assert before + 2 * 2 <= between and after <= before
        assert os.listdir(folder) == [], "and no folder"
        monkeypatch.undo()
