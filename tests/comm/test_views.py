"""Tensors and arrays that read otherwise than they lie in memory, are made for inference, or that a graph remembers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ranks
import torch

from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.execute import Executor
from drivetrain.comm.schedules import ring

ALGORITHMS = ("native", "ring", "recursive_doubling")


def values(rank: int) -> torch.Tensor:
    return torch.tensor([1 + 2j * (rank + 1), 3 - 1j], dtype=torch.complex128)


def conjugates(comm: Communicator) -> None:
    """Each operation gives for a lazy conjugate what it gives for the same numbers written out."""

    def lazy() -> torch.Tensor:
        return values(comm.rank).conj()

    every = [values(rank).conj().resolve_conj() for rank in range(comm.world_size)]
    total = torch.stack(every).sum(0)
    for algorithm in ALGORITHMS:
        given = lazy()
        assert comm.all_reduce(given, "sum", algorithm) is given and torch.equal(given.resolve_conj(), total)
    given = lazy()
    comm.reduce(given, 1)
    assert torch.equal(given.resolve_conj(), total if comm.rank == 1 else every[comm.rank])
    assert torch.equal(comm.broadcast(lazy()).resolve_conj(), every[0])
    assert all(map(torch.equal, comm.all_gather(lazy()), every))
    assert all(map(torch.equal, comm.all_gather_object(lazy()), every))
    assert all(map(torch.equal, comm.gather(lazy(), 1) or every, every))
    assert all(map(torch.equal, comm.all_to_all([lazy() for _ in every], uneven=True), every))
    assert torch.equal(comm.scatter([lazy() for _ in every] if comm.rank == 0 else None), every[0])
    assert torch.equal(comm.reduce_scatter(lazy()), total[comm.rank : comm.rank + 1])
    if comm.rank == 0:
        comm.send(lazy(), 1)
    else:
        assert torch.equal(comm.recv(lazy(), 0).resolve_conj(), every[0])


def negatives(comm: Communicator) -> None:
    for algorithm in ALGORITHMS:
        given = torch._neg_view(torch.tensor([1.0, 2.0]))
        assert comm.all_reduce(given, "sum", algorithm).tolist() == [-2.0, -4.0] == given.tolist()
    for view in (values(0).conj(), torch._neg_view(torch.ones(2))):
        with pytest.raises(CommunicationError, match="resolve_conj"):
            Executor(ring(2), comm)(view)


def test_views_that_turn_signs() -> None:
    ranks.run(conjugates, 2)
    ranks.run(negatives, 2)


def made_for_inference(comm: Communicator) -> None:
    with torch.inference_mode():
        given, listed = torch.ones(3), [torch.ones(2), torch.ones(2, dtype=torch.int8)]
    assert comm.all_reduce(given).tolist() == [2.0] * 3 == given.tolist()
    assert comm.all_reduce(given, "average", "ring").tolist() == [2.0] * 3
    assert [each.tolist() for each in comm.all_reduce(listed)] == [[2, 2], [2, 2]]
    assert comm.broadcast(given.mul(comm.rank + 1)).tolist() == [2.0] * 3
    if comm.rank == 0:
        comm.send(given, 1)
    else:
        assert comm.recv(given.mul(5), 0).tolist() == [2.0] * 3
    before = torch.ones(4)
    with torch.inference_mode():  # and inside of it, also where the result is brought to its place by a copy
        for algorithm in ALGORITHMS:
            for strided in (torch.ones(4)[::2], before[::2]):
                assert comm.all_reduce(strided, "sum", algorithm).tolist()[0] == strided[1].item()  # type: ignore[arg-type]
            assert comm.all_reduce(torch.ones(3), "min", algorithm).tolist() == [1.0] * 3  # type: ignore[arg-type]
        assert comm.all_reduce(before).tolist() == [16.0, 2.0, 16.0, 2.0]
    assert before.tolist() == [16.0, 2.0, 16.0, 2.0]


def test_tensors_that_were_made_for_inference() -> None:
    ranks.run(made_for_inference, 2)


def remembered(comm: Communicator) -> None:
    """A graph that kept what a collective overwrote says so, as with every other operation in place."""

    def received(tensor: torch.Tensor) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(2), 1)
        else:
            comm.recv(tensor, 0)

    def overwritten(operate: Any) -> bool:
        parameter = torch.ones(2, requires_grad=True)
        kept = parameter.exp()
        operate(kept)
        try:
            kept.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return False

    assert overwritten(comm.all_reduce)
    assert overwritten(lambda kept: comm.all_reduce(kept, "average", "ring"))
    assert overwritten(comm.broadcast) == (comm.rank != 0)
    assert overwritten(received) == (comm.rank == 1)
    assert overwritten(comm.reduce) == (comm.rank == 0)
    assert not overwritten(comm.all_gather)


def test_a_graph_hears_of_what_was_overwritten() -> None:
    ranks.run(remembered, 2)


def refused(comm: Communicator) -> list[str]:
    """Before anything is sent, so the ranks can go on."""
    peer = 1 - comm.rank
    one = torch.ones(1).expand(3)
    fixed = np.broadcast_to(np.ones(1), (3,))
    wrong = [
        (lambda: comm.all_reduce(one), "several elements lie in one place"),
        (lambda: comm.all_reduce(one, "sum", "ring"), "several elements lie in one place"),
        (lambda: comm.all_reduce([torch.ones(2), one]), "several elements lie in one place"),
        (lambda: comm.broadcast(one), "several elements lie in one place"),
        (lambda: comm.reduce(one), "several elements lie in one place"),
        (lambda: comm.recv(one, peer), "several elements lie in one place"),
        (lambda: comm.irecv(one, peer), "several elements lie in one place"),
        (lambda: comm.recv(one), "several elements lie in one place"),
        (lambda: comm.recv(fixed, peer), "read-only"),
        (lambda: comm.irecv(fixed, peer), "read-only"),
        (lambda: comm.scatter([torch.ones(3)] * 2, output=one), "several elements lie in one place"),
        (lambda: comm.all_reduce(torch.ones(2, device="meta")), "the meta device has no values"),
        (lambda: comm.gather(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "a nested tensor"),
        (lambda: comm.all_gather(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)), "dequantize"),
    ]
    failures = []
    for number, (call, expected) in enumerate(wrong):
        try:
            call()
        except CommunicationError as error:
            said = str(error)
        else:
            said = "nothing"
        if expected not in said:
            failures.append(f"{number}: {said}")
    assert [part.tolist() for part in comm.all_gather(one * comm.rank)] == [[0.0] * 3, [1.0] * 3]
    return failures


def test_places_that_hold_no_result_are_refused_before_anything_is_sent() -> None:
    assert ranks.run(refused, 2) == [[], []]


def records(comm: Communicator) -> None:
    table = np.array([(1, 2.0), (3, 4.0)], np.dtype([("a", "i1"), ("b", "f8")]))
    for algorithm in ALGORITHMS[:2]:
        comm.all_reduce(table["b"], "sum", algorithm)
    assert table.tolist() == [(1, 8.0), (3, 16.0)]
    assert [part.tolist() for part in comm.all_gather(table["b"])] == [[8.0, 16.0]] * 2


def test_a_field_of_an_array_of_records() -> None:
    ranks.run(records, 2)
