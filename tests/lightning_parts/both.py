"""The same small project under Lightning and under drivetrain.lightning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as theirs
import torch
import tqdm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain.lightning as ours

tqdm.tqdm.monitor_interval = 0  # else it starts a thread


def loader(samples: int = 22, batch_size: int = 4) -> DataLoader[Any]:
    """Two normal features and a label that is their sign; the last batch is short."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=batch_size)


def trainer(L: Any, root: Any, **options: Any) -> Any:
    """A quiet Trainer on one CPU process."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(root),
        "max_epochs": 4,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return L.Trainer(**{**quiet, **options})


def classifier(L: Any, norm: bool = False, everything: bool = False, **parts: Any) -> Any:
    """A module of ``L`` with a backbone and a head; its optimizer begins with what is trained, or with everything.

    ``parts`` are methods put in its class. It notes learning rates at each epoch's end and validation losses.
    """

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                layers: list[nn.Module] = [nn.Linear(3, 5), nn.BatchNorm1d(5)] if norm else [nn.Linear(3, 5)]
                self.backbone = nn.Sequential(*layers, nn.Tanh())
                self.head = nn.Linear(5, 2)
            self.rates: list[list[float]] = []
            self.losses: list[float] = []

        def forward(self, x: Any) -> Any:
            return self.head(self.backbone(x))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(float(loss))
            self.log("val", loss)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self(batch[0]).argmax(1)

        def on_train_epoch_end(self) -> None:
            self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

        def configure_optimizers(self) -> Any:
            held = self.parameters() if everything else filter(lambda p: p.requires_grad, self.parameters())
            return torch.optim.SGD(held, lr=0.1, momentum=0.5)

    for name, part in parts.items():
        setattr(Module, name, part)
    return Module()


def weights(module: Any) -> dict[str, torch.Tensor]:
    """A copy of its weights and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def close(a: Any, b: Any) -> bool:
    """Whether nested figures are equal but for the rounding of fp32."""
    if isinstance(a, torch.Tensor):
        return bool(torch.allclose(a, b, rtol=1e-5, atol=1e-6))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return isinstance(b, (int, float)) and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)
    return bool(a == b)


def compare(run: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Run both, assert that what they return is the same, and return ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs_found, ours_found = run(theirs), run(ours)
    assert theirs_found.keys() == ours_found.keys()
    for key, value in theirs_found.items():
        assert close(value, ours_found[key]), f"{key}: Lightning has {value}, drivetrain {ours_found[key]}"
    return ours_found
