"""What may be written in the ``trainer`` and ``launcher`` groups and at top level: names, types, ranges. No torch.

The trainer's names and meanings are those of ``lightning.pytorch.Trainer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.cli.schema import option

TASKS = {
    "fit_test": ("fit", "test"),
    "fit": ("fit",),
    "validate": ("validate",),
    "test": ("test",),
    "predict": ("predict",),
}


@dataclass
class JobOptions:
    """The top-level keys."""

    task: str = option("fit_test", among=tuple(TASKS))
    devices: int | str | None = option(None, at_least=1, also=("auto",))
    num_nodes: int = option(1, at_least=1)
    node_rank: int = option(0, at_least=0)
    master_addr: str = "127.0.0.1"
    master_port: int = option(29500, at_least=1, at_most=65535)
    accelerator: str = option("auto", among=("auto", "cpu", "cuda"))
    backend: str | None = option(None, among=("gloo", "nccl"))
    seed: int = option(1, at_least=0, at_most=2**32 - 1)
    resume: str | None = None
    objective: Any = None  # the name of a metric, or a list of names


@dataclass
class LauncherOptions:
    """How local workers are started and watched."""

    timeout: float = option(300.0, above=0)
    start_timeout: float = option(60.0, above=0)
    max_restarts: int = option(0, at_least=0)


@dataclass
class TrainerOptions:
    """Keyword arguments of :class:`drivetrain.trainer.Trainer`. Limits: a whole number of batches, or a fraction."""

    max_epochs: int | None = option(1, at_least=0, also=(-1,))
    min_epochs: int | None = option(None, at_least=0)
    max_steps: int = option(-1, at_least=0, also=(-1,))
    min_steps: int | None = option(None, at_least=0)
    max_time: str | None = None
    limit_train_batches: int | float | None = option(None, at_least=0, fraction=True)
    limit_val_batches: int | float | None = option(None, at_least=0, fraction=True)
    limit_test_batches: int | float | None = option(None, at_least=0, fraction=True)
    limit_predict_batches: int | float | None = option(None, at_least=0, fraction=True)
    overfit_batches: int | float = option(0.0, at_least=0, fraction=True)
    fast_dev_run: int | bool = option(False, at_least=0)
    val_check_interval: int | float | None = option(None, above=0, fraction=True)
    check_val_every_n_epoch: int | None = option(1, at_least=1)
    num_sanity_val_steps: int = option(2, at_least=0, also=(-1,))
    log_every_n_steps: int = option(50, at_least=1)
    accumulate_grad_batches: int = option(1, at_least=1)
    gradient_clip_val: float | None = option(None, at_least=0)
    gradient_clip_algorithm: str | None = option(None, among=("norm", "value"))
    deterministic: bool | str | None = option(None, among=(True, False, "warn"))
    benchmark: bool | None = None
    inference_mode: bool = True
    detect_anomaly: bool = False
    barebones: bool = False
    batch: str = option("global", among=("global", "per_process"))
    nonfinite: str = option("raise", among=("raise", "skip", "warn"))
    compile: bool | str = False
