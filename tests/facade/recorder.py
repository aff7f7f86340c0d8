"""The same project under Lightning and under drivetrain.lightning: everything that it can see is noted and compared.

A project is written once, against ``L``, which is either library. Its module, data module, callback and logger note
every call with what the Trainer says of itself at that moment.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as theirs
import torch
from lightning.pytorch.loggers.logger import Logger as TheirLogger
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import drivetrain.lightning as ours
from drivetrain.logger import Logger as OurLogger

_STAGES = ("train", "validation", "test", "predict")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_SHARED = [
    *(f"on_{stage}_{moment}" for stage in ("fit", *_STAGES) for moment in ("start", "end")),
    *(f"on_{stage}_{part}_{moment}" for stage in _STAGES for part in ("epoch", "batch") for moment in ("start", "end")),
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "setup",
    "teardown",
]
OF_MODULE = [
    *_SHARED,
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
    "on_after_batch_transfer",
    "on_validation_model_zero_grad",
    *(f"on_{stage}_model_{mode}" for stage in ("validation", "test") for mode in ("eval", "train")),
    "on_predict_model_eval",
]
OF_CALLBACK = [*_SHARED, "on_sanity_check_start", "on_sanity_check_end"]
OF_DATA = [
    "prepare_data",
    "setup",
    "teardown",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
]
_WITH_METRICS = ("epoch_end", "batch_end", "on_fit_end", "on_train_end", "on_validation_end", "on_train_start")
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Diary(list[Any]):
    """Entries ``(who, hook, what was given, what the Trainer says)``, and what the logger was given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def note(self, who: str, name: str, trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entry: list[Any] = [f"{who}.{name}", *(plain(a) for a in (*args, *kwargs.values()) if _telling(a))]
        if trainer is not None:
            entry.append(
                (
                    trainer.current_epoch,
                    trainer.global_step,
                    trainer.is_last_batch if trainer.training else None,
                    [name for name in _FLAGS if getattr(trainer, name)],
                )
            )
            if name.endswith(_WITH_METRICS):
                entry.append({kind: plain(dict(getattr(trainer, kind))) for kind in METRICS})
        self.append(entry)


_FLAGS = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "should_stop")
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def _telling(value: Any) -> bool:
    return isinstance(value, (int, float, str, torch.Tensor, dict, list, tuple)) or value is None


def plain(value: Any) -> Any:
    """Numbers to six digits, tensors as their mean, the rest by nesting."""
    if isinstance(value, torch.Tensor):
        return _round(float(value.detach().double().mean())) if value.numel() else ("empty", tuple(value.shape))
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return _round(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return type(value).__name__


def _round(number: float) -> Any:
    return number if not math.isfinite(number) else float(f"{number:.5g}") + 0.0


def noting(base: type, names: list[str], diary: Diary, who: str) -> type:
    """A subclass of ``base`` that notes each call of the named methods and passes it on."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = args[0] if who == "callback" else getattr(self, "_trainer", getattr(self, "trainer", None))
            diary.note(who, name, trainer, args[2:] if who == "callback" else args, kwargs)
            return getattr(super(kind, self), name)(*args, **kwargs)

        # Steps are called by their signature; other hooks that look wrapped count as not overridden.
        return functools.wraps(getattr(base, name))(call) if name in STEPS and name in vars(base) else call

    kind = type(base.__name__, (base,), {})
    for name in names:
        if hasattr(base, name):
            setattr(kind, name, method(name))
    return kind


class TheirMemory(TheirLogger):
    name = "memory"
    version = 0

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.diary = diary

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.diary.rows.append(["logger", step, plain(dict(metrics))])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.diary.rows.append(["hparams", plain(dict(params))])


class OurMemory(OurLogger):
    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.diary.rows.append(["logger", step, plain(dict(metrics))])

    def log_hyperparams(self, params: Any, metrics: Any = None) -> None:
        self.diary.rows.append(["hparams", plain(dict(params))])


Project = Callable[[Any], dict[str, Any]]


def lead(L: Any, project: Project, stages: tuple[str, ...] = ("fit",), **options: Any) -> tuple[Diary, Any, Any]:
    """Run ``project(L)``: a dict of ``module`` class, perhaps ``data`` class, ``fit`` arguments and ``callbacks``."""
    torch.manual_seed(5)
    diary = Diary()
    parts = project(L)
    module = noting(parts["module"], OF_MODULE, diary, "module")()
    data = noting(parts["data"], OF_DATA, diary, "data")() if "data" in parts else None
    callbacks = [noting(L.Callback, OF_CALLBACK, diary, "callback")(), *parts.get("callbacks", [])]
    logger = (TheirMemory if L is theirs else OurMemory)(diary)
    settings = {**QUIET, "max_epochs": 2, "log_every_n_steps": 2, "logger": logger, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(callbacks=callbacks, **settings)
        for stage in stages:
            arguments = {"datamodule": data} if data is not None else dict(parts.get(stage, {}))
            result = getattr(trainer, stage)(module, **arguments)
            diary.append(["result of", stage, plain(result)])
            diary.append([{kind: plain(dict(getattr(trainer, kind))) for kind in METRICS}])
    diary.append(["weights", plain(dict(module.state_dict()))])
    return diary, trainer, module


def pair(project: Project, stages: tuple[str, ...] = ("fit",), **options: Any) -> tuple[Any, Any]:
    """The runs under Lightning and under drivetrain: ``(diary, trainer, module)`` each."""
    state = torch.get_rng_state()
    results = [lead(library, project, stages, **options) for library in (theirs, ours)]
    torch.set_rng_state(state)
    return results[0], results[1]


def first_difference(a: list[Any], b: list[Any]) -> str:
    """Where two diaries part, with what came before; empty where they are the same."""
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            before = "\n".join(f"    {entry}" for entry in a[max(0, number - 4) : number])
            after = f"  L next {a[number + 1 : number + 3]}\n  d next {b[number + 1 : number + 3]}"
            return f"entry {number}:\n{before}\n  L {one}\n  d {other}\n{after}"
    if len(a) != len(b):
        return f"lengths {len(a)} and {len(b)}: {[*a[len(b) :], *b[len(a) :]][:3]}"
    return ""


# -- data -------------------------------------------------------------------------------------------------------
def rows(samples: int = 22, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    )


def loader(samples: int = 22, size: int = 4, shuffle: bool = False, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(rows(samples, seed), batch_size=size, shuffle=shuffle)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int = 22) -> None:
        self.rows = rows(samples)

    def __iter__(self) -> Any:
        return iter([self.rows[i] for i in range(len(self.rows))])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


def module(L: Any, **parts: Any) -> Any:
    """A module of ``L`` in which ``parts`` take the place of its methods."""

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    return type("Project", (Module,), parts)()
