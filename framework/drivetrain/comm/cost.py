"""What a schedule takes: latency, bandwidth and reduction per kind of link (the alpha-beta-gamma model).

Rounds follow each other. A round takes as long as its slowest rank: latency of the link, the bytes it sends or
receives over the bandwidth, and the time to add what it received. The ranks of a host share its link to other hosts.

Sources: Hockney, "The communication challenge for MPP", 1994 (alpha and beta); Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005 (gamma, and the costs of the algorithms).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.comm.arguments import require_schedule
from drivetrain.comm.counts import host_of_ranks
from drivetrain.comm.schedule import Integers, Messages, Schedule
from drivetrain.errors import ConfigurationError

Floats = NDArray[np.float64]
FORMAT = 1


@dataclass(frozen=True)
class Link:
    """A kind of link: ``latency`` in seconds per message, ``seconds_per_byte`` for its bytes, in each direction."""

    latency: float
    seconds_per_byte: float

    @classmethod
    def of(cls, latency: float, bandwidth: float) -> Link:
        """From a latency in seconds and a bandwidth in bytes per second.

        Raises:
            ConfigurationError: the latency is negative or the bandwidth not positive.
        """
        if not latency >= 0 or not bandwidth > 0:
            raise ConfigurationError(
                f"a link needs a latency of 0 or more and a positive bandwidth, got {latency} s and {bandwidth} B/s."
            )
        return cls(latency, 1 / bandwidth)


@dataclass(frozen=True)
class CostModel:
    """The links of a machine or cluster.

    Args:
        between: From a host to the others, shared by the host's ranks.
        inside: Between two ranks of a host; None: as ``between``, for each rank.
        reduction: Seconds to add one received byte.
    """

    between: Link
    inside: Link | None = None
    reduction: float = 0.0

    def save(self, path: Path | str) -> None:
        """Write the model as JSON."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def of_plain(cls, found: Any) -> CostModel:
        """From the fields as JSON holds them.

        Raises:
            KeyError, TypeError, ValueError: ``found`` holds no model.
        """
        inside = found["inside"]
        near = None if inside is None else _link(inside)
        return cls(_link(found["between"]), near, _number(found["reduction"]))

    @classmethod
    def load(cls, path: Path | str) -> CostModel:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigurationError: there is no such file, or it holds no model.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"cannot read a cost model from {path}: {error}: calibrate again.") from error
        try:
            written = found["format"]
            model = cls.of_plain(found) if written == FORMAT else None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"{path} holds no cost model ({error!r}): calibrate again.") from error
        if model is None:
            raise ConfigurationError(f"{path} is of format {written!r}, not {FORMAT}: calibrate again.")
        return model


def _link(found: Any) -> Link:
    return Link(_number(found["latency"]), _number(found["seconds_per_byte"]))


def _number(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
        raise ValueError(f"{found!r} is no finite number of 0 or more")
    return float(found)


@dataclass(frozen=True)
class Profile:
    """What decides the time of each round, ``(rounds,)`` each, in shares of the tensor.

    ``inside`` is the most that one rank sends or receives inside its host, ``between`` the most that one host sends
    or receives, ``added`` the most that one rank adds; ``crossing`` says whether a message leaves its host, ``staying``
    whether one stays.
    """

    inside: Floats
    between: Floats
    added: Floats
    staying: NDArray[np.bool_]
    crossing: NDArray[np.bool_]

    def seconds(self, size_bytes: float, model: CostModel) -> float:
        """Predicted time for a tensor of ``size_bytes``."""
        near = model.inside or model.between
        inside = self.staying * near.latency + self.inside * (size_bytes * near.seconds_per_byte)
        between = self.crossing * model.between.latency + self.between * (size_bytes * model.between.seconds_per_byte)
        return float(np.maximum(inside, between).sum() + self.added.sum() * size_bytes * model.reduction)


def profile(schedule: Schedule, hosts: Sequence[int] | None = None) -> Profile:
    """Look at every message of ``schedule`` once; then times for all sizes and models are cheap.

    Args:
        schedule: What is to be costed.
        hosts: Number of ranks on each host; None: every rank on a host of its own.

    Raises:
        ConfigurationError: ``schedule`` is none, or ``hosts`` do not add up to the world size.
    """
    n = require_schedule(schedule, "a prediction").world_size
    host = np.arange(n) if hosts is None else host_of_ranks(n, hosts)
    rows = np.array([_round_row(each.messages(), host, n) for each in schedule.rounds]).reshape(-1, 5)
    shares = rows[:, :3] / schedule.chunks
    return Profile(shares[:, 0], shares[:, 1], shares[:, 2], rows[:, 3] > 0, rows[:, 4] > 0)


def _round_row(messages: Messages, host: Integers, n: int) -> tuple[int, int, int, int, int]:
    source, destination, chunks = messages.source, messages.destination, messages.count
    if len(messages) == 0:
        return 0, 0, 0, 0, 0
    crossing = host[source] != host[destination]
    near, far = chunks * ~crossing, chunks * crossing
    inside = max(_most(source, near), _most(destination, near))
    between = max(_most(host[source], far), _most(host[destination], far))
    return inside, between, _most(destination, chunks * messages.add), int(not crossing.all()), int(crossing.any())


def _most(place: Integers, chunks: Integers) -> int:
    return int(np.bincount(place, chunks).max())


def predict(
    schedule: Schedule, size_bytes: float, model: CostModel | None = None, hosts: Sequence[int] | None = None
) -> float:
    """Seconds that ``schedule`` should take for a tensor of ``size_bytes``.

    Args:
        schedule: What is to be costed.
        size_bytes: Of the tensor.
        model: The links; None takes this machine's, as ``python -m drivetrain.comm calibrate`` found them over Gloo.
        hosts: As :func:`profile` takes it.

    Raises:
        ConfigurationError: ``schedule``, ``size_bytes`` or ``model`` are none, ``hosts`` do not add up to the world
            size, or this machine was never calibrated.
    """
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int | float | np.number) or not size_bytes >= 0:
        raise ConfigurationError(f"size_bytes={size_bytes!r} is no number of bytes: pass 0 or more, such as 25e6.")
    found = profile(schedule, hosts)
    if model is None:
        from drivetrain.comm.calibration import needed

        model = needed("cpu").model
    if not isinstance(model, CostModel):
        raise ConfigurationError(f"model={model!r} is no CostModel: make one, such as CostModel(Link.of(50e-6, 1e9)).")
    return found.seconds(float(size_bytes), model)


