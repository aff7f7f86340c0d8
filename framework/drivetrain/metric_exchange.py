"""What the ranks tell each other of what was logged: sums and weights, combined alike on every rank, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import ConfigurationError, TrainingError

MEANS = frozenset({"mean", "gmean"})  # the geometric mean is kept as the mean of logarithms until ranks are combined
OBJECT = "object:"  # the reduction of a metric that reduces itself, followed by its place


def of_metric(path: str, loader: int | None) -> str:
    """The reduction of a metric that reduces itself: its ``path`` in the module, and the loader, of several, in whose
    batches it was logged."""
    return f"{OBJECT}{path}@{'' if loader is None else loader}"


def metric_at(reduction: str) -> tuple[str, int | None]:
    """Path and loader that :func:`of_metric` was given."""
    path, _, loader = reduction.removeprefix(OBJECT).rpartition("@")
    return path, int(loader) if loader else None


@dataclass(frozen=True, slots=True)
class Column:
    """One name's contribution of a rank: ``total`` with ``weight``, and what the name is for. The total of a metric
    that reduces itself says whether it was reset since its value was made known.

    Attributes:
        title: the name without ``_step`` or ``_epoch``.
        prog_bar, logger: where the value is shown.
        over_ranks: whether the ranks' values are combined; else each rank knows its own, and the first rank's counts
            where they must agree.
        double: whether what was logged was of double precision.
        written: whether loggers write the value where ranks combine it; else it is made known only. Ranks that did not
            log the name, such as a pipeline's first, have it from those that did.
        at: the loader, of several, that it is of; None: of none, or of all.
    """

    reduction: str
    total: float
    weight: float
    title: str
    prog_bar: bool = False
    logger: bool = True
    over_ranks: bool = True
    double: bool = False
    written: bool = True
    at: int | None = None

    def kind(self) -> list[Any]:
        """All but the numbers, as plain data."""
        return [
            self.reduction,
            self.title,
            self.prog_bar,
            self.logger,
            self.over_ranks,
            self.double,
            self.written,
            self.at,
        ]


@dataclass(slots=True)
class Exchange:
    """What the ranks learnt of each other: global values by name with their columns, each rank's flags and series.
    ``own``: this rank's values of what is not combined over ranks. ``lost``: names of metric objects that a rank has
    reset since their values were made known."""

    values: dict[str, float]
    columns: dict[str, Column]
    flags: list[list[float]]
    series: list[Sequence[Sequence[float]]]
    own: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def joined(self, other: Exchange) -> Exchange:
        """With the values of another exchange of the same moment."""
        columns = {**self.columns, **other.columns}
        values = in_order(self.values | other.values, columns)
        return replace(self, values=values, columns=columns, own=self.own | other.own)

    def only(self, names: Collection[str]) -> Exchange:
        """Without the values that are not called so."""
        values, own = ({name: v for name, v in known.items() if name in names} for known in (self.values, self.own))
        return replace(self, values=values, own=own)


def in_order(values: dict[str, float], columns: Iterable[str]) -> dict[str, float]:
    """``values`` in the order of ``columns``, in which they were logged."""
    return {name: values[name] for name in columns if name in values}


def exchange(
    gather: Callable[[Tensor], list[Tensor]],
    communicator: Communicator,
    device: torch.device,
    columns: dict[str, Column],
    flags: tuple[float, ...],
    series: list[tuple[float, float]],
    alike: Sequence[Sequence[int]] = (),
) -> Exchange:
    """Combine over the ranks; every rank must call it at the same point, with as many flags and series items.

    Args:
        gather: the strategy's ``gather``.
        communicator: gathers plain data, for ranks that logged different names.
        device: where gathered vectors live.
        columns: this rank's contributions by name; ranks may have different names.
        flags: numbers that every rank wants to see of every other.
        series: ``(total, weight)`` per optimizer step since the last exchange.
        alike: groups of ranks that log about the same samples, where they are not all.
    """
    if communicator.world_size == 1:
        result = Exchange({}, dict(columns), [list(flags)], [series] if series else [])
        tables = [columns]
    else:
        result, tables = _gathered(gather, communicator, device, columns, flags, series)
    for name in result.columns:
        value = combine(name, _heard(name, tables, alike))
        if value is not None:
            result.values[name] = value
        elif any(name in t and t[name].reduction.startswith(OBJECT) and t[name].total for t in tables):
            result.lost.add(name)
    for name, column in columns.items():
        if not column.over_ranks and (value := combine(name, [columns])) is not None:
            result.own[name] = value
    return result


def _gathered(
    gather: Callable[[Tensor], list[Tensor]],
    communicator: Communicator,
    device: torch.device,
    columns: dict[str, Column],
    flags: tuple[float, ...],
    series: list[tuple[float, float]],
) -> tuple[Exchange, list[dict[str, Column]]]:
    """All ranks' flags, series and columns; values are not combined yet."""
    names = sorted(columns)
    kinds = repr([(name, columns[name].kind()) for name in names]).encode()
    signature = float(int.from_bytes(hashlib.sha256(kinds).digest()[:6], "big"))
    header = torch.tensor([signature, len(names), len(series), *flags], dtype=torch.float64, device=device)
    headers = [t.tolist() for t in gather(header)]
    if any(h[2] != headers[0][2] for h in headers):
        counts = ", ".join(f"rank {rank}: {int(h[2])}" for rank, h in enumerate(headers))
        raise TrainingError(
            f"the ranks took different numbers of steps ({counts}): every rank must get the same number of batches."
        )
    result = Exchange({}, dict(columns), [h[3:] for h in headers], [])
    alike = all(h[:2] == headers[0][:2] for h in headers)
    rows = [[columns[n].total, columns[n].weight] for n in names] if alike else []
    cut = len(rows)
    rows += [list(item) for item in series]
    tables: list[dict[str, Column]] = []
    if rows:
        flat = torch.tensor(rows, dtype=torch.float64, device=device).reshape(-1)
        for numbers in (t.reshape(-1, 2).tolist() for t in gather(flat)):
            result.series.append(numbers[cut:])
            if alike:
                pairs = zip(names, numbers[:cut], strict=True)
                tables.append({name: replace(columns[name], total=t, weight=w) for name, (t, w) in pairs})
    if not alike:
        mine = [[name, columns[name].total, columns[name].weight, columns[name].kind()] for name in names]
        for listed in communicator.all_gather_plain(mine):
            tables.append({n: Column(kind[0], total, weight, *kind[1:]) for n, total, weight, kind in listed})
        for table in tables:
            result.columns |= {name: column for name, column in table.items() if name not in result.columns}
    return result, tables


