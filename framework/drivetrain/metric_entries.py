"""One logged name: where it may be logged, what its options mean there, and how its values are added up on a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import MetricError, nearest
from drivetrain.metric_exchange import MEANS, Column, of_metric

# Where values may be logged and what is the default there: a training batch's (by step), an evaluation batch's (by
# epoch, also by step on demand), the others (by epoch only). ``optimizer_step`` stands for all that runs within it.
BATCH_HOOKS = frozenset(
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
EVALUATION_HOOKS = frozenset(
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
    double: bool = False  # whether a value was of double precision
    at: int | None = None  # the loader in whose batches it is logged, of several
    given: tuple[Any, ...] = ()  # the options as they were given, which must stay the same
    metric: Any = None  # a torchmetrics metric, which reduces itself
    path: str = ""  # of that metric in the module
    read_with: int | None = None  # the loader in whose batches an evaluation logs that metric, a single one, too
    settled: Any = None  # value of that metric when its loader was read, or when it was looked at first after that
    known_at: int = 0  # updates of that metric when its value of the epoch was made known to hooks, over several ranks
    logged: bool = False  # since the values were forgotten last
    anew: bool = False  # whether the loop has reset that metric since it was logged, as its epoch is over
    pending: list[tuple[Any, float]] = field(default_factory=list)
    total: float = 0.0
    weight: float = 0.0
    steps: list[tuple[int, Any, float]] = field(default_factory=list)  # (batch, value, weight), newest last
    former: list[tuple[int, Any, float]] = field(default_factory=list)  # in training: of the batch before that
    met: tuple[int, Any, float] | None = None  # what the ranks combined last

    @property
    def title(self) -> str:
        return self.name if self.loader is None else f"{self.name}/dataloader_idx_{self.loader}"

    def forked(self, suffix: str) -> str:
        base = f"{self.name}_{suffix}" if self.on_step and self.on_epoch else self.name
        return base if self.loader is None else f"{base}/dataloader_idx_{self.loader}"

    def means(
        self,
        hook: str | None,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        *ranks: bool,
    ) -> bool:
        """Whether these options say of a name that is logged in ``hook`` what the entry has, if in other words;
        ``ranks``: which ranks have a part in it."""
        said = (prog_bar, logger, *_moments(hook, on_step, on_epoch), _REDUCTIONS.get(_called(reduce_fx)), *ranks)
        has = (self.prog_bar, self.logger, self.on_step, self.on_epoch, self.reduction, *self.given[5:])
        return said == has

    def column(self, step: tuple[int, Any, float] | None = None) -> Column:
        """The epoch's contribution, or that of one ``(batch, value, weight)``."""
        total, weight = self.total, self.weight
        if step is not None:
            value, share = float(step[1]), float(step[2])
            total, weight = (value * share, share) if self.reduction in MEANS else (value, 1.0)
        elif self.metric is not None:
            loader = self.read_with if self.at is None else self.at
            lost = float(getattr(self.metric, "_update_count", 0) < self.known_at)
            return Column(of_metric(self.path, loader), lost, 1.0, self.title, self.prog_bar, self.logger, at=self.at)
        shown = (self.title, self.prog_bar, self.logger)
        return Column(self.reduction, total, weight, *shown, self.over_ranks, self.double, at=self.at)

    def fold(self) -> None:
        """Bring the pending values into ``total`` and ``weight``.

        One after the other, so that the rounding does not depend on when it is done: a checkpoint folds too.
        """
        if not self.pending:
            return
        values = _host([value for value, _ in self.pending])
        weights = _host([weight for _, weight in self.pending])  # tensors, where a module counted its samples there
        self.pending.clear()
        if self.reduction in MEANS:
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


def declared(
    name: str,
    value: Any,
    hook: str | None,
    prog_bar: bool,
    logger: bool,
    on_step: bool | None,
    on_epoch: bool | None,
    reduce_fx: Any,
    loader: int | None,
    named_modules: Callable[[], Iterable[tuple[str, Any]]],
) -> Entry:
    """The entry of a name that is logged in ``hook`` for the first time, with the defaults of that hook.

    Raises:
        MetricError: it cannot be logged there or so.
    """
    on_step, on_epoch = _moments(hook, on_step, on_epoch)
    if hook not in BATCH_HOOKS and hook not in EVALUATION_HOOKS and hook not in _EPOCH_HOOKS:
        raise MetricError(
            f"self.log({name!r}, ...) cannot be called {'in ' + hook if hook else 'here'}: log in a training,"
            " validation or test step, or in the start, batch or epoch hooks of these stages."
        )
    if loader is not None and "/dataloader_idx_" in name:
        raise MetricError(
            f"self.log({name!r}, ...) names a loader, which is added to it: leave that out, or set"
            " add_dataloader_idx=False."
        )
    if not on_step and not on_epoch:
        raise MetricError(
            f"self.log({name!r}, on_step=False, on_epoch=False) in {hook} would go nowhere: set one of them."
        )
    if on_step and hook in _EPOCH_HOOKS:
        raise MetricError(
            f"self.log({name!r}, on_step=True) cannot be called in {hook}, which belongs to no step: leave on_step out."
        )
    called = _called(reduce_fx)
    if called not in _REDUCTIONS:
        raise MetricError(f"self.log({name!r}, reduce_fx={called!r}): {nearest(str(called), _SAID)}")
    metric = None
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
        metric = value
    entry = Entry(name, on_step, on_epoch, prog_bar, logger, _REDUCTIONS[called], loader)
    if metric is not None:
        found = next((path for path, module in named_modules() if module is metric), None)
        if found is None:
            raise MetricError(
                f"self.log({name!r}, ...) takes a metric that is no part of the module: assign it to an attribute"
                " in __init__ (a ModuleDict or ModuleList for several), so that every rank has it."
            )
        entry.metric, entry.path = metric, found
    return entry


def _moments(hook: str | None, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """``on_step`` and ``on_epoch`` with the defaults of the hook."""
    by_batch = hook in BATCH_HOOKS
    on_step = by_batch if on_step is None else bool(on_step)
    return on_step, (not by_batch or not on_step) if on_epoch is None else bool(on_epoch)


def _called(reduce_fx: Any) -> str:
    return reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "?")


def joined(reduction: str, a: tuple[int, Any, float], b: tuple[int, Any, float]) -> tuple[int, Any, float]:
    """Two pieces of one batch as one value."""
    (index, first, weight), (_, second, more) = a, b
    if reduction in MEANS:
        return index, (first * weight + second * more) / (weight + more), weight + more
    values = (float(first), float(second))
    return index, sum(values) if reduction == "sum" else max(values) if reduction == "max" else min(values), 1.0