def bus_bandwidth(kind: str, world_size: int, size_bytes: float, seconds: float) -> float:
    """Bytes per second that each link must have carried for an optimal algorithm to take this long: comparable between
    numbers of ranks. The factors are those of NVIDIA's nccl-tests.
    """
    shares = {"all_reduce": 2 * (world_size - 1) / world_size}
    shares |= dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter"), (world_size - 1) / world_size)
    return shares.get(kind, 1.0) * size_bytes / seconds if seconds > 0 else float("inf")


@dataclass(frozen=True)
class Measurement:
    """That ``schedule`` took ``seconds`` for a tensor of ``size_bytes`` on these ``hosts`` (as in :func:`profile`)."""

    schedule: Schedule
    size_bytes: float
    seconds: float
    hosts: Sequence[int] | None = None


def fit(measurements: Sequence[Measurement]) -> CostModel:
    """The model that explains ``measurements`` best: least squares of relative errors, no number below zero.

    In a round with messages of both kinds the time is taken to be that of the messages between hosts. Kinds of link
    that were not measured are taken to be as the other.

    Raises:
        ConfigurationError: nothing was measured, or a time is not positive.
    """
    if not measurements or min(one.seconds for one in measurements) <= 0:
        raise ConfigurationError("a cost model is fitted to at least one measurement, each of a positive time.")
    profiles: dict[tuple[int, tuple[int, ...] | None], Profile] = {}
    rows = []
    for one in measurements:
        key = id(one.schedule), None if one.hosts is None else tuple(one.hosts)
        if key not in profiles:
            profiles[key] = profile(one.schedule, one.hosts)
        found = profiles[key]
        only = ~found.crossing
        row = [
            found.crossing.sum(),
            found.between.sum() * one.size_bytes,
            (found.staying & only).sum(),
            (found.inside * only).sum() * one.size_bytes,
            found.added.sum() * one.size_bytes,
        ]
        rows.append(np.array(row, np.float64) / one.seconds)
    matrix = np.array(rows)
    between_latency, between_byte, inside_latency, inside_byte, reduction = _non_negative(matrix)
    between, inside = Link(between_latency, between_byte), Link(inside_latency, inside_byte)
    if not matrix[:, :2].any():
        between = inside
    return CostModel(between, inside if matrix[:, 2:4].any() else None, reduction)


def _non_negative(matrix: Floats) -> list[float]:
    """The ``x >= 0`` with the least ``|matrix x - 1|``.

    The best point has some columns at zero and is the plain least-squares solution of the others, so trying all of the
    few choices of columns finds it.
    """
    ones = np.ones(len(matrix))
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    best, error = np.zeros(matrix.shape[1]), float(len(matrix))
    for kept in itertools.product([False, True], repeat=matrix.shape[1]):
        which = np.array(kept)
        if not which.any():
            continue
        solved = np.linalg.lstsq((matrix / scale)[:, which], ones, rcond=None)[0]
        if (solved < 0).any():
            continue
        found = np.zeros(matrix.shape[1])
        found[which] = solved
        miss = float(np.square(matrix / scale @ found - 1).sum())
        if miss < error * (1 - 1e-9):
            best, error = found / scale, miss
    return [float(value) for value in best]