def _heard(name: str, tables: list[dict[str, Column]], alike: Sequence[Sequence[int]]) -> list[dict[str, Column]]:
    """The contributions to ``name`` that count: of ranks that log about the same samples the last one's that did."""
    if not alike:
        return tables
    logged = ([tables[rank] for rank in ranks if name in tables[rank] and tables[rank][name].weight] for ranks in alike)
    return [table for group in logged for table in group[-1:]]


def combine(name: str, tables: list[dict[str, Column]]) -> float | None:
    """The value of ``name`` over the ranks whose contributions ``tables`` are; None where none of them has any.

    Raises:
        ConfigurationError: they reduce it differently.
    """
    found = [table[name] for table in tables if name in table and table[name].weight > 0]
    if not found:
        return None
    kinds = {column.reduction for column in found}
    if len(kinds) > 1:
        raise ConfigurationError(f"{name!r} is logged with different reductions on different ranks: {sorted(kinds)}.")
    if not found[0].over_ranks:
        found = found[:1]
    totals = [column.total for column in found]
    kind = kinds.pop()
    if kind.startswith(OBJECT):
        return None
    if kind in MEANS:
        mean = sum(totals) / sum(column.weight for column in found)
        return mean if kind == "mean" else float(torch.tensor(mean, dtype=torch.float64).exp())
    return sum(totals) if kind == "sum" else max(totals) if kind == "max" else min(totals)
