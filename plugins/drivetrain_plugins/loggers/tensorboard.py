"""Metrics and hyper-parameters for TensorBoard, all in one event folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from drivetrain_plugins.loggers.parameters import flatten
from drivetrain_plugins.loggers.versioned import VersionedLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(VersionedLogger):
    """Arguments and meanings are those of Lightning's TensorBoardLogger.

    Args:
        save_dir, name, version, prefix, sub_dir: where to write, see :class:`VersionedLogger`.
        log_graph: whether :meth:`log_graph` writes the module's graph.
        default_hp_metric: show ``hp_metric`` (-1) in the HPARAMS tab of a run that logged no metric at all.
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
        self._wrote_metrics = False
        self._session: dict[str, Any] | None = None  # hyper-parameters as written to the events

    @property
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter``, opened now if it is not."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.log_dir.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(log_dir=str(self.log_dir), **self._kwargs)
            _open.add(self)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        writer = self.experiment
        for name, value in self._prefixed(metrics).items():
            writer.add_scalar(name, value, step)
        self._wrote_metrics = self._wrote_metrics or bool(metrics)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        super().log_hyperparams(params)
        flat = flatten(self.hparams)
        if flat != self._session:
            _, start, _ = _hparams_summaries(flat)
            self._add_summary(start)
            self._session = flat
        if metrics:
            self.log_metrics(metrics, 0)

    def log_graph(self, model: nn.Module, input_array: torch.Tensor | None = None) -> None:
        """Write the graph of ``model`` for ``input_array`` (default: its ``example_input_array``) if asked to."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if self._log_graph and example is not None:
            self.experiment.add_graph(model, example)

    def save(self) -> None:
        super().save()
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Mark the end of the session and close the writer; a later write opens another file in the same folder."""
        if self._session is not None:
            if self._default_hp_metric and not self._wrote_metrics:
                self.log_metrics({"hp_metric": -1.0}, 0)
            _, _, end = _hparams_summaries(self._session, failed=status in ("failed", "interrupted"))
            self._add_summary(end)
        super().finalize(status)
        if self._writer is not None:
            self._writer.close()
            self._forget()

    def _add_summary(self, summary: Any) -> None:
        self.experiment._get_file_writer().add_summary(summary)

    def _forget(self) -> None:
        self._writer = None
        _open.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        """Travels to other processes without its open writer."""
        return {**self.__dict__, "_writer": None}


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
