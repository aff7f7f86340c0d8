"""LearningRateMonitor: log the learning rate of every optimizer and parameter group."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class LearningRateMonitor(Callback):
    """Keys are Lightning's: ``lr-Adam``, ``lr-Adam-1`` for a second Adam, ``lr-Adam/pg1`` where an optimizer has
    several groups (or ``lr-Adam/NAME`` of a group with a name), ``-momentum`` and ``-weight_decay`` after it. A name
    given to a scheduler stands in place of ``lr-Adam``, also before the number.

    The rate logged at step k (from 0, like the other metrics of training) is the one that step k uses. Values go to
    the loggers (first worker) and into ``callback_metrics`` (every worker: they are the same).

    Args:
        logging_interval: ``"step"`` (every ``log_every_n_steps``), ``"epoch"``, or None for each scheduler's own.
        log_momentum: log momentum, or the first beta, too.
        log_weight_decay: log weight decay too.

    Raises:
        ConfigurationError: another interval; groups of one optimizer that have the same name.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}) is none: use 'step', 'epoch' or null."
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._logged_step = -1
        found = named_optimizers(trainer)
        self.lrs = {key: [] for name, optimizer, _ in found for key in _group_names(name, optimizer)}
        self.last_momentum_values = {f"{key}-momentum": None for key in self.lrs}
        self.last_weight_decay_values = {f"{key}-weight_decay": None for key in self.lrs}
        without = [name for name, optimizer, _ in found if not {"momentum", "betas"} & optimizer.defaults.keys()]
        if self.log_momentum and without and trainer.is_global_zero:
            warnings.warn(
                f"LearningRateMonitor(log_momentum=True): {', '.join(without)} has no momentum, 0 is logged for it.",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self.logging_interval == "epoch":
            return
        step, each = trainer.batches_stepped, trainer.meanings.moments == "batch"
        due = trainer.log_falls_on(step + 1) or (each and trainer.should_stop)
        if due and (each or step != self._logged_step):
            self._logged_step = step
            self._log(trainer, "step", step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch", trainer.batches_stepped)

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        found = self._extract_stats(trainer, interval if self.logging_interval is None else "any")
        if found and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(found, step=step)

    def _extract_stats(self, trainer: Trainer, interval: str) -> dict[str, float]:
        """What is logged now: of schedules of this ``interval``, or of "any". Subclasses that log more, or otherwise,
        override it (the name is Lightning's)."""
        found: dict[str, float] = {}
        for name, optimizer, its_interval in named_optimizers(trainer):  # schedules may have been exchanged
            if interval == "any" or its_interval in (interval, "any"):
                found.update(self._read(name, optimizer))
        kind = torch.float64 if trainer.meanings.figures == "double" else torch.get_default_dtype()
        trainer.callback_metrics.update({key: torch.tensor(value, dtype=kind) for key, value in found.items()})
        return found

    def _read(self, name: str, optimizer: Optimizer) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, group in zip(_group_names(name, optimizer), optimizer.param_groups, strict=True):
            if key.endswith("/pg1") and name in self.lrs:  # the only group was called like its optimizer until now
                self.lrs[key] = self.lrs.pop(name)
            found[key] = float(group["lr"])
            self.lrs.setdefault(key, []).append(found[key])  # groups may join while training runs
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                found[f"{key}-momentum"] = float(momentum)
                self.last_momentum_values[f"{key}-momentum"] = float(momentum)
            if self.log_weight_decay:
                found[f"{key}-weight_decay"] = decay = float(group.get("weight_decay", 0.0))
                self.last_weight_decay_values[f"{key}-weight_decay"] = decay
        return found


def named_optimizers(trainer: Trainer) -> list[tuple[str, Optimizer, str]]:
    """``(name, optimizer, interval)`` for every scheduler, then for every optimizer that has none (interval "any")."""
    scheduled = [(c.scheduler.optimizer, c.name, c.interval) for c in trainer.lr_scheduler_configs]
    known = {id(optimizer) for optimizer, _, _ in scheduled}
    others = [getattr(wrapper, "optimizer", wrapper) for wrapper in trainer.optimizers]  # a loop may hand out wrappers
    scheduled += [(optimizer, None, "any") for optimizer in others if id(optimizer) not in known]
    named: list[tuple[str, Optimizer, str]] = []
    unnamed, seen = Counter[type[Optimizer]](), Counter[str]()
    for optimizer, given, interval in scheduled:
        kind = type(optimizer)
        unnamed[kind] += given is None
        base = given or f"lr-{kind.__name__}"
        # As in Lightning: a name of a scheduler's own is numbered, too, after those of its optimizer's class without.
        name = f"{base}-{unnamed[kind] - 1}" if unnamed[kind] > 1 else base
        named.append((f"{name}-{seen[name]}" if seen[name] else name, optimizer, interval))
        seen[name] += 1
    return named


def _group_names(name: str, optimizer: Optimizer) -> list[str]:
    """The key of each group of ``optimizer``, in their order."""
    groups = optimizer.param_groups
    if len(groups) == 1 and "name" not in groups[0]:
        return [name]
    names = [f"{name}/{group.get('name', f'pg{index}')}" for index, group in enumerate(groups, 1)]
    if twice := [each for each, times in Counter(names).items() if times > 1]:
        raise ConfigurationError(
            f"LearningRateMonitor: several parameter groups are called {', '.join(twice)}: give each a name of its own."
        )
    return names
