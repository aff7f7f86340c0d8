"""What ``self.log`` collects, and its reduction over batches and ranks.

Logging a value costs a list append: nothing is computed, copied to the host or sent. At a boundary (every
``log_every_n_steps`` optimizer steps, and at an epoch's end) each rank packs its sums and weights into one fp64
vector; the strategy gathers the vectors and every rank combines them alike, matching values by *name*: ranks that
logged different names take part with what they have.
"""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.comm.communicator import Communicator
from drivetrain.errors import ConfigurationError, TrainingError, nearest

# Where values may be logged and what is the default there: a training batch's (by step), an evaluation batch's (by
# epoch, also by step on demand), the others (by epoch only). ``optimizer_step`` stands for all that runs within it.
_BATCH_HOOKS = frozenset(
    {
        "training_step",
        "optimizer_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    }
)
_EVALUATION_HOOKS = frozenset(
    f"{prefix}{stage}{moment}"
    for stage in ("validation", "test")
    for prefix, moment in (("", "_step"), ("on_", "_batch_start"), ("on_", "_batch_end"))
)
_EPOCH_HOOKS = frozenset(
    f"on_{stage}{moment}"
    for stage in ("train", "validation", "test")
    for moment in ("_start", "_epoch_start", "_epoch_end")
)
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
_REDUCTIONS |= {"amax": "max", "amin": "min", "nanmean": "mean", "gmean": "gmean"}
_SAID = ("mean", "sum", "max", "min", "gmean")
_MEANS = frozenset({"mean", "gmean"})  # the geometric mean is kept as the mean of logarithms until ranks are combined
_OBJECT = "object:"  # the reduction of a metric that reduces itself, followed by its path in the module
_FOLD = 512  # pending values are folded into the sum when there are this many, to bound memory


@dataclass(frozen=True, slots=True)
class Column:
    """One name's contribution of a rank: ``total`` with ``weight``, and what the name is for.

    Attributes:
        title: the name without ``_step`` or ``_epoch``.
        prog_bar, logger: where the value is shown.
        over_ranks: whether the ranks' values are combined; else each rank knows its own, and the first rank's counts
            where they must agree.
    """

    reduction: str
    total: float
    weight: float
    title: str
    prog_bar: bool = False
    logger: bool = True
    over_ranks: bool = True

    def kind(self) -> list[Any]:
        """All but the numbers, as plain data."""
        return [self.reduction, self.title, self.prog_bar, self.logger, self.over_ranks]


@dataclass(slots=True)
class Exchange:
    """What the ranks learnt of each other: global values by name with their columns, each rank's flags and series.
    ``own``: this rank's values of what is not combined over ranks."""

    values: dict[str, float]
    columns: dict[str, Column]
    flags: list[list[float]]
    series: list[list[list[float]]]
    own: dict[str, float] = field(default_factory=dict)

    def joined(self, other: Exchange) -> Exchange:
        """With the values of another exchange of the same moment."""
        columns = {**self.columns, **other.columns}
        return replace(self, values=self.values | other.values, columns=columns, own=self.own | other.own)


@dataclass(slots=True)
class Entry:
    """One logged name."""

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduction: str
    loader: int | None
    over_ranks: bool = True
    at: int | None = None  # the loader in whose batches it is logged, of several
    given: tuple[Any, ...] = ()  # the options as they were given, which must stay the same
    metric: Any = None  # a torchmetrics metric, which reduces itself
    path: str = ""  # of that metric in the module
    pending: list[tuple[Any, float]] = field(default_factory=list)
    total: float = 0.0
    weight: float = 0.0
    steps: list[tuple[int, Any, float]] = field(default_factory=list)  # (batch, value, weight), newest last

    @property
    def title(self) -> str:
        return self.name if self.loader is None else f"{self.name}/dataloader_idx_{self.loader}"

    def forked(self, suffix: str) -> str:
        base = f"{self.name}_{suffix}" if self.on_step and self.on_epoch else self.name
        return base if self.loader is None else f"{base}/dataloader_idx_{self.loader}"

    def column(self, step: tuple[int, Any, float] | None = None) -> Column:
        """The epoch's contribution, or that of one ``(batch, value, weight)``."""
        total, weight = self.total, self.weight
        if step is not None:
            value = float(step[1])
            total, weight = (value * step[2], step[2]) if self.reduction in _MEANS else (value, 1.0)
        elif self.metric is not None:
            return Column(_OBJECT + self.path, 0.0, 1.0, self.title, self.prog_bar, self.logger)
        return Column(self.reduction, total, weight, self.title, self.prog_bar, self.logger, self.over_ranks)

    def fold(self) -> None:
        """Bring the pending values into ``total`` and ``weight``.

        One after the other, so that the rounding does not depend on when it is done: a checkpoint folds too.
        """
        if not self.pending:
            return
        values = _host([value for value, _ in self.pending])
        weights = [weight for _, weight in self.pending]
        self.pending.clear()
        if self.reduction in _MEANS:
            for value, weight in zip(values, weights, strict=True):
                self.total += value * weight
                self.weight += weight
        elif self.reduction == "sum":
            for value in values:
                self.total += value
            self.weight = 1.0
        else:
            # numpy's and torch's, unlike Python's: NaN wins.
            best = torch.tensor([*values, self.total] if self.weight else values, dtype=torch.float64)
            self.total = float(best.max() if self.reduction == "max" else best.min())
            self.weight = 1.0


def _host(values: list[Any]) -> list[float]:
    """One-element values as numbers, with one transfer per device."""
    tensors = [v.reshape(()) for v in values if isinstance(v, Tensor)]
    if len(tensors) == len(values):
        return torch.stack([t.double() for t in tensors]).tolist()
    return [float(v) for v in values]


class Metrics:
    """The store of a stage (training, or one evaluation).

    Attributes:
        gather: the strategy's ``gather``.
        communicator: gathers plain data, for ranks that logged different names.
        device: where gathered vectors live.
        counts: whether this rank's values weigh anything; not where another rank logs the same.
        over_ranks: whether values are combined over ranks unasked.
    """

    def __init__(
        self,
        gather: Callable[[Tensor], list[Tensor]],
        communicator: Communicator,
        device: torch.device,
        current_hook: Callable[[], str | None],
        named_modules: Callable[[], Iterable[tuple[str, Any]]],
        counts: bool = True,
        over_ranks: bool = True,
    ) -> None:
        self.counts, self.over_ranks = counts, over_ranks
        self.gather, self.communicator, self.device, self.current_hook = gather, communicator, device, current_hook
        self.named_modules = named_modules
        self.entries: dict[tuple[str | None, str, int | None], Entry] = {}
        self.batch: Any = None  # the MicroBatch at hand: its weight is the default weight of logged values
        self.fraction = 1.0  # of that batch's samples, where a strategy calls the step for pieces of it
        self.joined: int | None = None  # the number of the step that all batches at hand belong to (a round)
        self.several_loaders = False

    # -- collecting ---------------------------------------------------------------------------------------------
    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        add_dataloader_idx: bool,
        batch_size: int | None,
        sync_dist: bool = False,
    ) -> None:
        hook = self.current_hook()
        batch = self.batch
        loader = batch.loader if self.several_loaders and add_dataloader_idx and batch is not None else None
        key = (hook, name, loader)
        entry = self.entries.get(key)
        given = (prog_bar, logger, on_step, on_epoch, reduce_fx)
        if entry is None:
            entry = self.entries[key] = self._new(
                name, value, hook, prog_bar, logger, on_step, on_epoch, reduce_fx, loader
            )
            entry.given = given
            entry.over_ranks = self.over_ranks or sync_dist
            entry.at = batch.loader if self.several_loaders and batch is not None else None
        elif entry.given != given:
            if entry.given:
                raise TrainingError(
                    f"self.log({name!r}, ...) is called in {hook} with other options than before: give the same ones"
                    " each time, or log under another name."
                )
            entry.given = given  # it comes from a checkpoint
        if entry.metric is not None:
            if entry.on_step and value._forward_cache is None and self.over_ranks:
                raise TrainingError(
                    f"self.log({name!r}, ...) takes the step's value of a metric that was not called on a batch: call"
                    " the metric instead of its update(), or log with on_step=False."
                )
            if not entry.on_step or value._forward_cache is None:  # Lightning has no step's value of it, and goes on
                return
            value = value._forward_cache
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise TrainingError(
                    f"self.log({name!r}, ...) takes a scalar, this tensor has shape {tuple(value.shape)}: log"
                    " value.mean() or one element."
                )
            value = value.detach()
        elif not isinstance(value, (int, float)):
            try:
                value = float(value)
            except (TypeError, ValueError):
                raise TrainingError(
                    f"self.log({name!r}, ...) takes a number or a one-element tensor, not {type(value).__name__}."
                ) from None
        if entry.reduction == "gmean":
            value = value.double().log() if isinstance(value, Tensor) else math.log(value)
        if batch is None:
            weight = float(batch_size or 1)
        elif batch_size is None:
            weight = batch.weight * self.fraction
        else:
            weight = batch_size / batch.copies
        if entry.reduction == "sum" and batch is not None and batch.copies > 1:
            value = value / batch.copies
        if entry.on_epoch and entry.metric is None:
            entry.pending.append((value, weight))
            if len(entry.pending) >= _FOLD:
                entry.fold()
        if entry.on_step:
            index = self.joined if self.joined is not None else batch.index if batch is not None else 0
            pieces = self.fraction != 1.0 or self.joined is not None
            if hook not in _BATCH_HOOKS:
                entry.steps.append((index, value, weight))
            elif pieces and entry.steps and entry.steps[-1][0] == index:
                entry.steps = [_joined(entry.reduction, entry.steps[-1], (index, value, weight))]
            else:
                entry.steps = [(index, value, weight)]  # training: only the newest is ever written

    def _new(
        self,
        name: str,
        value: Any,
        hook: str | None,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        loader: int | None,
    ) -> Entry:
        by_batch = hook in _BATCH_HOOKS
        if on_step is None:
            on_step = by_batch
        if on_epoch is None:
            on_epoch = not by_batch or not on_step
        if not by_batch and hook not in _EVALUATION_HOOKS and hook not in _EPOCH_HOOKS:
            raise TrainingError(
                f"self.log({name!r}, ...) cannot be called {'in ' + hook if hook else 'here'}: log in a training,"
                " validation or test step, or in the start, batch or epoch hooks of these stages."
            )
        if not on_step and not on_epoch:
            raise TrainingError(
                f"self.log({name!r}, on_step=False, on_epoch=False) in {hook} would go nowhere: set one of them."
            )
        if on_step and hook in _EPOCH_HOOKS:
            raise TrainingError(
                f"self.log({name!r}, on_step=True) cannot be called in {hook}, which belongs to no step: leave on_step"
                " out."
            )
        called = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "?")
        if called not in _REDUCTIONS:
            raise TrainingError(f"self.log({name!r}, reduce_fx={called!r}): {nearest(str(called), _SAID)}")
        metric = None
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
            metric = value
        entry = Entry(name, bool(on_step), bool(on_epoch), prog_bar, logger, _REDUCTIONS[called], loader)
        if metric is not None:
            found = next((path for path, module in self.named_modules() if module is metric), None)
            if found is None:
                raise TrainingError(
                    f"self.log({name!r}, ...) takes a metric that is no part of the module: assign it to an attribute"
                    " in __init__ (a ModuleDict or ModuleList for several), so that every rank has it."
                )
            entry.metric, entry.path = metric, found
        return entry

    # -- looking at once ----------------------------------------------------------------------------------------
    def current(self, by_step: bool, alone: bool) -> Iterator[tuple[Entry, str, Tensor]]:
        """What this rank logged in the step (or, not ``by_step``, in the epoch) so far, of the loader at hand where
        there are several: entry, name and value. Of several ranks only what each knows for itself."""
        at = self.batch.loader if self.batch is not None and self.several_loaders else None
        for entry in self.entries.values():
            if entry.at != at or (entry.over_ranks and not alone):
                continue
            if by_step:
                if entry.on_step and entry.steps:
                    yield entry, entry.forked("step"), _tensor(entry.steps[-1][1])
            elif entry.on_epoch:
                if entry.metric is not None:
                    if alone and entry.metric._update_count:
                        yield entry, entry.forked("epoch"), entry.metric.compute()
                    continue
                entry.fold()
                if entry.weight:
                    column = entry.column()
                    value = _combine(entry.name, [{entry.name: column}])
                    if value is not None:
                        yield entry, entry.forked("epoch"), _tensor(value)

    # -- reducing -----------------------------------------------------------------------------------------------
    def exchange(
        self,
        columns: dict[str, Column],
        flags: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
        series: list[tuple[float, float]] | None = None,
    ) -> Exchange:
        """Combine over the ranks; every rank must call it at the same point, with as many flags and series items.

        Args:
            columns: this rank's contributions by name; ranks may have different names.
            flags: numbers that every rank wants to see of every other.
            series: ``(total, weight)`` per optimizer step since the last exchange.
        """
        series = series or []
        if not self.counts:
            columns = {name: replace(column, weight=0.0) for name, column in columns.items()}
            series = [(0.0, 0.0) for _ in series]
        if self.communicator.world_size == 1:
            result = Exchange({}, dict(columns), [list(flags)], [[list(item) for item in series]] if series else [])
            tables = [columns]
        else:
            result, tables = self._gathered(columns, flags, series)
        for name in sorted(set().union(*tables)):
            value = _combine(name, tables)
            if value is not None:
                result.values[name] = value
        for name, column in columns.items():
            if not column.over_ranks and (value := _combine(name, [columns])) is not None:
                result.own[name] = value
        return result

    def _gathered(
        self, columns: dict[str, Column], flags: tuple[float, ...], series: list[tuple[float, float]]
    ) -> tuple[Exchange, list[dict[str, Column]]]:
        """All ranks' flags, series and columns; values are not combined yet."""
        names = sorted(columns)
        kinds = repr([(name, columns[name].kind()) for name in names]).encode()
        signature = float(int.from_bytes(hashlib.sha256(kinds).digest()[:6], "big"))
        header = torch.tensor([signature, len(names), len(series), *flags], dtype=torch.float64, device=self.device)
        headers = [t.tolist() for t in self.gather(header)]
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
            flat = torch.tensor(rows, dtype=torch.float64, device=self.device).reshape(-1)
            for numbers in (t.reshape(-1, 2).tolist() for t in self.gather(flat)):
                result.series.append(numbers[cut:])
                if alike:
                    pairs = zip(names, numbers[:cut], strict=True)
                    tables.append({name: replace(columns[name], total=t, weight=w) for name, (t, w) in pairs})
        if not alike:
            mine = [[name, columns[name].total, columns[name].weight, columns[name].kind()] for name in names]
            for listed in self.communicator.all_gather_plain(mine):
                tables.append({n: Column(kind[0], total, weight, *kind[1:]) for n, total, weight, kind in listed})
            for table in tables:
                result.columns = {**table, **result.columns}
        return result, tables

    def step_columns(self, batch: int | None) -> dict[str, Column]:
        """Contributions of the values logged on step in training batch ``batch``; None: the last ones, of any."""
        return {
            entry.forked("step"): entry.column(entry.steps[-1])
            for entry in self.entries.values()
            if entry.on_step and entry.steps and batch in (None, entry.steps[-1][0])
        }

    def latest_columns(self) -> dict[str, Column]:
        """Contributions of the last values that are logged on step only: to be known after an epoch, not written."""
        return {
            entry.forked("step"): replace(entry.column(entry.steps[-1]), logger=False)
            for entry in self.entries.values()
            if entry.on_step and not entry.on_epoch and entry.steps and entry.metric is None
        }

    def epoch_columns(self) -> dict[str, Column]:
        """Contributions of the epoch's values."""
        columns = {}
        for entry in self.entries.values():
            if entry.on_epoch:
                entry.fold()
                columns[entry.forked("epoch")] = entry.column()
        return columns

    def torchmetrics(self, columns: dict[str, Column]) -> Exchange:
        """Values of the logged torchmetrics metrics, which gather their own states; they are reset after.

        ``columns`` are those of the epoch's exchange: they name every metric that any rank logged, and where it is in
        the module, so that a rank that had no batch takes part with the metric's empty state.
        """
        found = {name: column for name, column in sorted(columns.items()) if column.reduction.startswith(_OBJECT)}
        if not found:
            return Exchange({}, {}, [], [])
        modules = dict(self.named_modules())
        metrics = {name: modules[column.reduction.removeprefix(_OBJECT)] for name, column in found.items()}
        values = {}
        for name, metric in metrics.items():
            metric.process_group = self.communicator.group  # not the whole job: ranks that only serve are not here
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*was called before the.*")  # this rank had no batch
                value = metric.compute()
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise TrainingError(
                    f"self.log({name!r}, ...) takes a metric whose value is a scalar, this one gives {what}: log its"
                    " parts, or a MetricCollection through log_dict."
                )
            values[name] = float(value)
        for metric in metrics.values():
            metric.reset()
        return Exchange(values, found, [], [])

    def steps_by_batch(self, written: Callable[[Entry], bool]) -> dict[int, dict[str, Column]]:
        """Contributions of values logged on step in an evaluation, by batch; without what is ``written`` already."""
        by_batch: dict[int, dict[str, Column]] = {}
        for entry in self.entries.values():
            if entry.on_step and not written(entry):
                for item in entry.steps:
                    by_batch.setdefault(item[0], {})[entry.forked("step")] = entry.column(item)
        return by_batch

    def reset(self) -> None:
        """Forget the values; the names and their options stay."""
        for entry in self.entries.values():
            entry.pending.clear()
            entry.steps.clear()
            entry.total = entry.weight = 0.0

    # -- resuming in mid-epoch ----------------------------------------------------------------------------------
    def state_dict(self) -> list[list[Any]]:
        """This rank's epoch sums so far and newest values by step, as plain data."""
        state = []
        for (hook, _, _), e in self.entries.items():
            if e.metric is None:
                e.fold()
                options = [e.name, e.on_step, e.on_epoch, e.prog_bar, e.logger, e.reduction, e.loader, e.over_ranks]
                steps = [[batch, float(value), weight] for batch, value, weight in e.steps[-1:]]
                state.append([hook, options, e.total, e.weight, steps])
        return state

    def load_state_dict(self, states: list[list[list[Any]]]) -> None:
        """Take up what :meth:`state_dict` gave on one rank, or on several that this one stands for now."""
        for hook, options, total, weight, steps in (item for state in states for item in state):
            entry = Entry(*options)
            known = self.entries.setdefault((hook, entry.name, entry.loader), entry)
            if weight and known.weight and known.reduction in ("max", "min"):
                known.total = (max if known.reduction == "max" else min)(known.total, total)
            elif weight:
                known.total, known.weight = known.total + total, known.weight + weight
            for step in map(tuple, steps):
                same = known.steps and known.steps[-1][0] == step[0]
                known.steps = [_joined(known.reduction, known.steps[-1], step) if same else step]


def _joined(reduction: str, a: tuple[int, Any, float], b: tuple[int, Any, float]) -> tuple[int, Any, float]:
    """Two pieces of one batch as one value."""
    (index, first, weight), (_, second, more) = a, b
    if reduction in _MEANS:
        return index, (first * weight + second * more) / (weight + more), weight + more
    values = (float(first), float(second))
    return index, sum(values) if reduction == "sum" else max(values) if reduction == "max" else min(values), 1.0


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _combine(name: str, tables: list[dict[str, Column]]) -> float | None:
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
    if kind.startswith(_OBJECT):
        return None
    if kind in _MEANS:
        mean = sum(totals) / sum(column.weight for column in found)
        return mean if kind == "mean" else float(torch.tensor(mean, dtype=torch.float64).exp())
    return sum(totals) if kind == "sum" else max(totals) if kind == "max" else min(totals)
