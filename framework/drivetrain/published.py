"""What is made known of metrics while a run goes on: to callbacks, to the progress bar, to the loggers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.metric_exchange import in_order

if TYPE_CHECKING:
    from drivetrain.metric_entries import Entry
    from drivetrain.metric_exchange import Column, Exchange
    from drivetrain.metrics import Metrics
    from drivetrain.trainer import Trainer


class PublishedMetrics:
    """The newest value of every metric, by name, for each of those who read them.

    Attributes:
        by_step: where what a rank logs is shown at once: whether it is looked at within a step (True) or at an epoch's
            end (False); None: not at all.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.by_step: bool | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing is known."""
        self._callback: dict[str, torch.Tensor] = {}
        self._log: dict[str, torch.Tensor] = {}
        self._bar: dict[str, float] = {}
        self._agreed: dict[str, float] = {}  # of what each rank knows its own value of: the first rank's

    @property
    def _alone(self) -> bool:
        """Whether no other rank has metrics: a job may have ranks that only serve."""
        return self.trainer.strategy.communicator.world_size == 1

    # -- reading ------------------------------------------------------------------------------------------------
    @property
    def callback(self) -> dict[str, torch.Tensor]:
        """What was logged; of what is logged by step and by epoch the epoch's value also without suffix."""
        trainer = self.trainer
        broke_off = trainer.stage == "fit" and trainer.status in ("failed", "interrupted")
        for entry, name, value in self._current():
            if trainer.training or not self.by_step or broke_off:
                self._callback[entry.title] = self._callback[name] = value
        return self._callback

    @property
    def logged(self) -> dict[str, torch.Tensor]:
        """What the loggers are given."""
        self._log.update({name: value for entry, name, value in self._current() if entry.logger})
        return self._log

    @property
    def bar(self) -> dict[str, float]:
        """What the progress bar shows, as numbers."""
        self._bar.update({name: float(value) for entry, name, value in self._current() if entry.prog_bar})
        return self._bar

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """What is looked at within is what the step at hand logged, where that is shown at once."""
        shown = self.by_step
        self.by_step = None if shown is None else True
        try:
            yield
        finally:
            self.by_step = shown

    def keep(self) -> None:
        """Keep what is shown now, also when its step or epoch is over."""
        _ = self.callback, self.logged, self.bar

    def _current(self) -> list[tuple[Entry, str, torch.Tensor]]:
        """What this rank has logged in the step or epoch at hand, where that is shown at once."""
        trainer = self.trainer
        if not trainer.meanings.live_metrics or self.by_step is None or trainer.metrics is None:
            return []
        return self.of(trainer.metrics, self.by_step)

    def of(self, metrics: Metrics, by_step: bool) -> list[tuple[Entry, str, torch.Tensor]]:
        """What this rank has logged in the step or epoch at hand, as it is shown: entry, name and value."""
        found = metrics.current(by_step, self._alone)
        # What a metric object gives keeps its type.
        return [
            (entry, name, self._as_shown(value, entry.double, entry.metric is not None)) for entry, name, value in found
        ]

    def monitored(self, name: str) -> torch.Tensor | None:
        """The metric ``name``, the same on all ranks; see :meth:`drivetrain.Trainer.monitored`."""
        if not self._alone and name not in self._agreed and self._combined(name):
            return None  # what is shown is this rank's own
        if not self._alone and name in self._agreed:
            known = self._callback.get(name)
            return torch.tensor(self._agreed[name], dtype=_type_of(known))
        return self.callback.get(name)

    def _combined(self, name: str) -> bool:
        """Whether ranks combine what is logged under ``name``, where each is shown its own value before that."""
        trainer = self.trainer
        return trainer.meanings.live_metrics and trainer.metrics is not None and trainer.metrics.combines(name)

    # -- making known -------------------------------------------------------------------------------------------
    def publish(self, exchange: Exchange, step: int, write: bool = True) -> None:
        """Make global values known to callbacks and progress bar, and those that are to be written to the loggers
        unless ``write`` is false."""
        checking, live = self.trainer.sanity_checking, self.trainer.meanings.live_metrics
        if checking and live and self._alone:
            return  # it is looked at where it was logged
        known: dict[str, torch.Tensor] = {}
        for name, value in exchange.values.items():
            column = exchange.columns[name]
            if name in exchange.own:
                self._agreed[name] = self._agreed[column.title] = value
                value = exchange.own[name]
            elif live:
                self._agreed[name] = self._agreed[column.title] = value
            shown = known[name] = self._shown(value, column)
            self._callback[column.title] = self._callback[name] = shown
            if live and column.logger:
                self._log[name] = shown
            if column.prog_bar:
                self._bar[name] = float(shown)
        # An epoch's value is what is known without a suffix, whatever came first; of several the one logged last.
        titles = {name: exchange.columns[name].title for name in exchange.values}
        forked = {title for name, title in titles.items() if title != name}
        for name, title in titles.items():
            if name in forked or (title != name and "_epoch" in name):
                self._callback[title] = known[name]
        if write and not checking:
            written = {name: column for name, column in exchange.columns.items() if column.written}
            self.write(replace(exchange, columns=written), step)

    def write(self, exchange: Exchange, step: int, epoch: bool = True) -> None:
        """Write what is meant for the loggers; ``step`` is the number of optimizer steps done, unless a metric called
        ``step`` was logged. ``epoch``: beside the number of the epoch."""
        known = in_order(exchange.values | exchange.own, exchange.columns)
        columns = exchange.columns
        shown = {name: self._shown(value, columns[name]) for name, value in known.items() if columns[name].logger}
        if not shown:
            return
        self._log.update(shown)
        scalars: dict[str, float] = {name: float(value) for name, value in shown.items()}
        if epoch:
            if "step" in scalars:
                step = int(scalars.pop("step"))
            else:
                scalars.setdefault("epoch", self.trainer.current_epoch)
        if step < 0 and not self.trainer.meanings.live_metrics:  # training stopped before its first step
            step = 0
        if self.trainer.is_global_zero:
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics=dict(scalars), step=step)
                if getattr(logger, "saves_by_itself", False) is not True:
                    logger.save()

    def rounded(self, values: dict[str, float], columns: Mapping[str, Column]) -> dict[str, float]:
        """``values`` as they are made known."""
        return {name: float(self._shown(value, columns[name])) for name, value in values.items()}

    def _shown(self, value: float, column: Column) -> torch.Tensor:
        return self._as_shown(torch.tensor(value, dtype=torch.float64), column.double)

    def _as_shown(self, value: torch.Tensor, exact: bool, integer: bool = False) -> torch.Tensor:
        """``value`` in the type that it is shown in; ``integer``: whole numbers may stay such."""
        if self.trainer.meanings.figures == "double" or (exact and value.dtype == torch.float64):
            return value
        return value if integer and not value.is_floating_point() else value.to(torch.get_default_dtype())

    @property
    def in_double(self) -> list[str]:
        """Names of what is known in double precision."""
        known = {**self.logged, **self.callback}
        return [name for name, value in known.items() if _type_of(value) == torch.float64]

    def again(self, values: Mapping[str, float], double: Collection[str] | None) -> dict[str, torch.Tensor]:
        """Metrics that a checkpoint holds, in the types that they were known in.

        Args:
            double: names of those that were known in double precision; None: it does not say, all.
        """
        exact = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return {name: self._as_shown(value, double is None or name in double) for name, value in exact.items()}

    # -- between processes --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What is known, for the process that started this worker."""
        return {"callback": self.callback, "logged": self.logged, "bar": self.bar, "agreed": self._agreed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know this instead. A checkpoint does not say what the ranks agreed upon."""
        self._callback, self._log, self._bar = state["callback"], state["logged"], state["bar"]
        self._agreed = state.get("agreed", self._agreed)


def _type_of(value: Any) -> torch.dtype:
    """Of a metric; a project may put a plain number among them, which is a double."""
    return value.dtype if isinstance(value, torch.Tensor) else torch.float64
