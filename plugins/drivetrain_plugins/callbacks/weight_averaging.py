"""WeightAveraging: a running average of the weights beside training, validated and saved in their place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class WeightAveraging(Callback):
    """Arguments, figures and checkpoint keys are Lightning's.

    Validation sees the averaged weights, checkpoints have them as ``state_dict`` (what training goes on from is
    beside, as ``current_model_state``), and after training the module has them. Override :meth:`should_update` to
    choose when the average is updated; the default is after every optimizer step.

    Args:
        device: where the average is kept; default: where the module computes.
        use_buffers: average buffers too (BatchNorm statistics); otherwise they are copied.
        kwargs: for ``torch.optim.swa_utils.AveragedModel``: ``avg_fn`` or ``multi_avg_fn``; default: the mean.
    """

    needs = ("editable",)

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        self._device = torch.device(device) if isinstance(device, str) else device
        self._use_buffers = use_buffers
        self._kwargs = kwargs
        self._average_model: AveragedModel | None = None
        self._loaded: dict[str, Any] | None = None  # the average of the checkpoint that training goes on from
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update after optimizer step ``step_idx`` (from 0), or at the end of epoch ``epoch_idx`` (from 0);
        it is called with one of them."""
        return step_idx is not None

    # -- the run ------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._average_model = self._loaded = None
            self._latest_update_step, self._latest_update_epoch = trainer.global_step, -1

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Begin with the weights as they are. Not in ``setup``: the module is built completely, and in its number
        format, only when the strategy has it."""
        device = self._device or trainer.strategy.device
        self._average_model = AveragedModel(pl_module, device, use_buffers=self._use_buffers, **self._kwargs)
        if self._loaded is not None:
            self._average_model.load_state_dict(self._loaded, strict=False)
            self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._averaged().update_parameters(pl_module)
            self._latest_update_step = step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._averaged().update_parameters(pl_module)
            self._latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._copy_average_to_current(pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._average_model is not None:
            self._swap_models(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._average_model is not None:
            self._swap_models(pl_module)

    def _swap_models(self, pl_module: TrainModule) -> None:
        """Exchange the average with the module's weights, for subclasses that test with it as well (the name is
        Lightning's)."""
        for average, current in _pairs(self._averaged(), pl_module):
            kept = average.data.clone()
            average.data.copy_(current.data)
            current.data.copy_(kept)

    def _copy_average_to_current(self, pl_module: TrainModule) -> None:
        """Give the module the average (the name is Lightning's)."""
        for average, current in _pairs(self._averaged(), pl_module):
            current.data.copy_(average.data)

    # -- checkpoints --------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._latest_update_step, "latest_update_epoch": self._latest_update_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_step = state_dict["latest_update_step"]
        self._latest_update_epoch = state_dict.get("latest_update_epoch", -1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if self._average_model is None:  # after training the module itself has the average
            return
        state = self._average_model.state_dict()
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n.removeprefix("module."): v for n, v in state.items() if n.startswith("module.")}
        checkpoint["averaging_state"] = {n: v for n, v in state.items() if not n.startswith("module.")}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """For training: ``state_dict`` is the average, in whose place comes what training goes on from. Of a checkpoint
        saved without this callback average and weights begin alike."""
        if trainer.stage == "fit" and "current_model_state" in checkpoint:
            weights = {f"module.{name}": value for name, value in checkpoint["state_dict"].items()}
            self._loaded = {**weights, **checkpoint["averaging_state"]}
            checkpoint["state_dict"] = checkpoint["current_model_state"]

    def _averaged(self) -> AveragedModel:
        assert self._average_model is not None
        return self._average_model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_average_model": None, "_loaded": None}


class EMAWeightAveraging(WeightAveraging):
    """The exponential moving average of the weights.

    Args:
        device, use_buffers, kwargs: see :class:`WeightAveraging`.
        decay: what the average keeps of itself at each update.
        update_every_n_steps: optimizer steps between updates.
        update_starting_at_step: the first optimizer step, from 0, after which the average is updated.
        update_starting_at_epoch: update at the ends of epochs from this one on, from 0, as well.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device=device, use_buffers=use_buffers, **kwargs, avg_fn=get_ema_avg_fn(decay=decay))
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        start = self.update_starting_at_epoch
        return epoch_idx is not None and start is not None and epoch_idx >= start


def _pairs(average: AveragedModel, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter and buffer of the average with the module's own."""
    averages = itertools.chain(average.module.parameters(), average.module.buffers())
    return zip(averages, itertools.chain(module.parameters(), module.buffers()), strict=True)
