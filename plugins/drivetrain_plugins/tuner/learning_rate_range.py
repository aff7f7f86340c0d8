"""The learning rate range test: the loss while the rate grows from step to step (Smith, WACV 2017)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import stage_data
from drivetrain.callback import Callback
from drivetrain.checkpoint import rng
from drivetrain.errors import ConfigurationError
from drivetrain.optimizer import SchedulerConfig
from drivetrain_plugins.tuner.trial import Trial

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class LearningRateRange:
    """What a range test found.

    Attributes:
        mode: ``"exponential"`` or ``"linear"``.
        lr_min, lr_max: the first rate, and that of the last step.
        num_training: steps.
        results: ``{"lr": [...], "loss": [...]}`` by step; the loss is smoothed, and the same on all workers.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the loss falls fastest; None where there are fewer than two finite losses.

        Args:
            skip_begin, skip_end: steps left out at both ends.
        """
        losses, rates = self.results["loss"], self.results["lr"]
        chosen = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        self._optimal_idx = None
        if len(chosen) < 2:
            return None
        spacing = torch.tensor([rates[i] for i in chosen])
        slopes = torch.gradient(torch.tensor([losses[i] for i in chosen]), spacing=[spacing])[0]
        self._optimal_idx = chosen[int(torch.argmin(slopes))]
        return rates[self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw loss over rate with matplotlib; returns the figure.

        Args:
            suggest: mark the suggestion.
            show: show the figure in a window.
            ax: where to draw; default: a new figure.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError:
            raise ConfigurationError("plot() needs the package matplotlib: pip install matplotlib") from None
        figure, ax = plt.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            at = self._optimal_idx
            ax.plot(self.results["lr"][at], self.results["loss"][at], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure

    def state_dict(self) -> dict[str, Any]:
        return {"settings": [self.mode, self.lr_min, self.lr_max, self.num_training], "results": self.results}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LearningRateRange:
        found = cls(*state["settings"])
        found.results = state["results"]
        return found


class _Recorder(Callback):
    """Notes rate and smoothed loss of every step, and asks for a stop where the loss diverges."""

    def __init__(self, found: LearningRateRange, threshold: float | None, beta: float = 0.98) -> None:
        self.found, self.threshold, self.beta = found, threshold, beta
        self.mean = self.best = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.found.results["lr"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        loss = _global_loss(trainer, outputs)
        losses = self.found.results["loss"]
        if math.isnan(loss):
            losses.append(loss)
            return
        step = trainer.global_step
        self.mean = self.beta * self.mean + (1 - self.beta) * loss
        smoothed = self.mean / (1 - self.beta ** (step + 1))
        if self.threshold is not None and step > 1 and smoothed > self.threshold * self.best:
            trainer.should_stop = True
        if smoothed < self.best or step == 1:
            self.best = smoothed
        losses.append(smoothed)


def _global_loss(trainer: Trainer, outputs: Any) -> float:
    """The loss of the batch just made as one process would have it: the ranks', by their weights; NaN where none has
    one."""
    if trainer.strategy.communicator.world_size == 1:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        return math.nan if loss is None else float(loss)
    fit = trainer.fit_loop
    loss, weight = fit.newest_loss or (0.0, 0.0)
    mine = torch.tensor([float(loss) * weight, weight], dtype=torch.float64, device=trainer.strategy.device)
    total, weight = torch.stack(trainer.strategy.gather(mine)).sum(0).tolist()
    if not weight:
        return math.nan
    divided = fit.same_weight and trainer.lightning_module.automatic_optimization
    return total / weight / (trainer.accumulate_grad_batches if divided else 1)


def range_test(
    trainer: Trainer, minimum: float, maximum: float, steps: int, mode: str, threshold: float | None
) -> LearningRateRange:
    """Train ``steps`` steps with rates from ``minimum`` to ``maximum``, and put everything back.

    Raises:
        ConfigurationError: the module configures several optimizers.
    """
    if len(trainer.optimizers) != 1:
        raise ConfigurationError(
            f"the learning rate finder needs one optimizer, {type(trainer.lightning_module).__name__} configures"
            f" {len(trainer.optimizers)}: find their rates by hand."
        )
    found = LearningRateRange(mode, minimum, maximum, steps)
    recorder = _Recorder(found, threshold)
    with Trial(trainer, [recorder], validates=trainer.meanings.trials == "validate") as trial:
        optimizer = trial.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = minimum
        growth = maximum / minimum

        def factor(step: int) -> float:
            done = (step + 1) / steps if step > 0 else 0.0
            return growth**done if mode == "exponential" else 1.0 + done * (growth - 1.0)

        trainer.lr_scheduler_configs = [SchedulerConfig(LambdaLR(optimizer, factor), interval="step")]
        trial.train(steps)
    with rng.kept():
        stage_data.training(trainer).open()  # that of the trial has been read from
    return found
