"""LearningRateMonitor: log the learning rate of every optimizer and parameter group."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from itertools import chain
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
        self._given = Counter[str]()  # how often each name was given in the search at hand

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._logged_step = -1
        names, seen, kinds = self._find_names_from_schedulers(trainer.lr_scheduler_configs)
        others, _ = self._find_names_from_optimizers(trainer.optimizers, seen, kinds)  # which puts them to those seen
        self.lrs = {key: [] for key in chain.from_iterable([*names, *others])}
        self.last_momentum_values = {f"{key}-momentum": None for key in self.lrs}
        self.last_weight_decay_values = {f"{key}-weight_decay": None for key in self.lrs}
        without = [f"lr-{type(each).__name__}" for each in seen if not {"momentum", "betas"} & each.defaults.keys()]
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
        """What is logged now: of schedules of this ``interval``, or of "any", and of optimizers without one. Subclasses
        that log more, or otherwise, override it or what it calls (the names are Lightning's)."""
        found: dict[str, float] = {}
        configs = trainer.lr_scheduler_configs  # which may have been exchanged
        names, seen, kinds = self._find_names_from_schedulers(configs)
        self._remap_keys(names)
        for keys, config in zip(names, configs, strict=True):
            if interval in (config.interval, "any"):
                found.update(self._get_optimizer_stats(config.scheduler.optimizer, keys))
        names, others = self._find_names_from_optimizers(trainer.optimizers, seen, kinds)
        self._remap_keys(names)
        for keys, optimizer in zip(names, others, strict=True):
            found.update(self._get_optimizer_stats(optimizer, keys))
        # A rate that a schedule computed with NumPy stays of its type, as in Lightning.
        kind = torch.float64 if trainer.meanings.figures == "double" else None
        trainer.callback_metrics.update({key: torch.tensor(value, dtype=kind) for key, value in found.items()})
        return found

    # -- figures ------------------------------------------------------------------------------------------------
    def _get_optimizer_stats(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        """The figures of each group of ``optimizer``, whose keys are ``names``."""
        found: dict[str, float] = {}
        for group, name in zip(optimizer.param_groups, names, strict=True):
            found.update(self._extract_lr(group, name))
            found.update(self._extract_momentum(group, f"{name}-momentum", "betas" in group))
            found.update(self._extract_weight_decay(group, f"{name}-weight_decay"))
        return found

    def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, Any]:
        rate = param_group["lr"]
        if isinstance(rate, torch.Tensor):
            rate = float(rate)
        self.lrs.setdefault(name, []).append(rate)  # groups may join while training runs
        return {name: rate}

    def _extract_momentum(self, param_group: dict[str, Any], name: str, use_betas: bool) -> dict[str, float]:
        if not self.log_momentum:
            return {}
        momentum = float(param_group["betas"][0] if use_betas else param_group.get("momentum", 0.0))
        self.last_momentum_values[name] = momentum
        return {name: momentum}

    def _extract_weight_decay(self, param_group: dict[str, Any], name: str) -> dict[str, Any]:
        if not self.log_weight_decay:
            return {}
        decay = float(param_group.get("weight_decay", 0.0))
        self.last_weight_decay_values[name] = decay
        return {name: decay}

    def _remap_keys(self, names: list[list[str]], token: str = "/pg1") -> None:
        """What was known of an optimizer's only group is that of its first one once others have joined it."""
        for key in chain.from_iterable(names):
            alone = key.replace(token, "")
            if alone != key and alone in self.lrs:
                self.lrs[key] = self.lrs.pop(alone)
            self.lrs.setdefault(key, [])

    # -- names --------------------------------------------------------------------------------------------------
    def _find_names_from_schedulers(
        self, lr_scheduler_configs: list[Any]
    ) -> tuple[list[list[str]], list[Optimizer], defaultdict[type[Optimizer], int]]:
        """The keys of the groups of each scheduler's optimizer; these optimizers; how many of each class have a name
        of the class's."""
        seen: list[Optimizer] = []
        kinds: defaultdict[type[Optimizer], int] = defaultdict(int)
        self._given = Counter[str]()
        names = []
        for config in lr_scheduler_configs:
            optimizer = config.scheduler.optimizer
            name = config.name or f"lr-{type(optimizer).__name__}"
            names.append(self._check_duplicates_and_update_name(optimizer, name, seen, kinds, config))
        return names, seen, kinds

    def _find_names_from_optimizers(
        self,
        optimizers: list[Any],
        seen_optimizers: list[Optimizer],
        seen_optimizer_types: defaultdict[type[Optimizer], int],
    ) -> tuple[list[list[str]], list[Optimizer]]:
        """The same of the optimizers that have no scheduler, and these."""
        names, others = [], []
        for optimizer in (getattr(wrapper, "optimizer", wrapper) for wrapper in optimizers):  # a loop may wrap them
            if not any(optimizer is one for one in seen_optimizers):
                name = f"lr-{type(optimizer).__name__}"
                seen, kinds = seen_optimizers, seen_optimizer_types
                names.append(self._check_duplicates_and_update_name(optimizer, name, seen, kinds, None))
                others.append(optimizer)
        return names, others

    def _check_duplicates_and_update_name(
        self,
        optimizer: Optimizer,
        name: str,
        seen_optimizers: list[Optimizer],
        seen_optimizer_types: defaultdict[type[Optimizer], int],
        lr_scheduler_config: Any,
    ) -> list[str]:
        """The keys of the groups of an optimizer of this ``name``, which is numbered where others have it.

        Raises:
            ConfigurationError: two of its groups have the same name.
        """
        seen_optimizers.append(optimizer)
        if lr_scheduler_config is None or not lr_scheduler_config.name:
            seen_optimizer_types[type(optimizer)] += 1
        groups = optimizer.param_groups
        if twice := self._duplicate_param_group_names(groups):
            raise ConfigurationError(
                "LearningRateMonitor: several parameter groups are called"
                f" {', '.join(f'{name}/{each}' for each in sorted(twice))}: give each a name of its own."
            )
        name = self._add_prefix(name, type(optimizer), seen_optimizer_types)
        numbered = f"{name}-{self._given[name]}" if self._given[name] else name
        self._given[name] += 1
        return [self._add_suffix(numbered, groups, index) for index in range(len(groups))]

    def _add_prefix(
        self, name: str, optimizer_cls: type[Optimizer], seen_optimizer_types: defaultdict[type[Optimizer], int]
    ) -> str:
        """``name`` with the number of its optimizer's class. As in Lightning a name of a scheduler's own is numbered,
        too, after those of its optimizer's class without."""
        number = seen_optimizer_types.get(optimizer_cls, 0) - 1
        return f"{name}-{number}" if number > 0 else name

    def _add_suffix(
        self, name: str, param_groups: list[dict[str, Any]], param_group_index: int, use_names: bool = True
    ) -> str:
        """``name`` with that of the group, or its number from 1 where there are several."""
        numbered = f"pg{param_group_index + 1}" if len(param_groups) > 1 else None
        called = param_groups[param_group_index].get("name", numbered) if use_names else numbered
        return f"{name}/{called}" if called else name

    def _duplicate_param_group_names(self, param_groups: list[dict[str, Any]]) -> set[str]:
        if len(param_groups) == 1:
            return set()
        names = Counter(group.get("name", f"pg{index}") for index, group in enumerate(param_groups, 1))
        return {name for name, times in names.items() if times > 1}
