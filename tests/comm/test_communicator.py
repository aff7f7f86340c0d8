"""Every operation of the Communicator on 1 to 4 ranks, and its answers to misuse."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
import ranks
import torch

from drivetrain.comm.communicator import CollectiveFailed, CommunicationError, Communicator
from tests.patience import LIMIT, SOON


def exercise(comm: Communicator) -> dict[str, Any]:
    n, r = comm.world_size, comm.rank
    mine = torch.tensor([r + 1.0, 2.0 * r], dtype=torch.float64)
    results: dict[str, Any] = {"is_master": comm.is_master}
    for op in ("sum", "average", "min", "max", "product"):
        results[op] = comm.all_reduce(mine.clone(), op).tolist()  # type: ignore[arg-type]
    results["broadcast"] = comm.broadcast(mine.clone(), source=n - 1).tolist()
    results["all_gather"] = [part.tolist() for part in comm.all_gather(mine)]
    results["flat"] = comm.all_gather_flat(torch.empty(2 * n, dtype=torch.float64), mine).tolist()
    whole = torch.arange(2.0 * n) + r
    results["scatter"] = comm.reduce_scatter_flat(torch.empty(2), whole).tolist()
    results["all_plain"] = comm.all_gather_plain({"rank": r, "name": "ü" * r})
    results["plain"] = comm.gather_plain([r] * r, destination=n - 1)
    comm.barrier(timeout=LIMIT)
    results["bytes"] = comm.statistics.operations["all_reduce"].bytes_sent if n > 1 else 0
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives(world_size: int) -> None:
    n = world_size
    rows = [[r + 1.0, 2.0 * r] for r in range(n)]
    for r, result in enumerate(ranks.run(exercise, n)):
        assert result["is_master"] == (r == 0)
        assert result["sum"] == [sum(column) for column in zip(*rows, strict=True)]
        assert result["average"] == [sum(column) / n for column in zip(*rows, strict=True)]
        assert result["min"] == rows[0] and result["max"] == rows[-1]
        assert result["product"] == [float(torch.tensor(c).prod()) for c in zip(*rows, strict=True)]
        assert result["broadcast"] == rows[-1]
        assert result["all_gather"] == rows
        assert result["flat"] == [value for row in rows for value in row]
        assert result["scatter"] == [n * (2 * r + i) + n * (n - 1) / 2 for i in range(2)]
        assert result["all_plain"] == [{"rank": i, "name": "ü" * i} for i in range(n)]
        assert result["plain"] == ([[i] * i for i in range(n)] if r == n - 1 else None)
        assert result["bytes"] == 5 * (2 * 16 * (n - 1) // n)


def test_world_of_one_needs_no_process_group() -> None:
    comm = Communicator()
    result = exercise(comm)
    assert result["all_gather"] == [[1.0, 0.0]] and result["plain"] == [[]]
    assert comm.statistics.bytes_sent == 0
    with pytest.raises(CommunicationError, match="no peer 1"):
        comm.send(torch.ones(1), 1)
    with pytest.raises(CommunicationError, match="no op 'mean'"):
        comm.all_reduce(torch.ones(1), "mean")  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match="not exact"):
        comm.all_reduce(torch.ones(1, dtype=torch.int64), "average")
    with pytest.raises(CommunicationError, match="rising ranks"):
        comm.sub([1], "pair")
    sub = comm.sub([0], "alone")
    assert sub is not None and sub.world_size == 1


def pass_around(comm: Communicator) -> tuple[float, float, int, int]:
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    received = torch.empty(4)
    sending = comm.isend(torch.full((4,), float(comm.rank)), right, tag=7)
    comm.irecv(received, left, tag=7).wait()
    sending.wait()
    again = torch.empty(4)
    if comm.rank == 0:
        comm.send(received, right)
        comm.recv(again, left)
    else:
        comm.recv(again, left)
        comm.send(received, right)
    traffic = comm.statistics
    assert traffic.seconds > 0
    return received[0].item(), again[0].item(), traffic.bytes_sent, traffic.messages


def test_point_to_point_and_traffic() -> None:
    assert ranks.run(pass_around, 3) == [(2.0, 1.0, 32, 2), (0.0, 2.0, 32, 2), (1.0, 0.0, 32, 2)]


def groups(comm: Communicator) -> list[Any]:
    last_two = comm.sub([1, 2], "last two")
    nested = comm.sub([0, 2], "ends")
    total = None if last_two is None else last_two.all_reduce(torch.tensor([float(comm.rank)])).item()
    place = None if nested is None else (nested.rank, nested.world_size, nested.label)
    return [total, place]


def test_sub_groups() -> None:
    assert ranks.run(groups, 3) == [[None, (0, 2, "ends")], [3.0, None], [3.0, (1, 2, "ends")]]


def refuse_plain(comm: Communicator) -> str:
    with pytest.raises(CommunicationError) as caught:
        comm.all_gather_plain({1, 2} if comm.rank == 1 else [1])
    comm.barrier(timeout=LIMIT)
    return str(caught.value)


def test_data_that_is_not_plain_is_refused_on_every_rank() -> None:
    for message in ranks.run(refuse_plain, 2):
        assert message.startswith("the data of rank 1 in group 'world' is not plain")


def late(comm: Communicator) -> tuple[float, str]:
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None
    started = time.monotonic()
    message = ""
    if comm.rank == 0:
        with pytest.raises(CommunicationError) as caught:
            own.barrier(timeout=0.3)
        message = str(caught.value)
    waited = time.monotonic() - started
    comm.barrier(timeout=LIMIT)
    return waited, message


def test_barrier_times_out_and_other_groups_live_on() -> None:
    waited, message = ranks.run(late, 2)[0]
    assert waited < SOON and "rank 0 waited" in message and "'own'" in message


def abort_while_waiting(comm: Communicator) -> tuple[float, bool, float]:
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None
    errors: list[BaseException] = []
    seconds = 0.0
    if comm.rank == 0:

        def block() -> None:
            try:
                own.recv(torch.empty(1), comm.world_size - 1)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=block)
        thread.start()
        time.sleep(0.2)
        started = time.monotonic()
        own.abort()
        thread.join(LIMIT)
        seconds = time.monotonic() - started
    total = comm.all_reduce(torch.ones(1)).item()
    return seconds, bool(errors), total


def broken(comm: Communicator) -> str:
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None
    own.all_reduce(torch.ones(2))
    if comm.rank == 1:
        own.abort()
        comm.barrier()
        return ""
    said = []
    for operation in (
        lambda: own.all_reduce(torch.ones(2), algorithm="native"),
        lambda: own.all_reduce(torch.ones(2), algorithm="ring"),
        lambda: own.broadcast(torch.ones(2), 1),
        lambda: own.all_gather_plain(1),
    ):
        with pytest.raises(CollectiveFailed) as caught:
            operation()
        said.append(str(caught.value))
    comm.barrier()
    return "\n".join(said)


def test_a_collective_that_breaks_says_so_in_a_sentence() -> None:
    first, *others = ranks.run(broken, 2)[0].splitlines()
    assert first.startswith("all_reduce on rank 0 of group 'own' lost another rank (") and "gloo" not in first
    assert [line.split()[0] for line in others] == ["all_reduce", "broadcast", "all_gather_plain"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_abort_wakes_a_blocked_thread_and_spares_other_groups(world_size: int) -> None:
    results = ranks.run(abort_while_waiting, world_size)
    assert results[0][0] < 0.5 and results[0][1]
    assert [total for _, _, total in results] == [world_size] * world_size


def crowded(comm: Communicator) -> list[str]:
    """What a second thread hears while the first waits in an operation of the same group; then both take turns."""
    own = comm.split(0)
    assert own is not None
    sums = []

    def work() -> None:
        sums.append(own.all_reduce(torch.ones(1)).item())

    first = threading.Thread(target=work)
    said = []
    if comm.rank == 0:
        first.start()
        while own.entered.acquire(blocking=False):  # until the thread has it
            own.entered.release()
            time.sleep(0.01)
        for call in (lambda: own.all_reduce(torch.ones(1)), lambda: own.all_gather_object(1), lambda: own.split(0)):
            with pytest.raises(CommunicationError) as caught:
                call()
            said.append(str(caught.value))
        comm.barrier(LIMIT)
    else:
        comm.barrier(LIMIT)
        first.start()
    first.join(LIMIT)
    assert sums == [2.0] and own.all_reduce(torch.ones(1)).item() == 2.0
    return said


def test_two_threads_in_one_group_are_told() -> None:
    said = ranks.run(crowded, 2)[0]
    assert len(said) == 3 and all("give each thread a communicator of its own" in each for each in said)
    assert said[0].startswith("all_reduce on rank 0") and said[2].startswith("split on rank 0")


def test_a_communicator_of_one_rank_travels() -> None:
    again = pickle.loads(pickle.dumps(Communicator(label="mine")))
    assert again.label == "mine" and again.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
