"""Every operation of the Communicator against numpy, on 1 to 6 ranks: dtypes, shapes, strides, kinds of container."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np
import pytest
import ranks
import torch

from drivetrain import registry
from drivetrain.comm import schedules
from drivetrain.comm.communicator import CommunicationError, Communicator
from drivetrain.comm.schedules import make
from drivetrain.errors import ConfigurationError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SHAPES = ((), (0,), (1,), (3, 5))
ALGORITHMS = ["auto", *registry.names("topologies")]
OPS = ("sum", "average", "min", "max", "product")


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` brings; small numbers, so that products and sums of bytes fit and half precision is exact."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape) + sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -2
    return torch.randint(low, 3, shape, generator=generator).to(dtype)


def expected(op: str, parts: list[torch.Tensor]) -> np.ndarray:
    stack = np.stack([p.double().numpy() if p.is_floating_point() else p.numpy() for p in parts])
    if stack.dtype not in (np.float64, np.bool_):
        stack = stack.astype(np.int64)
    result = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod}[op](stack, axis=0)
    return result.astype(np.bool_) if op == "product" and stack.dtype == np.bool_ else result


def agree(result: torch.Tensor, wanted: np.ndarray) -> bool:
    found = result.double().numpy() if result.is_floating_point() else result.numpy()
    if result.is_floating_point():
        return bool(np.allclose(found, wanted, rtol=4 * torch.finfo(result.dtype).eps, atol=0))
    return bool(np.array_equal(found, wanted))


def shapes(dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """Shape matters as much to one float and one integer as to all."""
    return (*SHAPES, (7,)) if dtype in (torch.float32, torch.int32) else ((7,),)


def reductions(comm: Communicator, algorithms: list[str]) -> str:
    """Every op, dtype, shape and algorithm; returns a digest of all results, which must be equal on all ranks."""
    n, digest = comm.world_size, hashlib.sha256()
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for op in OPS:
            for shape in shapes(dtype):
                case = f"{op} of {dtype} {shape}"
                if op == "average" and dtype not in FLOATS:
                    continue
                parts = [part(rank, shape, dtype) for rank in range(n)]
                wanted = expected(op, parts)
                # Topologies know nothing of shapes: each meets every op and every dtype, not all at once.
                every = shape == (7,) and (op == "sum" or dtype in (torch.float32, torch.int32))
                for algorithm in algorithms if every else algorithms[:1]:
                    mine = parts[comm.rank].clone()
                    result = comm.all_reduce(mine, op, algorithm)  # type: ignore[arg-type]
                    assert agree(result, wanted), (case, algorithm, result, wanted)
                    counts = dtype == torch.bool and op == "sum"
                    assert (result is mine) != counts and result.shape == shape, (case, algorithm)
                    digest.update(result.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                root = n // 2
                mine = parts[comm.rank].clone()
                result = comm.reduce(mine, root, op)  # type: ignore[arg-type]
                if comm.rank == root:
                    assert agree(result, wanted), (case, "reduce")
                else:
                    assert result is None and torch.equal(mine, parts[comm.rank]), (case, "reduce")
                if shape:
                    mine = parts[comm.rank].clone()
                    kept = comm.reduce_scatter(mine, op)  # type: ignore[arg-type]
                    assert agree(kept, np.array_split(wanted, n)[comm.rank]), (case, "reduce_scatter", kept)
                    assert torch.equal(mine, parts[comm.rank])
                    integer = (
                        dtype not in FLOATS and op in ("sum", "product") and (dtype, op) != (torch.bool, "product")
                    )
                    assert kept.dtype == (torch.int64 if integer else dtype), case
    return digest.hexdigest()


def movements(comm: Communicator) -> None:
    n, rank = comm.world_size, comm.rank
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        for shape in shapes(dtype):
            parts = [
                part(r, shape, torch.uint8 if dtype == torch.uint16 else torch.float32).to(dtype) for r in range(n)
            ]

            def same(found: torch.Tensor, r: int, wanted: list[torch.Tensor] = parts) -> None:
                assert found.dtype == wanted[r].dtype and found.shape == wanted[r].shape
                assert torch.equal(
                    found.cpu().contiguous().view(-1).view(torch.uint8), wanted[r].view(-1).view(torch.uint8)
                )

            mine = parts[rank].clone()
            assert comm.broadcast(mine, n - 1) is mine
            same(mine, n - 1)
            for r, found in enumerate(comm.all_gather(parts[rank])):
                same(found, r)
            gathered = comm.gather(parts[rank], n - 1)
            assert (gathered is None) == (rank != n - 1)
            for r, found in enumerate(gathered or []):
                same(found, r)
            same(comm.scatter(parts if rank == 0 else None), rank)
            for found in comm.all_to_all([parts[r] for r in range(n)]):
                same(found, rank)


def uneven(comm: Communicator) -> None:
    n, rank = comm.world_size, comm.rank
    parts = [torch.arange(3.0 * r).view(r, 3) + r for r in range(n)]
    for found in (comm.all_gather(parts[rank], uneven=True), comm.all_gather(parts[rank], sizes=range(n))):
        assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))
    gathered = comm.gather(parts[rank], 0, uneven=True)
    assert (gathered is None) == (rank > 0)
    assert all(torch.equal(a, b) for a, b in zip(gathered or parts, parts, strict=True))
    assert torch.equal(comm.scatter(parts if rank == n - 1 else None, n - 1).cpu(), parts[rank])
    into = torch.empty(3, rank).t()
    assert comm.scatter(parts if rank == 0 else None, output=into) is into and torch.equal(into, parts[rank])
    # A tensor's rows, 2 n - 1 of them, are cut: every rank but the last gets two.
    rows = torch.arange(4.0 * n - 2).view(-1, 2)
    cuts = np.array_split(rows.numpy(), n)
    assert np.array_equal(comm.scatter(rows if rank == 0 else None).cpu(), cuts[rank])
    arrived = comm.all_to_all(rows + rank, uneven=True)
    assert np.array_equal(arrived, np.concatenate([cuts[rank] + r for r in range(n)]))
    lists = comm.all_to_all([torch.full((rank + to,), 10.0 * rank + to) for to in range(n)], uneven=True)
    assert [found.tolist() for found in lists] == [[10.0 * r + rank] * (rank + r) for r in range(n)]
    sizes = [n - r for r in range(n)]
    whole = torch.arange(float(sum(sizes)))
    start = sum(sizes[:rank])
    kept = comm.reduce_scatter(whole * (rank + 1), sizes=sizes)
    assert torch.equal(kept, whole[start : start + sizes[rank]] * (n * (n + 1) / 2))
    big = comm.reduce_scatter([torch.full((r, 2), 2**40 + rank) for r in range(n)])
    assert big.tolist() == [[n * 2**40 + n * (n - 1) // 2] * 2] * rank


def containers(comm: Communicator) -> None:
    n, rank = comm.world_size, comm.rank
    total = n * (n + 1) / 2
    strided = torch.zeros(4, 3).t()[1:]
    strided.fill_(rank + 1.0)
    before = strided.data_ptr()
    assert comm.all_reduce(strided) is strided and strided.data_ptr() == before and bool((strided == total).all())
    scalar = torch.tensor(rank + 1.0)
    assert comm.all_reduce(scalar) is scalar and scalar.item() == total
    for array in (np.full((2, 3), rank + 1.0), np.full((2, 3), rank + 1.0, order="F"), np.full(6, rank + 1)[::-1],
                  np.full(6, rank + 1.0, dtype=">f8"), np.full((), rank + 1.0)):  # fmt: skip
        assert comm.all_reduce(array) is array and np.all(array == total)
    mixed = [
        torch.full((2,), rank + 1.0),
        np.full(3, rank + 1),
        torch.full((2, 2), rank + 1.0, dtype=torch.float64).t(),
    ]
    found = comm.all_reduce(mixed)
    assert all(a is b for a, b in zip(found, mixed, strict=True))
    assert [np.unique(np.asarray(one)).tolist() for one in mixed] == [[total]] * 3
    listed = [np.full(2, float(rank)), torch.full((1,), rank)]
    comm.broadcast(listed, n - 1)
    assert listed[0].tolist() == [n - 1.0] * 2 and listed[1].tolist() == [n - 1]
    rooted = comm.reduce([torch.ones(2), torch.ones(3, dtype=torch.int32)], n - 1)
    assert (rooted is None) == (rank != n - 1)
    assert rooted is None or [one.tolist() for one in rooted] == [[n, n], [n, n, n]]
    pairs = comm.all_gather([np.full(2, rank), torch.tensor([rank])])
    assert [[p.tolist() for p in pair] for pair in pairs] == [[[r, r], [r]] for r in range(n)]
    assert isinstance(pairs[0][0], np.ndarray) and isinstance(comm.all_to_all(np.arange(n)), np.ndarray)
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for call in (lambda: comm.all_reduce(frozen), lambda: comm.broadcast(frozen)):
        with pytest.raises(CommunicationError, match="read-only"):
            call()
    assert [a.tolist() for a in comm.all_gather(frozen)] == [[0.0, 0.0]] * n  # nothing is written there
    for wrong, words in ((3.0, "a float cannot be sent"), (np.array(["a"]), "dtype <U1"), ("text", "a str cannot")):
        with pytest.raises(CommunicationError, match=words):
            comm.all_reduce(wrong)


def overflow(comm: Communicator) -> list[str]:
    """Sums beyond the dtype: widened, or an error where nothing is wider. Returns what was said."""
    n = comm.world_size
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        top = torch.iinfo(dtype).max
        mine = torch.tensor([top, 1, -0], dtype=dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = comm.all_reduce(mine)
        assert result.tolist() == [top * n, n, 0] and result.dtype == torch.int64, (dtype, result)
        assert mine.tolist() == [top, 1, 0] and len(caught) == 1 and "does not fit" in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert comm.all_reduce(torch.tensor([top, 1], dtype=dtype), "max").tolist() == [top, 1]
            exact = torch.tensor([top if comm.is_master else 0, -3 if dtype != torch.uint8 else 3], dtype=dtype)
            assert comm.all_reduce(exact).tolist() == [top, (-3 if dtype != torch.uint8 else 3) * n]
            assert exact.dtype == dtype
    low, high = -(2**63), 2**63 - 1
    # Sums that pass the limits on the way and come back.
    there = torch.tensor([low if comm.rank == 0 else 0, high if comm.rank == 0 else 0, [high, low][comm.rank % 2]])
    pairs = n // 2
    assert comm.all_reduce(there[:2].clone()).tolist() == [low, high]
    if n % 2 == 0:
        assert comm.all_reduce(there[2:].clone()).tolist() == [-pairs]
    assert comm.all_reduce(torch.tensor([low if comm.rank == 0 else 1, 0]), "product").tolist() == [low, 0]
    said = []
    for op, number in (("sum", 2**62), ("sum", -(2**62) - 1), ("product", 2**40)):
        with pytest.raises(CommunicationError) as error:
            comm.all_reduce(torch.tensor([1, number]), op)  # type: ignore[arg-type]
        said.append(str(error.value))
    halves = torch.full((4,), 40000.0, dtype=torch.float16)
    assert comm.all_reduce(halves, "average").tolist() == [40000.0] * 4
    return said


def everything(comm: Communicator, algorithms: list[str]) -> str:
    digest = reductions(comm, algorithms)
    movements(comm)
    uneven(comm)
    containers(comm)
    return digest


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
def test_all_operations(world_size: int) -> None:
    results = ranks.run(everything, world_size, ALGORITHMS)
    assert len(set(results)) == 1


def test_a_world_without_a_process_group_does_all_of_it() -> None:
    everything(Communicator(), ALGORITHMS)


def test_sums_beyond_the_dtype() -> None:
    for said in ranks.run(overflow, 4):
        assert [words.split(" is ")[0] for words in said] == [
            "the sum of int64 over the 4 ranks of group 'world'",
            "the sum of int64 over the 4 ranks of group 'world'",
            "the product of int64 over the 4 ranks of group 'world'",
        ]


def refused(comm: Communicator) -> None:
    n = comm.world_size
    cases: list[tuple[Any, str]] = [
        (lambda: comm.all_reduce(torch.ones(2), "mean"), "no op 'mean'"),  # type: ignore[arg-type]
        (lambda: comm.reduce(torch.ones(2, dtype=torch.int32), op="average"), "not exact"),
        (lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64), "max"), "not defined over ranks"),
        (lambda: comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "cannot reduce"),
        (lambda: comm.all_reduce(torch.ones(2).to_sparse()), "layout"),
        (lambda: comm.broadcast(torch.ones(2), n), f"no rank {n}"),
        (lambda: comm.reduce(torch.ones(2), -1), "no rank -1"),
        (lambda: comm.send(torch.ones(2), comm.rank), "no peer"),
        (lambda: comm.send(torch.ones(2), (comm.rank + 1) % n, tag=2**30), "out of range"),
        (lambda: comm.scatter([torch.ones(1)] * (n + 1), comm.rank), "parts for"),
        (lambda: comm.all_to_all([torch.ones(1)] * (n - 1)), "parts for"),
        (lambda: comm.all_to_all([torch.ones(i) for i in range(n)]), "uneven=True"),
        (lambda: comm.all_gather(torch.ones(2), sizes=[1] * n), "do not fit"),
        (lambda: comm.reduce_scatter(torch.ones(5), sizes=[2] * n), "do not cut"),
        (lambda: comm.reduce_scatter(torch.tensor(1.0)), "without dimensions"),
        (lambda: comm.split("red"), "whole numbers"),  # type: ignore[arg-type]
    ]
    for call, words in cases:
        with pytest.raises(CommunicationError, match=words):
            call()
    with pytest.raises(ConfigurationError, match="did you mean 'ring'"):
        comm.all_reduce(torch.ones(2), algorithm="rings")
    with pytest.raises(CommunicationError, match=f"is for {n + 1} ranks"):
        comm.all_reduce(torch.ones(2), algorithm=make("ring", n + 1))
    own = make("ring", n)
    assert comm.all_reduce([torch.ones(2), torch.ones(1)], "max", own)[1].tolist() == [1.0]


def differing(comm: Communicator) -> list[str]:
    """Under ``check`` the ranks do different things: the same error everywhere, and the group lives on."""
    refused(comm)
    checked = Communicator(comm.group, label="checked", check=True)
    odd = comm.rank % 2
    calls = [
        lambda: checked.all_reduce(torch.ones(3 + odd)),
        lambda: checked.all_gather(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
        lambda: checked.broadcast(torch.ones(2), odd),
        lambda: checked.all_reduce(torch.ones(2)) if odd else checked.gather(torch.ones(2)),
    ]
    said = []
    for call in calls:
        with pytest.raises(CommunicationError) as error:
            call()
        said.append(str(error.value))
    assert checked.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]
    uneven(checked)
    return said


def elsewhere(comm: Communicator) -> str:
    """One rank says plain data while the others are about to do something else."""
    checked = Communicator(comm.group, label="checked", check=True)
    if comm.rank == 1:
        return str(checked.all_gather_plain([1, [2]]))
    with pytest.raises(CommunicationError) as error:
        checked.all_reduce(torch.ones(3))
    return str(error.value)


def test_a_rank_that_says_something_else_is_named() -> None:
    found = ranks.run(elsewhere, 2)
    assert "rank 1: [1, [2]]" in found[0] and "all_reduce" in found[1]


def test_differences_between_ranks_are_one_error_everywhere() -> None:
    results = ranks.run(differing, 3)
    assert results[0] == results[1] == results[2]
    assert "rank 0, 2: all_reduce op=sum algorithm=auto float32[3]; rank 1: all_reduce" in results[0][0]
    assert "float64" in results[0][1] and "source=1" in results[0][2] and "gather destination=0" in results[0][3]


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ODD = (1.0, float("nan"), float("inf"), -0.0, float("nan"), -1.5, 0.0, float("-inf"))


def odd_floats(comm: Communicator) -> list[str]:
    """The least and greatest as torch finds them in one process, whichever rank has what."""
    wrong = []
    for dtype in FLOATS:
        every = [torch.tensor(ODD[rank:] + ODD[:rank], dtype=dtype) for rank in range(comm.world_size)]
        for op, expected in (("min", torch.stack(every).amin(0)), ("max", torch.stack(every).amax(0))):
            found = {
                algorithm: comm.all_reduce(every[comm.rank].clone(), op, algorithm)  # type: ignore[arg-type]
                for algorithm in ("native", *schedules.names())
            }
            reduced = comm.reduce(every[comm.rank].clone(), 1, op)  # type: ignore[arg-type]
            found["reduce"] = expected if reduced is None else reduced
            part = comm.reduce_scatter(every[comm.rank], op)  # type: ignore[arg-type]
            found["reduce_scatter"] = torch.cat(comm.all_gather(part, uneven=True))
            wrong += [
                f"{name} {op} of {dtype}: {result.tolist()}"
                for name, result in found.items()
                if not torch.equal(
                    result.double().nan_to_num(7.0, 6.0, -6.0), expected.double().nan_to_num(7.0, 6.0, -6.0)
                )
                or result.dtype != dtype
            ]
    zeros = torch.tensor([0.0, -0.0] if comm.rank else [-0.0, 0.0])
    for algorithm in ("native", "ring"):
        assert comm.all_reduce(zeros.clone(), "min", algorithm).signbit().all()  # type: ignore[arg-type]
        assert not comm.all_reduce(zeros.clone(), "max", algorithm).signbit().any()  # type: ignore[arg-type]
    return wrong


def test_the_least_and_greatest_of_odd_floats() -> None:
    assert ranks.run(odd_floats, 3) == [[], [], []]


def warned(comm: Communicator) -> list[int]:
    """How many lines of this file are warned of, as Python shows warnings unless told otherwise: once for each."""
    high = torch.tensor([100], dtype=torch.int8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            comm.all_reduce(high.clone())
            comm.all_reduce([high.clone()])
            comm.ring_all_reduce(high.clone())
            comm.reduce(high.clone())
    return [len({each.lineno for each in caught if each.filename == __file__}), len(caught)]


def test_every_line_whose_sum_does_not_fit_is_warned_of() -> None:
    assert ranks.run(warned, 2) == [[4, 4], [3, 3]]
