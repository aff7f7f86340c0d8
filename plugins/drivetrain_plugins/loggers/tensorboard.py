"""Metrics and hyper-parameters for TensorBoard, all in one event folder."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain.data_hooks import move
from drivetrain.logger import first_worker_experiment, first_worker_only
from drivetrain_plugins.loggers.parameters import flatten
from drivetrain_plugins.loggers.versioned import VersionedLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(VersionedLogger):
    """Arguments and meanings are those of Lightning's TensorBoardLogger.

    Args:
        save_dir, name, version, prefix, sub_dir: where to write, see :class:`VersionedLogger`.
        log_graph: whether :meth:`log_graph` writes the module's graph.
        default_hp_metric: write ``hp_metric`` (-1) beside hyper-parameters that come without metrics.
        **kwargs: for ``torch.utils.tensorboard.SummaryWriter``.

    Hyper-parameters are written beside the scalars of the same run, without a list of metrics: TensorBoard then shows
    the last value of every scalar in the HPARAMS tab, also of a run that was killed.

    The writer opens on the first write. It has a thread, which a forked child does not inherit; so the buffers are
    emptied before a fork and the child forgets the writer.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "drivetrain_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, sub_dir)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None
        self._session: dict[str, Any] | None = None  # hyper-parameters as written to the events

    @property
    @first_worker_experiment
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter``, made now if it is not. A closed one opens another file when something is written."""
        if self._writer is not None and str(self._writer.log_dir) != self.log_dir:
            self._forget()  # it is of another version
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            os.makedirs(self.log_dir, exist_ok=True)
            self._writer = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        _open.add(self)
        return self._writer

    @first_worker_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write scalars; a dictionary among the values becomes one chart of several lines."""
        writer, join = self.experiment, f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                writer.add_scalars(f"{join}{name}", dict(value), step)
            else:
                writer.add_scalar(f"{join}{name}", float(value), step)

    @first_worker_only
    def log_hyperparams(
        self, params: Any = None, metrics: Mapping[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Write hyper-parameters, with ``metrics`` (a number is ``hp_metric``) at ``step``."""
        super().log_hyperparams(params)
        flat = flatten(self.hparams)
        if flat != self._session:
            _, start, _ = _hparams_summaries(flat)
            self._add_summary(start)
            self._session = flat
        if metrics is None and self._default_hp_metric:
            metrics = -1.0
        if metrics is not None and not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        if metrics:
            self.log_metrics(metrics, 0 if step is None else step)

    @first_worker_only
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Write the graph of ``model`` for ``input_array`` (default: its ``example_input_array``) if asked to."""
        if not self._log_graph:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if not isinstance(example, (torch.Tensor, tuple)):
            warnings.warn(
                f"log_graph=True needs an example input of {type(model).__name__}: set example_input_array to a tensor,"
                " or to a tuple of the arguments of forward.",
                stacklevel=2,
            )
            return
        first = next(model.parameters(), None)
        self.experiment.add_graph(_traceable(model), example if first is None else move(example, first.device))

    @first_worker_only
    def save(self) -> None:
        super().save()
        if self._writer is not None:
            self._writer.flush()
            path = Path(self.log_dir) / self.NAME_HPARAMS_FILE
            if not path.exists():
                path.write_text("{}\n", encoding="utf-8")

    @first_worker_only
    def finalize(self, status: str) -> None:
        """Mark the end of the session and close the writer; a later write opens another file in the same folder.

        Where nothing was written since the last time, the end is marked already and no file is opened for it.
        """
        closed = self._writer is not None and self._writer.file_writer is None
        if self._session is not None and not closed:
            _, _, end = _hparams_summaries(self._session, failed=status in ("failed", "interrupted"))
            self._add_summary(end)
        super().finalize(status)
        if self._writer is not None:
            self._writer.close()

    def _add_summary(self, summary: Any) -> None:
        self.experiment._get_file_writer().add_summary(summary)

    def _forget(self) -> None:
        self._writer = None
        _open.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        """Travels to other processes without its open writer."""
        return {**self.__dict__, "_writer": None}


def _traceable(model: nn.Module) -> nn.Module:
    """The parts and ``forward`` of ``model`` without its properties, which tracing would all look at: some of them are
    there within a run only. The inputs have the names that ``forward`` gives them, which the graph shows."""

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *inputs: Any) -> Any:
        return model.forward(*inputs)

    shell = type(type(model).__name__, (nn.Module,), {"forward": forward})()
    for parts in ("_modules", "_parameters", "_buffers"):
        shell.__dict__[parts] = getattr(model, parts)
    shell.training = model.training
    return shell


def _hparams_summaries(flat: dict[str, Any], failed: bool = False) -> tuple[Any, Any, Any]:
    """Experiment, start and end of a session as event summaries."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from torch.utils.tensorboard.summary import hparams

    experiment, start, end = hparams(flat, {})
    if failed:
        data = metadata.parse_session_end_info_plugin_data(end.value[0].metadata.plugin_data.content)
        data.status = api_pb2.STATUS_FAILURE
        content = plugin_data_pb2.HParamsPluginData(session_end_info=data)
        end.value[0].metadata.CopyFrom(metadata.create_summary_metadata(content))
    return experiment, start, end


_open: weakref.WeakSet[TensorBoardLogger] = weakref.WeakSet()
_inherited: list[Any] = []  # of a forked child: the parent's writers, kept so that none is closed by being collected


def _before_fork() -> None:
    for logger in list(_open):
        if logger._writer is not None:
            logger._writer.flush()


def _after_fork_in_child() -> None:
    for logger in list(_open):
        _inherited.append(logger._writer)
        logger._forget()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
