"""EarlyStopping: stop when a metric no longer improves. Names, arguments and meaning are Lightning's."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.callbacks.monitor import check_mode, has_validation, improves, missing, worst

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Set ``trainer.should_stop`` when ``monitor`` has not improved for ``patience`` checks in a row.

    Metrics are the same on every rank, so all ranks stop together without asking each other. A check happens at the
    end of validation where there is any, else at the end of the training epoch, and there too if the metric is only
    logged after validation.

    Args:
        monitor: the metric.
        min_delta: smallest change that counts as an improvement.
        patience: checks without an improvement before stopping.
        verbose: report improvements and the stop.
        mode: ``"min"`` or ``"max"``.
        strict: whether a metric that was never logged is an error (else the check is left out, with a warning).
        check_finite: stop when the metric is NaN or infinite.
        stopping_threshold: stop when the metric is better than this.
        divergence_threshold: stop when the metric is worse than this.
        check_on_train_epoch_end: force the end of the training epoch (True) or of validation (False).
        log_rank_zero_only: report on the first worker only.

    Attributes:
        best_score, wait_count, patience, stopped_epoch: as in Lightning (``stopped_epoch`` 0: not stopped).
        stopping_reason: one sentence, or ``""``.

    Raises:
        ConfigurationError: a mode that is none, negative ``patience``.
        TrainingError: the metric was never logged (``strict``).
    """

    monitors = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        check_mode("EarlyStopping", mode)
        if patience < 0:
            raise ConfigurationError(f"EarlyStopping(patience={patience}) is negative: use 0 or more.")
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = self._asked = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = ""
        self._best = worst(mode)
        self._on_train_epoch_end = check_on_train_epoch_end
        self._fitting = False

    @property
    def best_score(self) -> torch.Tensor:
        return torch.tensor(self._best)

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{ {'monitor': self.monitor, 'mode': self.mode} }"

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._fitting = stage == "fit"

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """After resuming: the checkpoint's patience counts, as in Lightning, which must not happen in silence."""
        if self.patience != self._asked and trainer.is_global_zero:
            log.warning(
                "EarlyStopping goes on with the checkpoint's patience=%d, not the patience=%d it was made with: start"
                " without resuming to change it.",
                self.patience,
                self._asked,
            )
        self._asked = self.patience  # told once

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._on_train_epoch_end or self._skips(trainer):
            return
        if self._on_train_epoch_end is None and self.monitor not in trainer.callback_metrics:
            self._on_train_epoch_end = True  # it is logged by the training epoch, which is not over
            return
        self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        here = not has_validation(trainer) if self._on_train_epoch_end is None else self._on_train_epoch_end
        if here and not self._skips(trainer):
            self._check(trainer)

    def _skips(self, trainer: Trainer) -> bool:
        return not self._fitting or trainer.sanity_checking or bool(trainer.fast_dev_run)

    def _check(self, trainer: Trainer) -> None:
        metric = trainer.monitored(self.monitor)
        if metric is None:
            error = missing("EarlyStopping", self.monitor, trainer)
            if self.strict:
                raise error
            self._report(trainer, logging.WARNING, str(error))
            return
        stop, reason = self._evaluate(float(metric))
        if stop:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason = reason
        if reason and (self.verbose or stop):
            self._report(trainer, logging.INFO, reason)

    def _evaluate(self, current: float) -> tuple[bool, str]:
        """Whether to stop, and what to say."""
        name, better = self.monitor, "<" if self.mode == "min" else ">"
        if self.check_finite and not math.isfinite(current):
            return True, f"{name} = {current} is not finite; its best was {self._best:.4g}."
        if self.stopping_threshold is not None and improves(self.mode, current, self.stopping_threshold):
            return True, f"{name} = {current:.4g} {better} {self.stopping_threshold}: the threshold is reached."
        if self.divergence_threshold is not None and improves(self.mode, self.divergence_threshold, current):
            return True, f"{name} = {current:.4g} is worse than {self.divergence_threshold}: training diverges."
        if improves(self.mode, current, self._best, self.min_delta):
            before, self._best, self.wait_count = self._best, current, 0
            gain = f" by {abs(before - current):.4g}" if math.isfinite(before) else ""
            return False, f"{name} improved{gain} to {current:.4g}."
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return True, f"{name} did not improve in {self.wait_count} checks; its best was {self._best:.4g}."
        return False, ""

    def _report(self, trainer: Trainer, level: int, message: str) -> None:
        if trainer.is_global_zero or not self.log_rank_zero_only:
            rank = "" if trainer.world_size == 1 or self.log_rank_zero_only else f"[rank {trainer.global_rank}] "
            log.log(level, "%s%s", rank, message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best,
            "patience": self.patience,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._best = float(state_dict["best_score"])
        self.patience = state_dict["patience"]
