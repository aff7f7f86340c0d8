"""Messages between two ranks and from any, plain objects, groups made from groups, barriers that name the missing."""

from __future__ import annotations

import math
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist

from drivetrain.comm import groups
from drivetrain.comm.communicator import CommunicationError, Communicator, PeerLost
from drivetrain.comm.plain import decode, encode
from drivetrain.launch import Job
from tests.launch.programs import wait_for
from tests.patience import LIMIT, SOON

# -- point to point -------------------------------------------------------------------------------------------------


def pairs(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    sent: list[Any] = [
        torch.full((3, 2), comm.rank + 0.5).t(), np.arange(4)[::-1] + comm.rank, torch.tensor(comm.rank),
        torch.empty(0), torch.full((2,), 1.5, dtype=torch.bfloat16), torch.tensor([True, False]), np.arange(2) < 5,
    ]  # fmt: skip
    into: list[Any] = [
        torch.empty(3, 2).t(), np.zeros(4, dtype=np.int64)[::-1], torch.tensor(-1), torch.empty(0),
        torch.empty(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bool), np.zeros(2, dtype=bool),
    ]  # fmt: skip
    receiving = [comm.irecv(each, left, tag=3) for each in into]
    sending = comm.isend(sent, right, tag=3)
    assert all(handle.wait() is each for handle, each in zip(receiving, into, strict=True))
    assert all(a is b for a, b in zip(sending.wait(), sent, strict=True))
    assert into[0].tolist() == [[left + 0.5] * 3] * 2 and into[1].tolist() == [3 + left, 2 + left, 1 + left, left]
    assert into[2].item() == left and into[4].tolist() == [1.5] * 2 and into[5].tolist() == [True, False]
    assert into[6].all()
    listed = [torch.empty(2), np.empty(3)]
    what = [torch.full((2,), float(comm.rank)), np.full(3, float(comm.rank))]
    if comm.rank == 0:
        comm.send(what, right)
        comm.recv(listed, left)
    else:
        comm.recv(listed, None)
        assert comm.last_source == left
        comm.send(what, right)
    assert [one.tolist() for one in listed] == [[left] * 2, [left] * 3]
    comm.barrier(LIMIT)
    comm.close()


def from_any(comm: Communicator) -> Any:
    """Rank 0 hears the others in whatever order; every message once, those of one rank in order."""
    n, rounds = comm.world_size, 20
    own = comm.sub(range(n), "own")
    assert own is not None
    if own.rank > 0:
        for number in range(rounds):
            own.send(torch.tensor([own.rank, number]), 0)
        comm.barrier(LIMIT)
        own.send(torch.tensor([own.rank, -1]), 0)
        own.send_object({"rank": own.rank}, 0)
        for _ in range(3):
            own.send(torch.tensor([own.rank]), 0, tag=1)
            comm.barrier(LIMIT)
        own.send(torch.tensor([3]), 0, tag=1)
        comm.barrier(LIMIT)
        own.close()
        return None
    threads = threading.active_count()
    heard: list[list[int]] = [[] for _ in range(n)]
    message = torch.empty(2, dtype=torch.int64)
    for _ in range((n - 1) * rounds):
        own.recv(message)
        assert message[0].item() == own.last_source
        heard[int(message[0])].append(int(message[1]))
    comm.barrier(LIMIT)
    # A named source is heard too where a receive from any had been posted for it.
    for source in range(n - 1, 0, -1):
        assert own.recv(message, source).tolist() == [source, -1] and own.last_source == source
    own.recv_object(2)
    assert [own.recv_object()["rank"] == own.last_source for _ in range(n - 2)] == [True] * (n - 2)
    _claimed(comm, own)
    with pytest.raises(CommunicationError, match="another tag") as error:
        _other_size(own)
    comm.barrier(LIMIT)
    own.close()
    assert threading.active_count() == threads
    return [heard, str(error.value)]


def _claimed(comm: Communicator, own: Communicator) -> None:
    """A receive of a named source that is waited for later takes the message for which one from any was posted, and
    those after it stay in order."""
    n = comm.world_size
    one = torch.empty(1, dtype=torch.int64)
    assert sorted(own.recv(one, tag=1).item() for _ in range(n - 1)) == [*range(1, n)]
    comm.barrier(LIMIT)
    # The last of these left a receive posted for each rank but its own.
    boxes = [[torch.empty(1, dtype=torch.int64) for _ in range(3)] for _ in range(1, n)]
    handles = [[own.irecv(box, rank, tag=1) for box in boxes[rank - 1]] for rank in range(1, n)]
    for _ in range(2):
        comm.barrier(LIMIT)
    for of_rank in handles:
        for handle in reversed(of_rank):
            handle.wait()
    assert [[box.item() for box in of_rank] for of_rank in boxes] == [[rank, rank, 3] for rank in range(1, n)]


def _other_size(own: Communicator) -> None:
    """A receive of two numbers waits for each rank; one of three may not be asked for under the same tag."""
    own.arrivals._inboxes[0].post_all(16)
    own.recv(torch.empty(3))


def test_messages_between_two_ranks() -> None:
    ranks.run(pairs, 3)


def test_messages_from_any_rank() -> None:
    heard, said = ranks.run(from_any, 4)[0]
    assert heard == [[], *[list(range(20))] * 3]
    assert "a receive of 16 bytes from any rank waits for rank 1 under tag 0" in said


def survivors(comm: Communicator, folder: Path) -> None:
    """Rank 1 sends a message and dies; rank 0 hears the message, then of the death, then the others."""
    if comm.rank == 1:
        comm.send(torch.tensor([1.0]), 0)
        time.sleep(0.2)
        os._exit(1)
    if comm.rank == 2:
        wait_for(folder / "told")
        comm.send(torch.tensor([2.0]), 0)
        wait_for(folder / "log")
        os._exit(1)
    message = torch.empty(1)
    log: list[Any] = [(comm.recv(message).item(), comm.last_source)]
    with pytest.raises(PeerLost) as error:
        comm.recv(message)
    (folder / "told").touch()
    log.append(error.value.rank)
    log.append((comm.recv(message).item(), comm.last_source))
    comm.close()
    log.append((threading.active_count(), str(error.value)))
    (folder / "log").write_text(repr(log))
    os._exit(1)


def test_a_death_is_told_with_the_rank_and_the_others_are_heard(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a result"):
        ranks.run(survivors, 3, tmp_path)
    log = eval((tmp_path / "log").read_text())
    assert log[:3] == [(1.0, 1), 1, (2.0, 2)]
    assert log[3][0] == 1 and "rank 0 lost rank 1 of group 'world'" in log[3][1]


# -- plain objects --------------------------------------------------------------------------------------------------
SAMPLES: list[Any] = [
    None, True, 7, -1.5, math.inf, "ü\n", [], {}, (), [1, (2, [3])], {"a": {1: None, None: "x", 2.5: False}},
    {"list": [1], "tensor": ["float32", 3]}, 2**70, np.float32(0.5), np.int64(3),
]  # fmt: skip


def test_the_format_keeps_what_json_would_lose() -> None:
    for sample in SAMPLES:
        found = decode(encode(sample))
        assert found == sample and repr(found) == repr(sample.item() if isinstance(sample, np.generic) else sample)
    assert math.isnan(decode(encode(math.nan)))
    data = {"w": torch.arange(6.0).view(2, 3).t(), "b": [torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 4)],
            "n": np.arange(4, dtype=np.int16)[::2], "flag": torch.tensor([True])}  # fmt: skip
    found = decode(encode(data))
    assert torch.equal(found["w"], data["w"]) and found["b"][0].dtype == torch.bfloat16  # type: ignore[call-overload,arg-type]
    assert found["b"][0].item() == 1.5 and found["b"][1].shape == (0, 4) and found["flag"].tolist() == [True]
    assert isinstance(found["n"], np.ndarray) and found["n"].tolist() == [0, 2] and found["n"].dtype == np.int16
    found["w"].zero_()  # its own storage
    for bad, where in (({1, 2}, "data is a set"), ([0, {"k": object()}], r"data\[1\]\['k'\] is a object"),
                       ({(1, 2): 3}, "a key of data is a tuple"), (b"x", "data is a bytes")):  # fmt: skip
        with pytest.raises(TypeError, match=where):
            encode(bad)
    deep: list[Any] = []
    held: list[Any] = []
    held.append({"again": held})
    for _ in range(99):
        deep = [deep]
    assert decode(encode(deep)) == deep
    for endless in ([deep], held, {"a": (1, held)}):
        with pytest.raises(TypeError, match="data is nested more than 100 deep, or holds itself"):
            encode(endless)
    for odd in (np.longdouble(1), np.datetime64("2020-01-01")):
        with pytest.raises(TypeError, match="data is a "):
            encode(odd)


def test_what_is_not_of_the_format_is_refused() -> None:
    whole = encode({"w": torch.arange(3.0), "x": [1, 2]})
    texts = [b'{"tensor": ["float32", -1]}', b'{"tensor": ["object", 1]}', b'{"tensor": ["float32", 10000000000]}',
             b"[1]", b'{"list": [1], "dict": []}', b'{"exec": 1}', b'{"dict": [[{}, 1]]}', b"{", b'{"dict": [1]}',
             b'{"list": ' * 3000 + b"1" + b"}" * 3000, b'{"list": "ab"}', b'{"tuple": {"list": []}}', b'{"dict": {}}',
             b'{"list": [' * 3000 + b"1" + b"]}" * 3000, b'{"tensor": ["float32", "3"]}', b'{"tensor": []}',
             b"\xff", b'{"tensor": ["float32", 0, 1000000000000000000000000]}']  # fmt: skip
    messages = [whole[:5], whole[:-1], whole + b"\0", b"", b"\xff" * 16]
    messages += [len(text).to_bytes(8, "little") + text for text in texts]
    for message in messages:
        with pytest.raises(CommunicationError, match="is not plain data"):
            decode(message)


def objects(comm: Communicator) -> list[str]:
    n, rank = comm.world_size, comm.rank

    def mine(r: int) -> dict[str, Any]:
        return {"rank": r, "w": torch.full((r, 2), float(r)), "tuple": (r, None)}

    def same(found: Any, r: int) -> None:
        assert found["rank"] == r and found["tuple"] == (r, None) and torch.equal(found["w"], mine(r)["w"])

    same(comm.broadcast_object(mine(rank) if rank == n - 1 else None, n - 1), n - 1)
    for r, found in enumerate(comm.all_gather_object(mine(rank))):
        same(found, r)
    gathered = comm.gather_object(mine(rank), n - 1)
    assert (gathered is None) == (rank != n - 1)
    for r, found in enumerate(gathered or []):
        same(found, r)
    same(comm.scatter_object([mine(r) for r in range(n)] if rank == 0 else None), rank)
    if n > 1:
        if rank == 0:
            comm.send_object(mine(5), 1, tag=9)
        if rank == 1:
            same(comm.recv_object(0, tag=9), 5)
    said = []
    for call in (
        lambda: comm.broadcast_object({1} if rank == 0 else None),
        lambda: comm.gather_object(object() if rank == n - 1 else 1),
        lambda: comm.scatter_object([1] * (n + 1) if rank == 0 else None),
        lambda: comm.scatter_object([{2}] * n if rank == 0 else None),
        lambda: comm.all_gather_object([1, torch.eye(2).to_sparse() if rank == n - 1 else 2]),
        lambda: comm.broadcast_object(np.array([None]) if rank == 0 else None),
    ):
        with pytest.raises(CommunicationError, match="is not plain") as error:
            call()
        said.append(str(error.value).split(" is not plain")[0])
    with pytest.raises(CommunicationError, match="data is a set"):
        comm.send_object({1}, (rank + 1) % n) if n > 1 else comm.broadcast_object({1})
    return said


def test_objects_travel_and_refusals_are_heard_everywhere() -> None:
    for n in (1, 3):
        results = ranks.run(objects, n)
        assert all(result == results[0] for result in results)
        assert [words.split()[4] for words in results[0]] == ["0", f"{n - 1}", "0", "0", f"{n - 1}", "0"]
    objects(Communicator())


# -- groups ---------------------------------------------------------------------------------------------------------
def parted(comm: Communicator) -> list[Any]:
    rank = comm.rank
    half = comm.split(rank % 2, key=-rank)
    assert half is not None
    # Only members call: the halves part again by themselves, without the others.
    quarter = half.split(0 if half.rank == 0 else None, label="first") if rank % 2 else None
    first = comm.all_reduce(torch.tensor([1.0])).item()
    total = half.all_reduce(torch.tensor([float(rank)])).item()
    places = comm.by_host("left" if rank in (0, 3) else "right")
    inside = places.inside.all_gather_plain(rank)
    between = places.between.all_gather_plain(rank)
    alone = comm.by_host()
    assert alone.inside.world_size == comm.world_size and alone.between.world_size == 1 and set(alone.hosts) == {0}
    kept = None if quarter is None else (quarter.rank, quarter.world_size, quarter.label)
    return [half.rank, half.world_size, half.label, total, first, kept, inside, between, places.hosts]


@pytest.mark.parametrize("told", [True, False])
def test_split_and_by_host(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not told:  # as under a torch that always sorts a group's ranks
        monkeypatch.setattr(groups, "_takes_any_order", lambda: False)
    results = ranks.run(parted, 5)
    assert [r[:5] for r in results] == [
        [2, 3, "color 0", 6.0, 5.0], [1, 2, "color 1", 4.0, 5.0], [1, 3, "color 0", 6.0, 5.0],
        [0, 2, "color 1", 4.0, 5.0], [0, 3, "color 0", 6.0, 5.0],
    ]  # fmt: skip
    assert [r[5] for r in results] == [None, None, None, (0, 1, "first 0"), None]
    assert [r[6] for r in results] == [[0, 3], [1, 2, 4], [1, 2, 4], [0, 3], [1, 2, 4]]
    assert [r[7] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    assert all(r[8] == [0, 1, 1, 0, 1] for r in results)


def bound(comm: Communicator) -> list[Any]:
    """To which device the default group is bound while others are made of parts of it, as over NCCL, and after that."""
    whole, make, seen = dist.group.WORLD, dist.new_group, []
    assert whole is not None

    def noting(*arguments: Any, **options: Any) -> Any:
        seen.append(whole.bound_device_id)
        return make(*arguments, **options)

    dist.new_group = noting  # type: ignore[assignment]
    whole.bound_device_id = torch.device("cuda", 0)
    try:
        comm.split(0 if comm.rank == 0 else None)
        return [*seen, str(whole.bound_device_id)]
    finally:
        dist.new_group, whole.bound_device_id = make, None


def test_a_part_that_splits_off_needs_nobody_else() -> None:
    """A group that torch splits off a bound one is waited for by all ranks of the job."""
    assert ranks.run(bound, 2) == [[None, "cuda:0"], ["cuda:0"]]


@pytest.mark.parametrize(
    ("gpus", "nodes", "reached", "asked"),
    [(2, 1, True, True), (2, 1, False, False), (2, 2, True, False), (1, 1, True, False)],
)
def test_many_thread_blocks_are_for_gpus_that_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, gpus: int, nodes: int, reached: bool, asked: bool
) -> None:
    """Over a network each has buffers of its own, in the host's memory."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(groups, "current_job", lambda: Job(world_size=2, num_nodes=nodes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: reached)
    comm: Any = SimpleNamespace(group="whole", world_size=2, device=torch.device("cuda", 0))
    assert groups.tunable(comm, groups.THREAD_BLOCKS) == asked


def impatient(comm: Communicator) -> list[float]:
    """How long a group's first collective waits for a rank that never comes, made either way."""
    waited = []
    for make in (lambda own: own.sub(range(own.world_size), "sub"), lambda own: own.split(0)):
        group = make(Communicator(comm.group, timeout=timedelta(seconds=1)))
        assert group is not None
        comm.barrier()
        began = time.perf_counter()
        if comm.rank == 0:
            with pytest.raises((RuntimeError, CommunicationError)):
                group.all_reduce(torch.ones(1))
        waited.append(time.perf_counter() - began)
        comm.barrier()
    return waited


def test_groups_keep_the_patience_of_their_maker() -> None:
    assert all(0.5 < seconds < SOON for seconds in ranks.run(impatient, 2)[0])


def broken(comm: Communicator) -> list[str]:
    """What is asked of a group that a time-out has broken."""
    group = Communicator(comm.group, timeout=timedelta(seconds=1)).split(0)
    assert group is not None
    if comm.rank == 1:
        comm.barrier()
        return []
    with pytest.raises(PeerLost, match="lost rank 1"):
        group.recv(torch.ones(1), 1)
    said = []
    for call in (group.all_reduce, group.broadcast, group.all_gather, group.reduce, group.all_gather_object):
        with pytest.raises(CommunicationError) as caught:
            call(torch.ones(2))
        said.append(str(caught.value))
    comm.barrier()
    return said


def test_a_group_that_a_time_out_has_broken_says_so() -> None:
    said = ranks.run(broken, 2)[0]
    assert len(said) == 5 and all("lost another rank" in each for each in said), said


def test_groups_without_a_process_group() -> None:
    comm = Communicator()
    part = comm.split(4)
    assert part is not None and part.world_size == 1 and comm.split(None) is None
    assert comm.by_host().inside.world_size == comm.by_host().between.world_size == 1


def refused_by_one(comm: Communicator) -> list[str]:
    """What every rank says to what only one was given wrongly; the group is as good as before."""
    calls = [
        lambda: comm.split("red" if comm.rank == 1 else 0),  # type: ignore[arg-type]
        lambda: comm.split(0, key=1.5 if comm.rank == 1 else None),  # type: ignore[arg-type]
    ]
    said = []
    for call in calls:
        with pytest.raises(CommunicationError) as caught:
            call()
        said.append(str(caught.value))
    part = comm.split(np.int64(comm.rank % 2), key=np.int32(-comm.rank))  # type: ignore[arg-type]
    assert part is not None and part.world_size == (2, 1, 2)[comm.rank] and comm.rank + 2 * part.rank in (1, 2)
    scattered = comm.scatter(np.arange(4.0) if comm.rank == 1 else None, source=1)
    assert isinstance(scattered, np.ndarray) and scattered.tolist() == [[0.0, 1.0], [2.0], [3.0]][comm.rank]
    return said


def test_what_one_rank_was_given_wrongly_is_told_to_all() -> None:
    results = ranks.run(refused_by_one, 3)
    for said in results:
        assert said[0] == "split takes whole numbers, got color='red' on rank 1 of group 'world'."
        assert said[1] == "split takes whole numbers, got key=1.5 on rank 1 of group 'world'."


# -- barriers -------------------------------------------------------------------------------------------------------
def waiting(comm: Communicator) -> str:
    own = comm.sub(range(comm.world_size), "own")
    assert own is not None
    own.barrier()
    own.barrier(LIMIT)
    said = ""
    if comm.rank not in (1, 3):
        with pytest.raises(CommunicationError) as error:
            own.barrier(timeout=2.0)  # both are here, but a busy machine may hold one of them up
        said = str(error.value)
    comm.barrier(LIMIT)
    return said


def test_a_barrier_names_who_did_not_arrive_on_every_rank() -> None:
    said = ranks.run(waiting, 4)
    for rank in (0, 2):
        assert f"rank {rank} waited" in said[rank] and "'own' and rank 1, 3 did not arrive" in said[rank]


def limits(comm: Communicator) -> None:
    for timeout in (math.inf, 1e300, 10**400, np.int64(60)):
        comm.barrier(timeout)
    own = comm.split(0)
    assert own is not None
    if comm.rank == 0:
        began = time.perf_counter()
        with pytest.raises(CommunicationError, match="rank 1 did not arrive"):
            own.barrier(1e-9)
        assert time.perf_counter() - began < SOON
    comm.barrier(LIMIT)


def test_a_barrier_takes_the_longest_and_the_shortest_time() -> None:
    ranks.run(limits, 2)
