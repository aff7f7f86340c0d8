"""EarlyStopping: stop when a metric no longer improves. Names, arguments and meaning are Lightning's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.states import EarlyStoppingReason
from drivetrain_plugins.callbacks.monitor import check_mode, has_validation, improves, missing, worst

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Set ``trainer.should_stop`` when ``monitor`` has not improved for ``patience`` checks in a row.

    All ranks stop together, as soon as one of them wishes to. A check happens at the end of the training epoch; where
    validation comes in the midst of epochs or not in each of them, at the end of validation.

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
        best_score: the best value so far, a scalar tensor.
        wait_count: checks without an improvement.
        stopped_epoch: the epoch in which it stopped; 0: not stopped.
        stopping_reason: why, of :class:`EarlyStoppingReason`.
        stopping_reason_message: one sentence, or None.

    Raises:
        ConfigurationError: a mode that is none, negative ``patience``.
        MetricError: the metric was never logged (``strict``).
    """

    monitors = True
    rebuilds = False

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
        self.min_delta = abs(min_delta) * (1 if mode == "max" else -1)  # with the sign of an improvement
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
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self.best_score = torch.tensor(worst(mode))
        if self._has_operator:
            self.best_score = torch.tensor(math.inf if self.monitor_op is torch.lt else -math.inf)
        self._check_on_train_epoch_end = check_on_train_epoch_end

    mode_dict: ClassVar[dict[str, Callable[..., Any]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    @property
    def _has_operator(self) -> bool:
        """Whether a subclass says itself what is better."""
        kind = type(self)
        return kind.monitor_op is not EarlyStopping.monitor_op or kind.mode_dict is not EarlyStopping.mode_dict

    @property
    def monitor_op(self) -> Callable[..., Any]:
        """Whether its first argument is better than its second: what subclasses compare values with."""
        return self.mode_dict[self.mode]

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{ {'monitor': self.monitor, 'mode': self.mode} }"

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit" and self._check_on_train_epoch_end is None:
            each_epoch = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
            self._check_on_train_epoch_end = True if each_epoch else None

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
        if not self._check_on_train_epoch_end and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        here = not has_validation(trainer) if self._check_on_train_epoch_end is None else self._check_on_train_epoch_end
        if here and not self._should_skip_check(trainer):
            self._run_early_stopping_check(trainer)

    def _should_skip_check(self, trainer: Trainer) -> bool:
        """Whether this is no moment of training. Subclasses that check at another time ask it; like the names below
        that begin with an underscore and are called from here, it is Lightning's."""
        return trainer.stage != "fit" or trainer.sanity_checking

    def _run_early_stopping_check(self, trainer: Trainer) -> None:
        """Look at the metric now; subclasses that check at another time call it (the name is Lightning's)."""
        metric = trainer.monitored(self.monitor)  # of which the ranks know the same
        logs = {name: value for name, value in trainer.callback_metrics.items() if name != self.monitor}
        if metric is not None:
            logs[self.monitor] = metric
        if trainer.fast_dev_run or not self._validate_condition_metric(logs):
            return
        stop, message = self._evaluate_stopping_criteria(torch.as_tensor(logs[self.monitor]).squeeze())
        if stop:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        if message and (self.verbose or stop):
            self._log_info(trainer, message, self.log_rank_zero_only)

    def _validate_condition_metric(self, logs: Mapping[str, Any]) -> bool:
        """Whether the metric is among ``logs``; without it, with ``strict``, it is an error."""
        if logs.get(self.monitor) is not None:
            return True
        error = missing("EarlyStopping", self.monitor, logs)
        if self.strict:
            raise error
        log.warning("%s", error)
        return False

    def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str | None]:
        """Whether to stop, and what to say; it notes the reason. Subclasses that judge in another way override it (the
        name is Lightning's)."""
        reason, message = self._judge(current)
        stop = reason is not EarlyStoppingReason.NOT_STOPPED
        if stop:
            self.stopping_reason = reason
        return stop, message

    def _judge(self, value: torch.Tensor) -> tuple[EarlyStoppingReason, str]:
        current, best, reasons = float(value), float(self.best_score), EarlyStoppingReason
        name, better = self.monitor, self.order_dict[self.mode]
        if self.check_finite and not math.isfinite(current):
            return reasons.NON_FINITE_METRIC, f"{name} = {current} is not finite; its best was {best:.4g}."
        if self.stopping_threshold is not None and self._better(current, self.stopping_threshold):
            message = f"{name} = {current:.4g} {better} {self.stopping_threshold}: the threshold is reached."
            return reasons.STOPPING_THRESHOLD, message
        if self.divergence_threshold is not None and self._better(-current, -self.divergence_threshold):
            message = f"{name} = {current:.4g} is worse than {self.divergence_threshold}: training diverges."
            return reasons.DIVERGENCE_THRESHOLD, message
        if self._better(current, best, abs(self.min_delta)):
            message = self._improvement_message(value)
            self.best_score, self.wait_count = value.detach().clone(), 0
            return reasons.NOT_STOPPED, message
        self.wait_count += 1
        if self.wait_count >= self.patience:
            message = f"{name} did not improve in {self.wait_count} checks; its best was {best:.4g}."
            return reasons.PATIENCE_EXHAUSTED, message
        return reasons.NOT_STOPPED, ""

    def _improvement_message(self, current: torch.Tensor) -> str:
        """What is said of a value that is better than ``best_score``."""
        best = float(self.best_score)
        gain = f" by {abs(best - float(current)):.4g}" if math.isfinite(best) else ""
        return f"{self.monitor} improved{gain} to {float(current):.4g}."

    def _better(self, value: float, than: float, margin: float = 0.0) -> bool:
        """Whether ``value`` is better than another one by more than ``margin``, as a project says that has an operator
        of its own."""
        if not self._has_operator:
            return improves(self.mode, value, than, margin)
        signed = margin if self.monitor_op is torch.gt else -margin
        return bool(self.monitor_op(torch.tensor(value - signed), torch.tensor(than)))

    @staticmethod
    def _log_info(trainer: Trainer, message: str, log_rank_zero_only: bool) -> None:
        if trainer.is_global_zero or not log_rank_zero_only:
            rank = "" if trainer.world_size == 1 or log_rank_zero_only else f"[rank {trainer.global_rank}] "
            log.info("%s%s", rank, message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = torch.as_tensor(state_dict["best_score"])
        self.patience = state_dict["patience"]
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
