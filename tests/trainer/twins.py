"""The same module, callback and run under Lightning and under drivetrain, to be compared call by call."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import drivetrain
from tests.runs import QUIET, dataset, seeded

_STAGES = ("train", "validation", "test", "predict")
_OF_BOTH = [
    *(f"on_{stage}_{moment}" for stage in ("fit", *_STAGES) for moment in ("start", "end")),
    *(f"on_{stage}_epoch_{moment}" for stage in _STAGES for moment in ("start", "end")),
    *(f"on_{stage}_batch_{moment}" for stage in _STAGES for moment in ("start", "end")),
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "setup",
    "teardown",
]
MODULE_HOOKS = [
    *_OF_BOTH,
    "prepare_data",
    "configure_model",
    "configure_callbacks",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "backward",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_test_model_eval",
    "on_test_model_train",
    "on_predict_model_eval",
    "on_predict_model_train",
]
CALLBACK_HOOKS = [*_OF_BOTH, "on_sanity_check_start", "on_sanity_check_end", "on_exception"]


def recording(base: type, names: list[str], calls: list[str], prefix: str) -> type:
    """A subclass of ``base`` that notes each call of the named methods and passes it on."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{prefix}.{name}")
            return getattr(super(kind, self), name)(*args, **kwargs)

        return call

    kind = type("Recording" + base.__name__, (base,), {})
    for name in names:
        if hasattr(base, name):
            setattr(kind, name, method(name))
    return kind


class Body:
    """A small module without a base: mixed with Lightning's and with drivetrain's. Options by name in ``hp``."""

    hp: dict[str, Any]

    def build(self: Any, hp: dict[str, Any]) -> None:
        self.hp = hp
        self.net = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
        self.net.double()
        self.seen: list[Any] = []

    def loss(self: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.seen.append((self.current_epoch, self.global_step, batch_idx, loss.item(), self.lr()))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("plain", 2.0 * loss)
        return loss

    def lr(self: Any) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"]) if self.trainer.optimizers else 0.0

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), prog_bar=True)

    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        kind = self.hp.get("scheduler")
        if kind is None:
            return optimizer
        if kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=10.0
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": kind}]


def make_module(library: Any, hp: dict[str, Any] | None = None, body: type = Body) -> Any:
    """``body`` as a module of ``library`` (``lightning`` or ``drivetrain``)."""
    base = library.LightningModule if library is lightning else library.TrainModule

    def init(self: Any) -> None:
        base.__init__(self)
        self.build(hp or {})

    return type(body.__name__, (body, base), {"__init__": init})


def batches(samples: int = 51, size: int = 8) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=size, shuffle=False)


@dataclass
class Twin:
    """What one library's run left."""

    trainer: Any
    module: Any
    calls: list[str] = field(default_factory=list)
    result: Any = None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


def run(
    library: Any,
    stages: tuple[str, ...] = ("fit",),
    hp: dict[str, Any] | None = None,
    body: type = Body,
    callbacks: Any = None,
    train: Any = None,
    val: Any = "default",
    record: bool = False,
    **options: Any,
) -> Twin:
    """Run ``stages`` under ``library``; ``callbacks(library)`` gives more callbacks."""
    calls: list[str] = []
    made = make_module(library, hp, body)
    found = list(callbacks(library)) if callbacks else []
    if record:
        made = recording(made, MODULE_HOOKS, calls, "module")
        found.append(recording(library.Callback, CALLBACK_HOOKS, calls, "callback")())
    settings = {**QUIET, "precision": "64-true", "max_epochs": 2, "callbacks": found, "log_every_n_steps": 1, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = library.Trainer(**settings)
        twin = Twin(trainer, made(), calls)
        for stage in stages:
            if stage == "fit":
                loaders = [batches() if train is None else train()]
                if val is not None:
                    loaders.append(batches(11, 4) if val == "default" else val())
                trainer.fit(twin.module, *loaders)
            elif stage == "predict":
                twin.result = trainer.predict(twin.module, batches(11, 4))
            else:
                twin.result = getattr(trainer, stage)(twin.module, batches(11, 4), verbose=False)
    return twin


def both(**options: Any) -> tuple[Twin, Twin]:
    """``(lightning, drivetrain)``."""
    return run(lightning, **options), run(drivetrain, **options)
