"""Arguments that cannot be meant are one sentence: what, where, and the way out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist

from drivetrain import comm as package
from drivetrain.comm import check, predict, schedules, simulate
from drivetrain.comm.calibration import place
from drivetrain.comm.communicator import Communicator
from drivetrain.comm.cost import CostModel, Link
from drivetrain.comm.execute import run
from drivetrain.errors import DrivetrainError
from tests.patience import LIMIT

RING = schedules.ring(4)
Call = Callable[[], object]


def sentence(call: Call) -> str:
    with pytest.raises(DrivetrainError) as caught:
        call()
    said = str(caught.value)
    assert said.endswith((".", ")", "?")) or ": known: " in said or "known:" in said, said
    assert "\n" not in said
    return said


SCHEDULES: list[tuple[Call, str]] = [
    (lambda: check("ring"), "check takes a Schedule, not 'ring': make one, such as schedules.make('ring', 8)."),
    (lambda: check(schedules.tree), "not the function 'tree': make one, such as schedules.make('tree', 8)"),
    (lambda: check(schedules.Schedule("odd", 2.0, 2, ())), "world_size=2.0 is no whole number"),  # type: ignore[arg-type]
    (lambda: schedules.ring("4"), "world_size='4' of a ring is of type str: pass an int of 1 or more"),  # type: ignore[arg-type]
    (lambda: schedules.ring(True), "is of type bool"),
    (lambda: schedules.tree(4, "brodcast"), "did you mean 'broadcast'"),  # type: ignore[arg-type]
    (lambda: schedules.tree(4, root=1.5), "root=1.5 of a tree is of type float"),  # type: ignore[arg-type]
    (lambda: schedules.tree(4, root=4), "root=4 is no rank of 4: pass 0 to 3"),
    (lambda: schedules.chain(4, segments="2"), "segments='2' of a chain"),  # type: ignore[arg-type]
    (lambda: schedules.make("rign", 4), "did you mean 'ring'"),
    (lambda: schedules.make(4, "ring"), "there is no topology 4: known"),  # type: ignore[arg-type]
    (lambda: schedules.make("tree", 4.0), "world_size=4.0 is of type float"),  # type: ignore[arg-type]
    (lambda: schedules.make("hierarchical", 4, 2), "hosts=2 are no whole numbers: pass them as a list"),  # type: ignore[arg-type]
    (lambda: schedules.hierarchical(4, levels=["2", 2]), "levels=['2', 2] are no whole numbers"),  # type: ignore[list-item]
    (lambda: simulate(RING, None), "needs a list of values by rank, got a NoneType"),
    (lambda: simulate(RING, [1, 2, 3, 4]), "rank 0 needs a flat sequence of numbers, got 1"),
    (lambda: simulate(RING, [["a"]] * 4), "needs a flat sequence of numbers"),
    (lambda: simulate(RING, [[[1], [1, 2]]] * 4), "needs a flat sequence of numbers"),
    (lambda: simulate(RING, [[1]] * 4, "mean"), "simulate knows no op 'mean': did you mean 'average'"),
    (lambda: simulate(RING, [[1]] * 4, ["sum"]), "knows no op ['sum']"),
    (lambda: simulate("ring", [[1]]), "simulate takes a Schedule"),
    (lambda: predict(RING, "25MB"), "size_bytes='25MB' is no number of bytes"),  # type: ignore[arg-type]
    (lambda: predict("ring", 1e6), "a prediction takes a Schedule"),  # type: ignore[arg-type]
    (lambda: predict(RING, 1e6, 3), "model=3 is no CostModel"),  # type: ignore[arg-type]
    (lambda: predict(RING, 1e6, CostModel(Link(0, 0)), [2, 3]), "do not add up to world_size=4"),
]


@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_schedules(number: int) -> None:
    call, expected = SCHEDULES[number]
    assert expected in sentence(call)


def communicators(comm: Communicator) -> list[tuple[str, Call, str]]:
    """Of two ranks, on each of which every call raises before anything is sent."""
    t = torch.ones(4)
    broadcast, wrong = schedules.tree(2, "broadcast"), "did you mean"
    where = f"on rank {comm.rank} of group 'world'"
    c: Any = comm
    return [
        ("send", lambda: c.send(t, 1.0), "has no peer 1.0: the other ranks are"),
        ("send", lambda: c.send(t, comm.rank), "has no peer"),
        ("send", lambda: c.send("text", 1 - comm.rank), f"send {where}: a str cannot be sent"),
        ("isend", lambda: c.isend([1.0], 1 - comm.rank), f"isend {where}: a float cannot be sent"),
        ("irecv", lambda: c.irecv(t, "1"), "has no peer '1'"),
        ("recv", lambda: c.recv((3,), 1 - comm.rank), f"recv {where}: a int cannot be sent"),
        ("tag", lambda: c.send(t, 1 - comm.rank, tag="a"), "tag 'a' on rank"),
        ("tag", lambda: c.send_object(1, 1 - comm.rank, tag=1.5), "tag 1.5 of an object"),
        ("broadcast", lambda: c.broadcast(t, 2), "has no rank 2: its ranks are 0 to 1"),
        ("broadcast", lambda: c.broadcast(t, True), "has no rank True"),
        ("broadcast", lambda: c.broadcast(3.0), f"broadcast {where}: a float cannot be sent"),
        ("scatter", lambda: c.scatter(t, -1), "has no rank -1"),
        ("gather", lambda: c.gather(t, None), "has no rank None"),
        ("gather", lambda: c.gather({"a": t}), f"gather {where}: a dict cannot be sent"),
        ("all_gather", lambda: c.all_gather(t, sizes=4), "sizes 4 do not fit rank"),
        ("all_gather", lambda: c.all_gather(t, sizes=["4", "4"]), "sizes ['4', '4'] do not fit"),
        ("all_to_all", lambda: c.all_to_all([t]), "got 1 parts for 2 ranks"),
        ("all_reduce", lambda: c.all_reduce([1.0, 2.0]), f"all_reduce {where}: a float cannot be sent: pass a tensor"),
        ("all_reduce", lambda: c.all_reduce(np.array(["a"])), f"all_reduce {where}: an array of dtype"),
        ("all_reduce", lambda: c.all_reduce(t, "avg"), "knows no op 'avg': did you mean 'average'"),
        ("all_reduce", lambda: c.all_reduce(t, dist.ReduceOp.PRODUCT), "did you mean 'product'"),
        ("all_reduce", lambda: c.all_reduce(t, ["sum"]), "knows no op ['sum']"),
        ("all_reduce", lambda: c.all_reduce(t, algorithm="natve"), f"knows no algorithm 'natve': {wrong} 'native'"),
        ("all_reduce", lambda: c.all_reduce(t, algorithm=2), "algorithm=2 of all_reduce is of type int"),
        ("all_reduce", lambda: c.all_reduce(t, algorithm=broadcast), "schedule 'tree' is a broadcast, not an all_re"),
        ("all_reduce", lambda: c.all_reduce(t, algorithm=RING), "is for 4 ranks but group 'world' has 2"),
        ("reduce", lambda: c.reduce(t, 2), "has no rank 2"),
        ("reduce_scatter", lambda: c.reduce_scatter(t, sizes=2), "got sizes=2: give the number of rows"),
        ("reduce_scatter", lambda: c.reduce_scatter(3), f"reduce_scatter {where}: a int cannot be sent"),
        ("flat", lambda: c.all_gather_flat(t, t), "the whole must have 2 times as many"),
        ("flat", lambda: c.reduce_scatter_flat(t, torch.ones(8), "average"), "take op='sum' and divide"),
        ("flat", lambda: c.reduce_scatter_flat([1], t), "a list is no tensor"),
        ("barrier", lambda: c.barrier("soon"), "got timeout='soon': pass seconds above zero"),
        ("barrier", lambda: c.barrier(-1), "got timeout=-1"),
        ("objects", lambda: c.broadcast_object(1, source=5), "has no rank 5"),
        ("split", lambda: c.split("red"), "split takes whole numbers, got color='red'"),
        ("sub", lambda: c.sub(1, "one"), "of ranks 1: use a list of rising ranks"),
        ("sub", lambda: c.sub(["0"], "one"), "of ranks ['0']"),
        ("by_host", lambda: c.by_host(3), "got host=3: pass a name"),
        ("run", lambda: run("ring", t, comm), "an executor takes a Schedule"),  # type: ignore[arg-type]
        ("timeout", lambda: Communicator(c.group, timeout=5), "timeout=5: pass a timedelta"),  # type: ignore[arg-type]
        ("device", lambda: Communicator(c.group, "gpu"), "got device='gpu': pass 'cpu'"),
        ("group", lambda: Communicator("gloo"), "is 'gloo', no process group"),  # type: ignore[arg-type]
    ]


def misuse(comm: Communicator) -> list[str]:
    failures = []
    for name, call, expected in communicators(comm):
        said = sentence(call)
        if expected not in said:
            failures.append(f"{name}: {said}")
    assert comm.all_reduce(torch.ones(1)).item() == 2  # nothing was left under way
    return failures


def test_communicators() -> None:
    assert ranks.run(misuse, 2) == [[], []]


def test_what_the_package_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is named after its function is both, whichever is imported first."""
    assert check(RING) == package.check(RING) == sys.modules["drivetrain.comm.check"].check(RING)
    assert simulate(RING, [[1]] * 4)[0] == [4]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "run python -m drivetrain.comm calibrate first" in sentence(lambda: predict(RING, 1e6))
    CostModel(Link(1e-3, 1e-9)).save(tmp_path / "model.json")
    assert predict(RING, 1e6, CostModel.load(tmp_path / "model.json")) == pytest.approx(6e-3 + 1.5e-3)
    assert place("cpu").parent.parent == tmp_path
    code = (
        "import sys; sys.modules['torch'] = None; import drivetrain.comm.check, drivetrain.comm.simulate as s;"
        "from drivetrain.comm.check import check as function; from drivetrain.comm import check, schedules;"
        "made = schedules.ring(3); assert check(made) == function(made) == drivetrain.comm.check(made);"
        "assert s.simulate(made, [[1]] * 3)[0] == s(made, [[1]] * 3)[0]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
