"""Validation and test: every sample once on one rank; no rank waits for another until the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain import metric_states, stage_data
from drivetrain.batch_fingerprint import tell_of_unlike
from drivetrain.comm import phase
from drivetrain.errors import note_place
from drivetrain.launch import signals
from drivetrain.loops.evaluation_data import choose_epoch, open_first, together, without_gradients
from drivetrain.loops.evaluation_names import EvaluationNames, Progress
from drivetrain.loops.step_arguments import check_loader_index, step_arguments
from drivetrain.metric_exchange import in_order
from drivetrain.metrics import Column, Entry, Exchange, Metrics
from drivetrain.sharding import BatchSource, MicroBatch

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class Abandoned(Exception):
    """An evaluation was given up on all ranks because one of them was asked to stop by ``signal``."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class EvaluateLoop(EvaluationNames):
    """One pass over the loaders of ``stage`` (``"validation"`` or ``"test"``).

    Args:
        progress: counts batches on from earlier loops of the same kind; None: anew.

    Attributes:
        sources: the loaders; none where they were not asked for yet.
        metrics: what was logged.
        results: one dict of metrics per loader.
        has_run: whether the last pass that was no sanity check evaluated a batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        stage: str,
        sources: list[BatchSource] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.trainer, self.stage, self.reads = trainer, stage, "test" if stage == "test" else "val"
        self.batch_progress = progress or Progress()
        self.metrics: Metrics = trainer.new_metrics()
        self._gone_on_from: dict[int, int] = {}
        self._generators: list[Any] = []  # of a checkpoint, for loaders that are still to be asked for
        self._samples: list[Any] = []
        self.use(sources or [])
        self.results: list[dict[str, float]] = []
        self.has_run = False
        self._passes = 0
        self._told: set[int] = set()

    def use(self, sources: list[BatchSource]) -> None:
        """Read these from now on."""
        self.sources = sources
        self._go_on_drawing()
        self._seen, self._gone_on_from = self._gone_on_from, {}  # batches of each loader so far, over all passes
        self._seen_before: dict[int, int] = {}  # the same when the pass at hand began
        self.metrics.several_loaders = len(sources) > 1

    def counters(self) -> list[Any]:
        """What rows of further passes are numbered by, and what samplers of the project's draw from, as plain data."""
        generators = [source.generators_after(ended=True) for source in self.sources]
        return [self._passes, [list(item) for item in self._seen.items()], generators]

    def go_on_from(self, counters: list[Any]) -> None:
        """Go on with what :meth:`counters` gave, also where the loaders are still to be asked for."""
        self._passes, seen, *generators = counters
        (self._seen if self.sources else self._gone_on_from).update(map(tuple, seen))
        self._generators = generators[0] if generators else []
        self._go_on_drawing()

    def samples(self) -> list[Any]:
        """Where generators stand from which data sets draw on this rank, for each loader."""
        return [source.samples.now() for source in self.sources] or self._samples

    def go_on_with_samples(self, states: list[Any]) -> None:
        """Go on with what :meth:`samples` gave, also where the loaders are still to be asked for."""
        self._samples = states
        self._go_on_drawing()

    def drawn_from(self) -> list[Any]:
        """Where the generators of samplers and data sets stand, for :meth:`draw_again_from`."""
        return [[source.generators_after(ended=True) for source in self.sources], self.samples()]

    def draw_again_from(self, states: list[Any]) -> None:
        """Draw in the next pass what the one drew that was given up."""
        self._generators, self._samples = states
        self._go_on_drawing()

    def _go_on_drawing(self) -> None:
        for source, states in zip(self.sources, self._generators, strict=False):
            source.go_on_with(states)
        for source, states in zip(self.sources, self._samples, strict=False):
            source.samples.go_on_from(states)
            source.samples.resume()  # before training draws from those that both have
        if self.sources:
            self._generators, self._samples = [], []

    def run(self, limit: int | None = None) -> list[dict[str, float]]:
        """Evaluate; ``limit`` batches of each loader at most (the sanity check)."""
        trainer, stage = self.trainer, self.stage
        if trainer.limits["val" if stage == "validation" else stage] == 0:  # nothing is to be evaluated
            return []
        hooks = trainer.hooks
        former, trainer.metrics = trainer.metrics, self.metrics
        shown = trainer.published.by_step
        by_step, trainer.published.by_step = (None, False) if shown is None else (False, None)
        self.metrics.reset()
        self._seen_before = dict(self._seen)
        self.batch_progress.begin()
        self.has_run = False
        try:
            trainer.remember_modes()
            with phase.during(phase.EVALUATION), trainer.consensus(), without_gradients(trainer):
                hooks.follow()
                check_loader_index(trainer.lightning_module, stage, len(self.sources) > 1)
                choose_epoch(trainer, self.sources, stage == "validation")
                open_first(self.sources)
                hooks.of_module(f"on_{stage}_model_eval")
                hooks(f"on_{stage}_start")
                hooks(f"on_{stage}_epoch_start")
                for source in self.sources:
                    self._loader(source, limit)
                    if self._computes:
                        self.metrics.settle(source.index)
                self.metrics.batch, trainer.published.by_step = None, False
                if self._comes_to(f"on_{stage}_epoch_end"):
                    hooks(f"on_{stage}_epoch_end")
                self._reduce()
                hooks(f"on_{stage}_end")
                hooks.of_module(f"on_{stage}_model_train")
        finally:
            trainer.metrics, trainer.published.by_step = former, by_step
        return self.results

    @contextmanager
    def shown(self) -> Iterator[None]:
        """After a check before training: while it lasts, what was logged in it is still looked at."""
        trainer = self.trainer
        former, by_step = trainer.metrics, trainer.published.by_step
        trainer.metrics, trainer.published.by_step = self.metrics, False
        try:
            yield
        finally:
            trainer.metrics, trainer.published.by_step = former, by_step
        if self._looks_later:
            self.metrics.torchmetrics({})

    @property
    def _computes(self) -> bool:
        """Whether metric objects are asked for their values. Of the few batches of a check before training some have
        none (a KID of fewer samples than a subset), and under Lightning's meaning nobody waits for them."""
        return not (self.trainer.sanity_checking and self.trainer.meanings.live_metrics)

    @property
    def _looks_later(self) -> bool:
        """Whether those metric objects are asked when somebody looks at their values, as each rank knows its own."""
        return not self._computes and self.trainer.strategy.communicator.world_size == 1

    @property
    def _is_looked_at(self) -> bool:
        """Whether somebody on every rank may look at their values when the check is over. Ranks bring them together
        before, for one may look alone; what comes with drivetrain does not look."""
        hooks = self.trainer.hooks
        after = (f"on_{self.stage}_end", "on_sanity_check_end")
        return not self._looks_later and any(hooks.overridden_everywhere(one, by_project=True) for one in after)

    def _of_check(self, columns: dict[str, Column]) -> dict[str, Column]:
        """Those of ``columns`` whose values are shown: in a check under Lightning's meaning none of one loader of
        several."""
        return columns if self._computes else self.metrics.of_no_loader(columns)

    def _comes_to(self, hook: str) -> bool:
        """Whether ``hook`` is called, which it is not when a signal has cut the evaluation short. It may have the ranks
        exchange something, so they agree: a signal reaches one before another. Where that is meant, it sees the epoch's
        values so far."""
        trainer = self.trainer
        signal = signals.pending()
        several = trainer.strategy.communicator.world_size > 1
        if not (several and trainer.hooks.overridden_everywhere(hook)):
            return signal is None
        live = trainer.meanings.live_metrics
        columns = self.metrics.epoch_columns() if live and signal is None else {}
        so_far = self.metrics.exchange(columns, (float(signal or 0), 0.0, 0.0, 0.0))
        if any(flags[0] for flags in so_far.flags):
            return False
        if live:
            shown = self._of_check(so_far.columns)
            objects = self.metrics.torchmetrics(
                so_far.columns, reset=False, computed=shown, doubtful=not self._computes
            )
            trainer.published.publish(so_far.only(shown).joined(objects), step=0, write=False)
        return True

    def _tell_of_unlike(self, found: list[list[float]]) -> None:
        """Of ranks that read different streams, each a part of its own: once for each loader."""
        for source, marks in zip(self.sources, zip(*found, strict=True), strict=True):
            if self.trainer.is_global_zero and not source.compared and all(marks):
                source.compared = True
                tell_of_unlike(marks, "evaluates")

    def _loader(self, source: BatchSource, limit: int | None) -> None:
        trainer, stage, metrics = self.trainer, self.stage, self.metrics
        hooks, strategy, module = trainer.hooks, trainer.strategy, trainer.lightning_module
        step = getattr(module, f"{stage}_step")
        arguments = step_arguments(step, len(self.sources) > 1)
        loader = (source.index,) if len(self.sources) > 1 else ()
        found = False
        for micro in together(source, trainer):
            if not found:
                source.mark = micro.whole
            found = True
            if limit is not None and micro.index >= limit:
                break
            # Where each rank's forward pass waits for the others', none may leave before the end.
            if signals.pending() is not None and not strategy.data.lockstep:
                break
            batch = trainer.to_device(micro)
            metrics.batch, trainer.published.by_step = micro, True
            self.batch_progress.take(self.batch_progress.current.ready + 1 == sum(self.max_batches))
            # What this rank's metrics gather of samples that the first rank has, too, counts there.
            kept = metric_states.states(module) if micro.copies > 1 and strategy.data.rank > 0 else None
            hooks(f"on_{stage}_batch_start", batch, micro.index, *loader)
            self.batch_progress.come_to("started")

            def call(batch: Any, micro: MicroBatch = micro) -> Any:
                former, hooks.current = hooks.current, f"{stage}_step"
                try:
                    return step(*arguments(micro, batch))
                except Exception as error:
                    note_place(error, f"in {type(module).__name__}.{stage}_step, batch {micro.index}")
                    raise
                finally:
                    hooks.current = former

            output = strategy.evaluation_step(call, batch)
            self.has_run = not trainer.sanity_checking
            self.batch_progress.come_to("processed")
            hooks(f"on_{stage}_batch_end", output, batch, micro.index, *loader)
            self.batch_progress.come_to("completed")
            if kept is not None:
                metric_states.load(module, kept)
            if trainer.meanings.live_metrics:
                self._write_step(source.index)
            if limit is not None and micro.index + 1 >= limit:  # a further batch is not read for nothing: it may draw
                break
        trainer.published.keep()  # of the last batch
        trainer.published.by_step = False
        if not trainer.sanity_checking:
            trainer.published.keep()
        # Only now is it known of a stream. The first rank has a part of every batch that there is.
        if not found and source.length > 0 and trainer.is_global_zero and source.index not in self._told:
            self._told.add(source.index)
            warnings.warn(stage_data.empty(stage, source, len(self.sources)), stacklevel=2)

    def _reduce(self) -> None:
        """The epoch's metrics over all ranks, and the values logged by batch, each where it belongs."""
        trainer, metrics = self.trainer, self.metrics
        columns = metrics.epoch_columns()
        for batch, values in metrics.steps_by_batch(self._written).items():
            columns |= {f"{batch}\n{name}": column for name, column in values.items()}
        signal = signals.pending()
        marks = [source.mark for source in self.sources]
        exchange = metrics.exchange({} if signal else columns, (float(signal or 0), 0.0, 0.0, 0.0, *marks))
        self._tell_of_unlike([flags[4:] for flags in exchange.flags])
        raised = [int(flags[0]) for flags in exchange.flags if flags[0]]
        if raised:
            raise Abandoned(raised[0])
        by_batch: dict[int, Exchange] = {}
        epoch = Exchange({}, exchange.columns, [], [])
        for key, value in exchange.values.items():
            number, cut, name = key.rpartition("\n")
            one = by_batch.setdefault(int(number), Exchange({}, {}, [], [])) if cut else epoch
            one.values[name] = value
            if key in exchange.own:
                one.own[name] = exchange.own[key]
            if cut:
                one.columns[name] = exchange.columns[key]
        if not trainer.sanity_checking:
            self._write_steps(by_batch)
        shown = self._of_check(exchange.columns)
        computes = self._computes or self._is_looked_at
        objects = metrics.torchmetrics(
            exchange.columns,
            reset=not self._looks_later,
            computed=shown if computes else (),
            doubtful=not self._computes,
        )
        # Within fit it is written beside the step that came before, or that is being made.
        step_done = trainer.batches_stepped - (trainer.stage == "fit" and trainer.between_steps)
        trainer.published.publish(epoch.only(shown).joined(objects), step=step_done)
        known = trainer.published.rounded(epoch.values | objects.values | epoch.own, exchange.columns)
        if trainer.meanings.results == "trainer":  # Lightning's are those that loggers get
            known = {name: value for name, value in known.items() if exchange.columns[name].logger}
        self.results = self._by_loader(in_order(known, exchange.columns), exchange.columns)

    def _write_steps(self, by_batch: dict[int, Exchange]) -> None:
        if self.trainer.meanings.live_metrics:
            self._write_steps_by_loader(by_batch)
            return
        longest = 1 + max(by_batch, default=0)
        for batch in sorted(by_batch):
            self.trainer.published.write(by_batch[batch], step=self._passes * longest + batch)
        self._passes += 1

    def _write_steps_by_loader(self, by_batch: dict[int, Exchange]) -> None:
        """A row for each batch of each loader, beside the number of this loader's batches before it; Lightning writes
        no epoch there."""
        at = {entry.forked("step"): entry.at or 0 for entry in self.metrics.entries.values()}
        for loader in sorted({*at.values()}):
            for batch in sorted(by_batch):
                one = by_batch[batch]
                names = [name for name in one.values if at.get(name, 0) == loader]
                row = Exchange({n: one.values[n] for n in names}, {n: one.columns[n] for n in names}, [], [])
                row.own |= {n: one.own[n] for n in names if n in one.own}
                if names:
                    self.trainer.published.write(row, step=self._seen_before.get(loader, 0) + batch, epoch=False)

    def _written(self, entry: Entry) -> bool:
        """Whether the step's values of ``entry`` are written at once, because no other rank has a part in them."""
        live = self.trainer.meanings.live_metrics
        return live and (not entry.over_ranks or self.trainer.strategy.communicator.world_size == 1)

    def _write_step(self, loader: int) -> None:
        """Write what was logged by step in the batch at hand, beside the batches of its loader so far."""
        trainer, metrics = self.trainer, self.metrics
        found = {entry.forked("step"): entry for entry in metrics.entries.values() if entry.on_step and entry.steps}
        columns = {
            name: e.column(e.steps[-1]) for name, e in found.items() if self._written(e) and e.at in (None, loader)
        }
        if columns and not trainer.sanity_checking:
            values = {name: float(found[name].steps[-1][1]) for name in columns}
            trainer.published.write(Exchange(values, columns, [], []), step=self._seen.get(loader, 0), epoch=False)
        for entry in found.values():
            if self._written(entry):
                del entry.steps[:-1]
        if not trainer.sanity_checking:
            self._seen[loader] = self._seen.get(loader, 0) + 1

    def _by_loader(self, values: dict[str, float], columns: dict[str, Column]) -> list[dict[str, float]]:
        if len(self.sources) <= 1:
            return [dict(values)]
        results: list[dict[str, float]] = [{} for _ in self.sources]
        for name, value in values.items():
            for position, result in enumerate(results):
                if columns[name].at in (None, position):
                    result[name] = value
        return results
