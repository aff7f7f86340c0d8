"""StochasticWeightAveraging: the mean of the weights that the last epochs began with, at a raised learning rate.

Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR

from drivetrain.callback import Callback, saved_state
from drivetrain.errors import ConfigurationError
from drivetrain.optimizer import SchedulerConfig

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


Average = Callable[[Tensor, Tensor, Tensor], Tensor]


class Averaged:
    """The averaged weights under the names of a module's methods.

    Args:
        weights: by parameter name, in the order of the module's.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = weights

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._weights.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights.items())

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)


class StochasticWeightAveraging(Callback):
    """Arguments and figures are Lightning's.

    From epoch ``swa_epoch_start`` on the weights at each epoch's start are averaged, and the module's scheduler gives
    way to one that brings the learning rate to ``swa_lrs``. After the last epoch the module gets the averaged weights.
    Where it has BatchNorms, one epoch more runs forward only, which gathers their statistics for these weights.

    Args:
        swa_lrs: learning rate of every parameter group, or one for each.
        swa_epoch_start: number of the first averaged epoch, from 1, or a fraction of ``max_epochs``.
        annealing_epochs: epochs in which the rate moves to ``swa_lrs``.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: new average from the average, the weights, and how many were averaged; default: their mean.
        device: where the average is kept; None: where the module computes.

    Attributes:
        n_averaged: how many weights were averaged (a tensor), None before the first.

    Raises:
        ConfigurationError: arguments that cannot be meant; several optimizers or schedulers.
    """

    needs = ("editable",)

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Average | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        name = type(self).__name__
        whole = isinstance(swa_epoch_start, int)
        if swa_epoch_start < 1 if whole else not 0 <= swa_epoch_start <= 1:
            raise ConfigurationError(
                f"{name}(swa_epoch_start={swa_epoch_start!r}): give a number of an epoch from 1 on, or a fraction (0.0"
                " to 1.0) of max_epochs."
            )
        rates = swa_lrs if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]
        if not rates or not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise ConfigurationError(f"{name}(swa_lrs={swa_lrs!r}): give a positive float, or one for each group.")
        if avg_fn is not None and not callable(avg_fn):
            raise ConfigurationError(
                f"{name}(avg_fn={avg_fn!r}): give a function of average, weights and their number."
            )
        if annealing_strategy not in ("cos", "linear"):
            raise ConfigurationError(f"{name}(annealing_strategy={annealing_strategy!r}): use 'cos' or 'linear'.")
        self.n_averaged: Tensor | None = None
        self._swa_epoch_start = swa_epoch_start
        self._swa_lrs = list(swa_lrs) if isinstance(swa_lrs, (list, tuple)) else swa_lrs
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        self._avg_fn = avg_fn or self.avg_fn
        self._device = device
        self._forget()

    def _forget(self) -> None:
        self._average: dict[str, Tensor] = {}  # by parameter name; empty before the first
        self._swa_scheduler: SWALR | None = None
        self._scheduler_state: dict[str, Any] | None = None
        self._count = 0
        self._latest_update_epoch = -1
        self.momenta: dict[_BatchNorm, float | None] = {}
        self._gathering = False  # whether the epoch for BatchNorm has begun
        self._raised = False  # whether max_epochs has the epoch for BatchNorm in it
        self._accumulated: int | None = None  # the Trainer's window, while that epoch lasts

    @property
    def swa_start(self) -> int:
        """The first averaged epoch, from 0."""
        assert isinstance(self._swa_epoch_start, int)
        return max(self._swa_epoch_start - 1, 0)

    @property
    def swa_end(self) -> int | float:
        """The last averaged epoch, from 0."""
        return float("inf") if self._max_epochs == -1 else self._max_epochs - 1

    @staticmethod
    def avg_fn(averaged_model_parameter: Tensor, model_parameter: Tensor, num_averaged: Tensor) -> Tensor:
        """The mean of ``num_averaged`` weights and one more."""
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    # -- the run ------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self.n_averaged = None
            self._forget()

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        name = type(self).__name__
        if len(trainer.optimizers) != 1 or len(trainer.lr_scheduler_configs) > 1:
            raise ConfigurationError(
                f"{name} needs one optimizer and at most one scheduler, {type(pl_module).__name__} configures"
                f" {len(trainer.optimizers)} and {len(trainer.lr_scheduler_configs)}: leave the callback out, or use"
                " WeightAveraging."
            )
        if isinstance(self._swa_epoch_start, float):
            if trainer.max_epochs == -1:
                raise ConfigurationError(
                    f"{name}(swa_epoch_start={self._swa_epoch_start}) is a fraction of max_epochs, which is without"
                    " limit: give the number of an epoch."
                )
            self._swa_epoch_start = int(trainer.max_epochs * self._swa_epoch_start)
        self._max_epochs = trainer.max_epochs
        if trainer.max_epochs != -1 and self.pl_module_contains_batch_norm(pl_module):
            if not pl_module.automatic_optimization:
                raise ConfigurationError(
                    f"{name} gathers BatchNorm statistics in an epoch that only runs forward, which a module that"
                    " optimises by hand cannot: leave the callback out, or use WeightAveraging."
                )
            trainer.max_epochs += 1
            self._raised = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if self.swa_start <= epoch <= self.swa_end:
            if self._swa_scheduler is None:
                self._take_over_schedule(trainer)
            if epoch > self._latest_update_epoch:
                self._update(pl_module)
                self._latest_update_epoch = epoch
        elif self._raised and epoch == self._max_epochs:
            self._transfer(pl_module)
            self.reset_batch_norm_and_save_state(pl_module)
            self._gathering = True
            trainer.fit_loop.forward_only = True
            self._accumulated, length = trainer.accumulate_grad_batches, trainer.num_training_batches
            if length != float("inf"):
                trainer.accumulate_grad_batches = int(length) + 1  # what a step that looks sees: no window is complete

    def _take_over_schedule(self, trainer: Trainer) -> None:
        optimizer = trainer.optimizers[0]
        groups = optimizer.param_groups
        rates = self._swa_lrs if isinstance(self._swa_lrs, list) else [self._swa_lrs] * len(groups)
        if len(rates) != len(groups):
            raise ConfigurationError(
                f"{type(self).__name__}(swa_lrs={rates}) has {len(rates)} rates for {len(groups)} parameter groups:"
                " give one for each, or one for all."
            )
        for rate, group in zip(rates, groups, strict=True):
            group["initial_lr"] = rate
        self._swa_scheduler = SWALR(
            optimizer,
            swa_lr=rates,  # type: ignore[arg-type]
            anneal_epochs=self._annealing_epochs,
            anneal_strategy=self._annealing_strategy,  # type: ignore[arg-type]
            last_epoch=trainer.max_epochs if self._annealing_strategy == "cos" else -1,
        )
        if self._scheduler_state is not None:
            self._swa_scheduler.load_state_dict(self._scheduler_state)
        configs = trainer.lr_scheduler_configs
        if configs and (configs[0].interval != "epoch" or configs[0].frequency != 1) and trainer.is_global_zero:
            warnings.warn(
                f"{type(self).__name__} steps its scheduler once an epoch, in place of"
                f" {type(configs[0].scheduler).__name__}, which steps every {configs[0].frequency}"
                f" {configs[0].interval}s.",
                stacklevel=2,
            )
        configs[:] = [SchedulerConfig(self._swa_scheduler)]

    # -- what projects override ----------------------------------------------------------------------------------
    @staticmethod
    def pl_module_contains_batch_norm(pl_module: TrainModule) -> bool:
        """Whether the averaged weights need an epoch that gathers statistics."""
        return any(isinstance(module, _BatchNorm) for module in pl_module.modules())

    @staticmethod
    def update_parameters(average_model: Any, model: TrainModule, n_averaged: Tensor, avg_fn: Average) -> None:
        """Take the weights of ``model`` into those of ``average_model``, and count them in ``n_averaged``."""
        for averaged, parameter in zip(average_model.parameters(), model.parameters(), strict=True):
            weights = parameter.detach().to(averaged.device)
            averaged.copy_(weights if n_averaged == 0 else avg_fn(averaged, weights, n_averaged.to(averaged.device)))
        n_averaged += 1

    @staticmethod
    def transfer_weights(src_pl_module: Any, dst_pl_module: TrainModule) -> None:
        """Give the weights of the one to the other."""
        for averaged, parameter in zip(src_pl_module.parameters(), dst_pl_module.parameters(), strict=True):
            parameter.detach().copy_(averaged.to(parameter.device))

    def reset_batch_norm_and_save_state(self, pl_module: TrainModule) -> None:
        """BatchNorms forget, and gather the plain mean over the batches to come; ``momenta`` keeps theirs."""
        self.momenta = {}
        for module in pl_module.modules():
            if isinstance(module, _BatchNorm):
                module.reset_running_stats()
                self.momenta[module] = module.momentum
                module.momentum = None

    def reset_momenta(self) -> None:
        """BatchNorms go on as they did before."""
        for module, momentum in self.momenta.items():
            module.momentum = momentum

    # -- the average ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _update(self, pl_module: TrainModule) -> None:
        if self.n_averaged is None:
            self.n_averaged = torch.tensor(self._count, dtype=torch.long)
        self._average = {
            name: self._average[name].to(self._device or parameter.device)
            if name in self._average
            else parameter.detach().to(self._device or parameter.device, copy=True)
            for name, parameter in pl_module.named_parameters()
        }
        self.update_parameters(Averaged(self._average), pl_module, self.n_averaged, self._avg_fn)
        self._count = int(self.n_averaged)

    @torch.no_grad()
    def _transfer(self, pl_module: TrainModule) -> None:
        if self._average:
            self.transfer_weights(Averaged(self._average), pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        last = trainer.current_epoch - 1
        if last >= 0 and not self._average and trainer.is_global_zero:
            warnings.warn(
                f"{type(self).__name__} averaged nothing: its first epoch would have been {self.swa_start} (from 0),"
                f" and the last one was {last}; the module keeps the weights that it was trained to.",
                stacklevel=2,
            )
        if not self._gathering and (last == self.swa_end or self._max_epochs == -1):
            self._transfer(pl_module)
        elif not self._gathering and self._average and trainer.is_global_zero:
            warnings.warn(
                f"training stopped after epoch {last}, before {type(self).__name__} was done: the module has the"
                " weights of the last step, not their average.",
                stacklevel=2,
            )
        self._restore(trainer)

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        if self._gathering:
            self.reset_momenta()
        self.momenta, self._gathering = {}, False
        if self._accumulated is not None:
            trainer.accumulate_grad_batches, self._accumulated = self._accumulated, None
        if self._raised:
            trainer.max_epochs -= 1
            self._raised = False

    # -- resuming -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": self._count,
            "latest_update_epoch": self._latest_update_epoch,
            "scheduler_state": None if self._swa_scheduler is None else self._swa_scheduler.state_dict(),
            "average_model_state": dict(self._average) or None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._count = state_dict["n_averaged"]
        self._latest_update_epoch = state_dict["latest_update_epoch"]
        self._scheduler_state = state_dict["scheduler_state"]
        self._average = dict(state_dict["average_model_state"] or {})

    def before_restore(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Before schedulers get their states: the one that was taken over must not get another's."""
        saved = saved_state(self, checkpoint.get("callbacks", {}))
        if saved and saved["scheduler_state"] is not None:
            trainer.lr_scheduler_configs.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_swa_scheduler": None}  # it holds an optimizer of this process
