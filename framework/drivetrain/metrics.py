"""What ``self.log`` collects, and its reduction over batches and ranks.

Logging a value costs a copy on its device and a list append: nothing is computed, copied to the host or sent. At a
boundary (every ``log_every_n_steps`` optimizer steps, and at an epoch's end) each rank packs its sums and weights into
one fp64 vector; the strategy gathers the vectors and every rank combines them alike, matching values by *name*: ranks
that logged different names take part with what they have.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drivetrain import metric_states
from drivetrain.comm.communicator import Communicator
from drivetrain.errors import MetricError, PossibleUserWarning, TrainingError
from drivetrain.metric_entries import BATCH_HOOKS, EVALUATION_HOOKS, Entry, declared, joined
from drivetrain.metric_exchange import OBJECT, Column, Exchange, combine, exchange, metric_at
from drivetrain.rank_zero import rank_zero_warn

__all__ = ["Column", "Entry", "Exchange", "Metrics"]

_FOLD = 512  # pending values are folded into the sum when there are this many, to bound memory


class Metrics:
    """The store of a stage (training, or one evaluation).

    Attributes:
        gather: the strategy's ``gather``.
        communicator: gathers plain data, for ranks that logged different names.
        device: where gathered vectors live.
        counts: whether this rank's values weigh anything; not where another rank logs the same.
        over_ranks: whether values are combined over ranks unasked.
        pools: whether one name may be logged over several loaders, whose values are then reduced together.
        alike: the strategy's groups of ranks that log about the same samples.
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
        pools: bool = True,
        alike: Sequence[Sequence[int]] = (),
    ) -> None:
        self.alike = alike
        self.counts, self.over_ranks, self.pools = counts, over_ranks, pools
        self.gather, self.communicator, self.device, self.current_hook = gather, communicator, device, current_hook
        self.named_modules = named_modules
        self.entries: dict[tuple[str | None, str, int | None], Entry] = {}
        self.batch: Any = None  # the MicroBatch at hand: its weight is the default weight of logged values
        self.fraction = 1.0  # of that batch's samples, where a strategy calls the step for pieces of it
        self.joined: int | None = None  # the number of the step that all batches at hand belong to (a round)
        self.several_loaders = False
        self._told: set[str] = set()
        self._held: dict[int, dict[str, Any]] = {}  # by loader: this rank's metrics when it was read

    def _tell_of_own_values(self, name: str) -> None:
        """Of an epoch's value that is each rank's own, where there are several: once."""
        if self.communicator.world_size > 1 and name not in self._told:
            self._told.add(name)
            rank_zero_warn(
                f"self.log({name!r}, ...) gives each rank a value of its own for the epoch: with sync_dist=True it is"
                " the mean over all.",
                category=PossibleUserWarning,
                stacklevel=5,
            )

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
        meant_for_one: bool = False,
    ) -> None:
        hook = self.current_hook()
        batch = self.batch
        loader = batch.loader if self.several_loaders and add_dataloader_idx and batch is not None else None
        key = (hook, name, loader)
        entry = self.entries.get(key)
        combined = sync_dist and self.communicator.world_size > 1
        given = (prog_bar, logger, on_step, on_epoch, reduce_fx, combined, meant_for_one)
        if entry is None:
            _scalar(name, value)
            entry = self.entries[key] = declared(
                name, value, hook, prog_bar, logger, on_step, on_epoch, reduce_fx, loader, self.named_modules
            )
            entry.given = given
            entry.over_ranks = self.over_ranks or sync_dist
            entry.at = batch.loader if self.several_loaders and batch is not None else None
            if entry.on_epoch and entry.metric is None and not (entry.over_ranks or meant_for_one):
                self._tell_of_own_values(name)
        elif entry.given != given:
            if entry.given and not entry.means(hook, *given):
                raise MetricError(
                    f"self.log({name!r}, ...) is called in {hook} with other options than before: give the same ones"
                    " each time, or log under another name."
                )
            entry.given = given  # the same in other words, or it comes from a checkpoint
        if not self.pools and self.several_loaders and batch is not None and entry.at != batch.loader:
            raise MetricError(
                f"self.log({name!r}, add_dataloader_idx=False) is called in {hook} for several loaders: give each"
                " loader a name of its own, or leave add_dataloader_idx out."
            )
        if hasattr(value, "_forward_cache") != (entry.metric is not None):
            raise MetricError(
                f"self.log({name!r}, ...) is given a metric and another kind of value in {hook}: give each a name of"
                " its own."
            )
        entry.logged, entry.anew = True, False
        if entry.metric is not None:
            entry.read_with = batch.loader if batch is not None and hook in EVALUATION_HOOKS else None
            if entry.on_step and value._forward_cache is None and self.over_ranks:
                raise TrainingError(
                    f"self.log({name!r}, ...) takes the step's value of a metric that was not called on a batch: call"
                    " the metric instead of its update(), or log with on_step=False."
                )
            if not entry.on_step or value._forward_cache is None:  # Lightning has no step's value of it, and goes on
                return
            value = value._forward_cache
        value = _scalar(name, value)
        if isinstance(value, Tensor):
            # A copy, for it may be a parameter, or a sum that the module goes on with in place.
            value = value.detach().clone()
            if value.ndim:
                value = value.reshape(())
            entry.double |= value.dtype == torch.float64
        if entry.reduction == "gmean":
            value = value.double().log() if isinstance(value, Tensor) else math.log(value)
        if batch is None:
            weight = float(batch_size or 1)
        elif batch_size is None:
            weight = batch.logged * self.fraction
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
            if hook not in BATCH_HOOKS:
                entry.steps.append((index, value, weight))
            elif pieces and entry.steps and entry.steps[-1][0] == index:
                entry.steps = [joined(entry.reduction, entry.steps[-1], (index, value, weight))]
            else:
                if entry.steps and entry.steps[-1][0] != index:
                    entry.former = entry.steps
                entry.steps = [(index, value, weight)]  # training: only the newest is ever written

    def leave_out(self, batch: int) -> None:
        """Forget the step's values of training batch ``batch``, which makes no step."""
        for entry in self.entries.values():
            if entry.steps and entry.steps[-1][0] == batch:
                entry.steps, entry.former = entry.former, []

    # -- looking at once ----------------------------------------------------------------------------------------
    def current(self, by_step: bool, alone: bool) -> Iterator[tuple[Entry, str, Tensor]]:
        """What this rank logged in the step (or, not ``by_step``, in the epoch) so far, of the loader at hand where
        there are several: entry, name and value. Of several ranks what each knows for itself; of what they combine a
        training step's value until they have."""
        at = self.batch.loader if self.batch is not None and self.several_loaders else None
        for (hook, _, _), entry in self.entries.items():
            if entry.at != at:
                continue
            combined = entry.over_ranks and not alone
            if combined and not (by_step and hook in BATCH_HOOKS and entry.steps and entry.steps[-1] is not entry.met):
                continue
            if by_step:
                if entry.on_step and entry.steps:
                    yield entry, entry.forked("step"), _tensor(entry.steps[-1][1])
            elif entry.on_epoch:
                if entry.metric is not None:
                    if alone and entry.logged and not entry.anew:
                        # Validation may have reset the same object: then it has the value of no data.
                        # What was looked at stays, also where the module begins the metric anew in the next hook.
                        entry.settled = _value_of(entry.metric) if entry.settled is None else entry.settled
                        yield entry, entry.forked("epoch"), entry.settled
                    continue
                entry.fold()
                if entry.weight:
                    column = entry.column()
                    value = combine(entry.name, [{entry.name: column}])
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
        return exchange(self.gather, self.communicator, self.device, columns, flags, series, self.alike)

    def combines(self, name: str) -> bool:
        """Whether ``name`` is of values that ranks combine, and so the same on all of them once they have."""
        return any(
            entry.over_ranks and name in (entry.title, entry.forked("step"), entry.forked("epoch"))
            for entry in self.entries.values()
        )

    def step_columns(self, batch: int | None) -> dict[str, Column]:
        """Contributions of the values logged on step in training batch ``batch``; None: the last ones, of any."""
        columns = {}
        for entry in self.entries.values():
            if entry.on_step and entry.steps and batch in (None, entry.steps[-1][0]):
                entry.met = entry.steps[-1]
                columns[entry.forked("step")] = entry.column(entry.met)
        return columns

    def names(self) -> set[str]:
        """What was logged, under each of the names that it is known by."""
        logged = [entry for entry in self.entries.values() if entry.logged]
        return {name for e in logged for name in (e.title, e.forked("step"), e.forked("epoch"))}

    def latest_columns(self, newer: Collection[str] = (), since: int = 0) -> dict[str, Column]:
        """Contributions of the last values by step: to be known after an epoch, not written. Not those called ``newer``
        that were logged before batch ``since``, from when on the names mean something else."""
        columns = {}
        for (hook, _, _), entry in self.entries.items():
            if entry.on_step and entry.steps and entry.metric is None and (hook in BATCH_HOOKS or not entry.on_epoch):
                if entry.forked("step") in newer and entry.steps[-1][0] < since:
                    continue
                entry.met = entry.steps[-1]
                columns[entry.forked("step")] = replace(entry.column(entry.met), written=False)
        return columns

    def epoch_columns(self) -> dict[str, Column]:
        """Contributions of the epoch's values; of metrics those that were logged in it. Of a name that several hooks
        log the last one that did."""
        columns: dict[str, Column] = {}
        for entry in self.entries.values():
            name = entry.forked("epoch")
            if entry.on_epoch and (entry.logged or (entry.metric is None and (entry.weight or name not in columns))):
                entry.fold()
                columns[name] = entry.column()
        return columns

    def settle(self, loader: int) -> None:
        """Take the values of metrics that were logged in the batches of ``loader``, which was read: a metric that it
        shares with the next ones goes on, and a module may begin one anew in the hooks of the epoch's end. Of several
        ranks each keeps what it gathered so far; they bring it together at the end only, whether they had a batch of
        this loader or not."""
        if self.communicator.world_size > 1:
            self._held[loader] = {
                path: metric_states.states(module)
                for path, module in self.named_modules()
                if hasattr(module, "_forward_cache")
            }
            return
        for entry in self.entries.values():
            if entry.metric is not None and entry.on_epoch and entry.logged and loader in (entry.at, entry.read_with):
                entry.settled = _value_of(entry.metric)

    def torchmetrics(
        self,
        columns: dict[str, Column],
        reset: bool = True,
        computed: Collection[str] | None = None,
        doubtful: bool = False,
        kept: Mapping[str, float] | None = None,
    ) -> Exchange:
        """Values of the logged torchmetrics metrics; they gather their own states, which are ``reset`` after.

        ``columns`` are those of the epoch's exchange: they name every metric that any rank logged, and where it is in
        the module, so that a rank that had no batch takes part with the metric's empty state.

        Args:
            computed: names of those that are asked for their values, the same on all ranks; None: of all.
            doubtful: a metric without a value, or whose value is none to log, is left out.
            kept: values, the same on all ranks, of those that were made known before a module reset them.
        """
        found = {name: column for name, column in sorted(columns.items()) if column.reduction.startswith(OBJECT)}
        settled = {entry.forked("epoch"): entry.settled for entry in self.entries.values()}
        modules = dict(self.named_modules()) if found else {}
        metrics = {name: modules[metric_at(column.reduction)[0]] for name, column in found.items()}
        asked = {name: column for name, column in found.items() if computed is None or name in computed}
        values = {}
        for name, column in asked.items():
            if kept and name in kept:
                values[name] = kept[name]
                continue
            try:
                value = self._computed(metrics[name], column) if settled.get(name) is None else settled[name]
                values[name] = _of_metric(name, value)
            except Exception:
                if not doubtful:
                    raise
        if reset:  # what is not in the columns (logged by step only, or not in this epoch) begins anew with it as well
            with torch.inference_mode(False):  # in which it would get a state that a later fit cannot add to
                for metric in [*metrics.values(), *(entry.metric for entry in self.entries.values())]:
                    if metric is not None:
                        metric.reset()
            for entry in self.entries.values():
                entry.anew = True
        return Exchange(values, asked, [], [])

    def made_known(self) -> None:
        """Remember that hooks know the values of metrics now: one that a module begins anew in them keeps its value."""
        for entry in self.entries.values():
            entry.known_at = getattr(entry.metric, "_update_count", 0)

    def _computed(self, metric: Any, column: Column) -> Any:
        """The value of ``metric``, as it stood when the loader of ``column`` was read."""
        path, loader = metric_at(column.reduction)
        held = self._held.get(loader, {}).get(path) if loader is not None else None
        if held is None:
            return _value_of(metric)
        now = metric_states.states(metric)
        metric_states.load(metric, held)
        try:
            return _value_of(metric)
        finally:
            metric_states.load(metric, now)

    def of_no_loader(self, columns: dict[str, Column]) -> dict[str, Column]:
        """Those of ``columns`` that were not logged in the batches of one loader of several; of metric objects the same
        on every rank, whatever it logged itself."""
        if not self.several_loaders:
            return columns
        at = {entry.forked("epoch"): entry.at for entry in self.entries.values()}

        def loader(name: str, column: Column) -> int | None:
            return metric_at(column.reduction)[1] if column.reduction.startswith(OBJECT) else at.get(name)

        return {name: column for name, column in columns.items() if loader(name, column) is None}

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
            entry.logged, entry.settled, entry.known_at = False, None, 0
        self._held.clear()

    # -- resuming in mid-epoch ----------------------------------------------------------------------------------
    def state_dict(self) -> list[list[Any]]:
        """This rank's epoch sums so far and newest values by step, as plain data; of metric objects, whose states are
        the module's, that they were logged."""
        state = []
        for (hook, _, _), e in self.entries.items():
            if e.metric is not None and (e.anew or not e.logged):
                continue
            e.fold()
            shown = [e.name, e.on_step, e.on_epoch, e.prog_bar, e.logger]
            options = [*shown, e.reduction, e.loader, e.over_ranks, e.double]
            steps = [[batch, float(value), float(weight)] for batch, value, weight in e.steps[-1:]]
            state.append([hook, options, e.total, e.weight, steps, e.path])
        return state

    def load_state_dict(self, states: list[list[list[Any]]]) -> None:
        """Take up what :meth:`state_dict` gave on one rank, or on several that this one stands for now."""
        modules = dict(self.named_modules())
        for hook, options, total, weight, steps, *path in (item for state in states for item in state):
            entry = Entry(*options)
            if any(path):
                entry.path, entry.metric, entry.logged = path[0], modules.get(path[0]), True
                if entry.metric is None:  # the module measures something else now
                    continue
            known = self.entries.setdefault((hook, entry.name, entry.loader), entry)
            if weight and known.weight and known.reduction in ("max", "min"):
                known.total = (max if known.reduction == "max" else min)(known.total, total)
            elif weight:
                known.total, known.weight = known.total + total, known.weight + weight
            for step in map(tuple, steps):
                same = known.steps and known.steps[-1][0] == step[0]
                known.steps = [joined(known.reduction, known.steps[-1], step) if same else step]


def _scalar(name: str, value: Any) -> Any:
    """``value``, a number where it is neither a tensor nor a metric.

    Raises:
        MetricError: it is no scalar.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise MetricError(
                f"self.log({name!r}, ...) takes a scalar, this tensor has shape {tuple(value.shape)}: log"
                " value.mean() or one element."
            )
        return value
    if isinstance(value, (int, float)) or hasattr(value, "_forward_cache"):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MetricError(
            f"self.log({name!r}, ...) takes a number or a one-element tensor, not {type(value).__name__}."
        ) from None


def _value_of(metric: Any) -> Any:
    """What ``metric`` computes; that it was never updated is not told, for a rank may have had no batch."""
    if getattr(metric, "update_called", False):
        return metric.compute()  # with the filters as they are: setting them lets every warning be shown once more
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was called before the.*")
        return metric.compute()


def _of_metric(name: str, value: Any) -> float:
    """A metric's value as a number.

    Raises:
        MetricError: it is no scalar.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise MetricError(
        f"self.log({name!r}, ...) takes a metric whose value is a scalar, this one gives {what}: log its"
        " parts, or a MetricCollection through log_dict."
    )


def _tensor(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
