"""PyTorchProfiler: operators and kernels by ``torch.profiler``, with traces for Chrome and TensorBoard."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, ProfilerActivity

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.profiler import Profiler

_COLUMNS = ("{}_time", "{}_time_total", "{}_memory_usage", "self_{}_memory_usage")
SORT_KEYS = (*(column.format(device) for device in ("cpu", "cuda") for column in _COLUMNS), "count")
_TABLE = [
    name for name in inspect.signature(EventList.table).parameters if name not in ("self", "sort_by", "row_limit")
]
_STEPS_OF = {
    "fit": ("training_step", "validation_step"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": ("predict_step",),
}


class OneCycleEach:
    """A schedule for a profiler whose steps are of several kinds: each is counted and recorded for one cycle.

    After its cycle a kind costs nothing, however long the stage is. A cycle is not broken into: while one kind is
    warmed up or recorded, steps of another are not counted.

    Args:
        schedule: of the number of a kind's step, as ``torch.profiler.schedule`` makes it.
        first: the kind that the others wait for: what validation does in the check before training is not recorded.
    """

    def __init__(self, schedule: Callable[[int], ProfilerAction], first: str) -> None:
        self._schedule = schedule
        self._first = first
        self._counts: dict[str, int] = {}
        self._kind: str | None = None
        self._action = ProfilerAction.NONE
        self._done: set[str] = set()

    def takes(self, kind: str) -> bool:
        """Whether the end of a step of this kind is a step of the profiler."""
        if self._action != ProfilerAction.NONE:
            return kind == self._kind
        return kind not in self._done and (kind == self._first or self._kind is not None)

    def enter(self, kind: str) -> bool:
        """The profiler's next step is of this kind. Returns whether a trace ends with it."""
        before, self._kind = self._action, kind
        if kind in self._done:
            self._action = ProfilerAction.NONE
        else:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._action = self._schedule(self._counts[kind])
            if before == ProfilerAction.RECORD and self._action == ProfilerAction.WARMUP:
                self._action = ProfilerAction.RECORD  # as in Lightning: torch crashes where a trace ends so
            if self._action == ProfilerAction.RECORD_AND_SAVE:
                self._done.add(kind)
        return before == ProfilerAction.RECORD_AND_SAVE or (before, self._action) == _BROKEN_OFF

    def __call__(self, number: int) -> ProfilerAction:
        return self._action


_BROKEN_OFF = (ProfilerAction.RECORD, ProfilerAction.NONE)


