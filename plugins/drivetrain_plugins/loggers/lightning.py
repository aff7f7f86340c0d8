"""The file loggers with Lightning's default folder, for projects that name no folder of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from drivetrain.logger import first_worker_only
from drivetrain_plugins.loggers import csv, tensorboard


class CSVLogger(csv.CSVLogger):
    """:class:`drivetrain_plugins.loggers.csv.CSVLogger`, by default in ``lightning_logs``, lines ended as there."""

    line_end = "\r\n"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)

    def _get_next_version(self) -> int:
        """By Lightning's name, for loggers that derive from this one."""
        return self._next_version()


class TensorBoardLogger(tensorboard.TensorBoardLogger):
    """:class:`drivetrain_plugins.loggers.tensorboard.TensorBoardLogger`, by default in ``lightning_logs``; its
    ``hparams.yaml`` stays what was written first."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, log_graph, default_hp_metric, prefix, sub_dir, **kwargs)

    @first_worker_only
    def save(self) -> None:
        if Path(self.log_dir, self.NAME_HPARAMS_FILE).exists():
            self._hparams_written = dict(self.hparams)
        super().save()

    def _get_next_version(self) -> int:
        """By Lightning's name, for loggers that derive from this one."""
        return self._next_version()

    @staticmethod
    def _sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
        """Flat hyper-parameters as ``torch.utils.tensorboard.summary.hparams`` takes them, for loggers that derive
        from this one and write hyper-parameters by themselves; by Lightning's name."""
        from drivetrain.lightning.logged_parameters import _sanitize_params

        flat = _sanitize_params(params)
        return {name: str(value) if getattr(value, "ndim", 0) > 1 else value for name, value in flat.items()}
