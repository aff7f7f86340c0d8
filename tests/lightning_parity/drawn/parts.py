"""The parts of a drawn project that are a library's: its callbacks, loggers and optimizers, by the names of a draw."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OPTIMIZERS = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
    "rprop": lambda parameters, lr: torch.optim.Rprop(parameters, lr=lr),  # by the gradients' signs alone
    "lbfgs": lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr, max_iter=2),
}
_SCHEDULERS = torch.optim.lr_scheduler
SCHEDULERS = {
    "step": lambda optimizer: _SCHEDULERS.StepLR(optimizer, 2, gamma=0.5),
    "exponential": lambda optimizer: _SCHEDULERS.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: _SCHEDULERS.CosineAnnealingLR(optimizer, 7),
    "restarts": lambda optimizer: _SCHEDULERS.CosineAnnealingWarmRestarts(optimizer, 3),
    "one_cycle": lambda optimizer: _SCHEDULERS.OneCycleLR(optimizer, 0.1, total_steps=400),
    "lambda": lambda optimizer: _SCHEDULERS.LambdaLR(optimizer, lambda n: 1.0 / (1 + n)),
    "sequential": lambda optimizer: _SCHEDULERS.SequentialLR(
        optimizer,
        [_SCHEDULERS.ConstantLR(optimizer, 0.5, total_iters=2), _SCHEDULERS.ExponentialLR(optimizer, 0.8)],
        milestones=[2],
    ),
    "plateau": lambda optimizer: _SCHEDULERS.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.05),
}


def callback(L: Any, kind: str, options: dict[str, Any], folder: Path) -> Any:
    """The callback ``kind`` of ``L``; folders among its options lie in ``folder``."""
    options = {name: (str(folder / value) if name == "dirpath" else value) for name, value in options.items()}
    if kind == "GradientAccumulationScheduler":
        options["scheduling"] = {int(epoch): factor for epoch, factor in options["scheduling"].items()}
    if options.get("lambda_func"):
        options["lambda_func"] = lambda epoch: 2.0
    if kind == "WeightAveraging":
        return _averaging(L, **options)
    if kind == "Stateful":
        return _stateful(L)()
    if kind == "Writer":
        return _writer(L, folder, **options)
    if kind == "LambdaCallback":
        return L.callbacks.LambdaCallback(**{hook: lambda *_: None for hook in options["hooks"]})
    return getattr(L.callbacks, kind)(**options)


def _averaging(L: Any, every: int = 1, by_epoch: bool = False) -> Any:
    class Averaging(L.callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            if by_epoch:
                return epoch_idx is not None
            return step_idx is not None and step_idx % every == 0

    return Averaging()


@cache
def _stateful(L: Any) -> Any:
    """The class, of which a project has one."""

    class Stateful(L.Callback):
        def __init__(self) -> None:
            self.batches, self.heard = 0, []

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = self.batches
            self.heard.append(("save", self.batches))

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            self.heard.append(("load", checkpoint.get("own"), trainer.global_step))

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.heard.append(("state", dict(state_dict)))
            self.batches = state_dict["batches"]

    return Stateful


def _writer(L: Any, folder: Path, interval: str = "batch") -> Any:
    class Writer(L.callbacks.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__(interval)
            self.written: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, number: int, loader: int
        ) -> None:
            self.written.append(("batch", prediction, indices, number, loader))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.written.append(("epoch", predictions, indices))

    return Writer()


def facts_of(callback: Any, folder: Path) -> dict[str, Any]:
    """What can be seen of a callback afterwards; paths as seen from ``folder``."""
    found = {}
    for name in _SEEN.get(type(callback).__name__, ()):
        found[name] = _portable(getattr(callback, name), folder)
    return found


_SEEN = {
    "ModelCheckpoint": (
        *("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value"),
        *("last_model_path", "current_score", "dirpath"),
    ),
    "EarlyStopping": ("wait_count", "stopped_epoch", "best_score", "patience"),
    "LearningRateMonitor": ("lrs",),
    "Writer": ("written",),
    "Stateful": ("batches", "heard"),
}


def _portable(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value.replace(str(folder), "")
    if isinstance(value, dict):
        return {_portable(k, folder): _portable(v, folder) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(v, folder) for v in value]
    if torch.is_tensor(value) and value.numel() == 1:
        return float(value)
    return value


def scalars_of(folder: Path) -> dict[str, Any]:
    """What TensorBoard shows of a run: by tag, steps and values."""
    if not folder.is_dir():
        return {}
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    tags = [tag for tag in found.Tags()["scalars"] if tag != "hp_metric"]
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags}


def memory(L: Any) -> Any:
    """A logger that keeps what it is told, on the first rank as Lightning wants it of a project's own."""
    first_rank_only = __import__(f"{L.__name__}.utilities", fromlist=["rank_zero_only"]).rank_zero_only

    class Memory(L.loggers.Logger):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[Any] = []

        @property
        def name(self) -> str:
            return "memory"

        @property
        def version(self) -> int:
            return 0

        @first_rank_only
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.told.append(("metrics", {name: float(value) for name, value in metrics.items()}, step))

        @first_rank_only
        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            self.told.append(("hyperparams", dict(params)))

        @first_rank_only
        def finalize(self, status: str) -> None:
            self.told.append(("finalize", status))

    return Memory()