class PyTorchProfiler(Profiler):
    """Records operators of the stage's own steps (in ``fit`` of training and of validation) as the schedule says.

    One cycle of each kind of step is recorded, as in Lightning. Its trace is written to ``dirpath`` (default: the
    Trainer's ``log_dir``) as ``{stage}-{filename}-{rank}.....pt.trace.json``; the report is a table of the operators
    of all cycles.

    Args:
        dirpath, filename: see :class:`~drivetrain.profiler.Profiler`.
        group_by_input_shapes: a row for each shape, with ``record_shapes=True``.
        emit_nvtx: mark operators for NVIDIA's tools instead of recording them.
        export_to_chrome: write traces.
        row_limit: rows of the table, -1 for all.
        sort_by_key: column by which it is sorted; default: total time on the device.
        record_module_names: mark the forward pass of every sub-module.
        table_kwargs: further arguments of the table.
        **profiler_kwargs: for ``torch.profiler.profile`` (``schedule``, ``activities``, ``with_stack``, ...), and
            ``export_to_flame_graph`` with ``metric``. The default schedule is ``wait=1, warmup=1, active=3``; in a
            stage of fewer than 5 steps all are recorded. A schedule counts the steps of each kind, from 1, and the
            first cycle that it ends is the one that is recorded. An ``on_trace_ready`` is called in place of writing
            traces.

    Attributes:
        function_events: what was recorded, by a profile that is over; None before.

    Raises:
        ConfigurationError: ``sort_by_key``, ``schedule`` or ``table_kwargs`` that cannot be meant.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        options = dict(profiler_kwargs)
        self._flame_graph = bool(options.pop("export_to_flame_graph", False))
        self._metric = options.pop("metric", "self_cpu_time_total")
        schedule = options.pop("schedule", None)
        if schedule is not None and not (callable(schedule) and isinstance(schedule(0), ProfilerAction)):
            raise ConfigurationError(
                f"PyTorchProfiler(schedule={schedule!r}): give a function of the step's number that returns a"
                " torch.profiler.ProfilerAction, as torch.profiler.schedule makes it."
            )
        self._schedule = schedule
        self._on_trace_ready = options.pop("on_trace_ready", self._export)
        cuda = torch.cuda.is_available() if not options.get("activities") else None
        if cuda is None:
            cuda = ProfilerActivity.CUDA in options["activities"]
        options.setdefault("activities", [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
        options["with_stack"] = options.get("with_stack", False) or self._flame_graph
        options.setdefault("acc_events", True)  # the report is of all cycles
        self._options = options
        self._sort_by_key = sort_by_key or f"{'cuda' if cuda else 'cpu'}_time_total"
        if self._sort_by_key not in SORT_KEYS:
            raise ConfigurationError(
                f"PyTorchProfiler(sort_by_key={sort_by_key!r}): {nearest(str(sort_by_key), SORT_KEYS)}"
            )
        self._table_kwargs = dict(table_kwargs or {})
        for name in self._table_kwargs:
            if name in ("sort_by", "row_limit"):
                raise ConfigurationError(
                    f"PyTorchProfiler(table_kwargs): {name} is an argument of the profiler itself."
                )
            if name not in _TABLE:
                raise ConfigurationError(f"PyTorchProfiler(table_kwargs): {name} is none: {nearest(name, _TABLE)}.")
        # Asked of profiler_kwargs itself: a command line reads here that it may be given by name.
        self._group_by_input_shapes = group_by_input_shapes and profiler_kwargs.get("record_shapes", False)
        self._emit_nvtx = emit_nvtx
        self._export_to_chrome = export_to_chrome
        self._row_limit = row_limit
        self._record_module_names = record_module_names
        self.profiler: Any = None
        self._cycles: OneCycleEach | None = None
        self._stepped: str | None = None  # the action that ends a step, by which files are called
        self.function_events: EventList | None = None
        self._ranges: dict[str, Any] = {}
        self._handles: list[Any] = []

    # -- recording ----------------------------------------------------------------------------------------------
    def start(self, action_name: str) -> None:
        if self.profiler is None:
            self._begin()
        if action_name not in self._ranges:
            self._open(action_name)

    def _open(self, action_name: str) -> None:
        self._ranges[action_name] = record_function(f"[pl][profile]{action_name}")
        self._ranges[action_name].__enter__()

    def _close_all(self) -> list[str]:
        """The actions that were open, the outermost first."""
        names = list(self._ranges)
        for name in reversed(names):
            self._ranges.pop(name).__exit__(None, None, None)
        return names

    def stop(self, action_name: str) -> None:
        found = self._ranges.pop(action_name, None)
        if found is not None:
            found.__exit__(None, None, None)
        if self.profiler is None or self._emit_nvtx:
            return
        kind = next((step for step in self._steps if action_name.endswith(step)), None)
        if kind is None or (self._cycles is not None and not self._cycles.takes(kind)):
            return
        ends = self._cycles is not None and self._cycles.enter(kind)
        self._stepped = action_name
        # A range writes its end into the memory of the trace in which it began, which torch frees with the trace.
        across = self._close_all() if ends else []
        self.profiler.step()
        for name in across:
            self._open(name)

    @property
    def _steps(self) -> tuple[str, ...]:
        return _STEPS_OF.get(self._stage or "", _STEPS_OF["fit"])

    def _begin(self) -> None:
        if self._emit_nvtx:
            self.profiler = torch.autograd.profiler.emit_nvtx()
        else:
            schedule = self._schedule or self._default_schedule()
            self._cycles = OneCycleEach(schedule, self._steps[0]) if schedule is not None else None
            self.profiler = torch.profiler.profile(
                schedule=self._cycles,
                on_trace_ready=self._on_trace_ready,
                **self._options,
            )
        self.profiler.__enter__()
        if self._record_module_names and self._module is not None:
            for name, module in self._module.named_modules():
                if name:
                    self._mark(module, f"[pl][module]{type(module).__module__}.{type(module).__name__}: {name}")

    def _default_schedule(self) -> Callable[[int], ProfilerAction] | None:
        if self._module is None or self._module._trainer is None:
            return None
        trainer = self._module._trainer
        epochs = trainer.max_epochs
        counts = {
            "fit": trainer.num_training_batches * (epochs if epochs is not None and epochs > 0 else float("inf")),
            "validate": sum(trainer.num_val_batches),
            "test": sum(trainer.num_test_batches),
            "predict": sum(trainer.num_predict_batches),
        }
        return None if counts.get(self._stage or "", 0) < 5 else torch.profiler.schedule(wait=1, warmup=1, active=3)

    def _mark(self, module: nn.Module, label: str) -> None:
        ranges: list[Any] = []

        def enter(*_: Any) -> None:
            ranges.append(record_function(label))
            ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            ranges.pop().__exit__(None, None, None)

        self._handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _export(self, profiler: Any) -> None:
        """A cycle of the schedule is complete."""
        if self.dirpath is None:
            return
        os.makedirs(self.dirpath, exist_ok=True)
        worker = self._prepare_filename(self._stepped, extension="")
        if self._export_to_chrome:
            torch.profiler.tensorboard_trace_handler(str(self.dirpath), worker)(profiler)
        if self._flame_graph:
            profiler.export_stacks(os.path.join(self.dirpath, f"{worker}.stack"), self._metric)

    # -- the report ---------------------------------------------------------------------------------------------
    def summary(self) -> str:
        self._end()
        if self.function_events is None:
            return ""
        rows = self.function_events.key_averages(group_by_input_shapes=self._group_by_input_shapes)
        table = partial(rows.table, sort_by=self._sort_by_key, row_limit=self._row_limit)
        return self._stats_to_str({"records": table(**self._table_kwargs)})

    def _end(self) -> None:
        self._close_all()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            recorded = not self._emit_nvtx and self.profiler.profiler is not None
            self.function_events = self.profiler.events() if recorded else None
            self.profiler = None

    def teardown(self, stage: str | None) -> None:
        self._end()
