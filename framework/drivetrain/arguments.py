"""Checks of the Trainer's arguments, without torch. Each complaint is one sentence with the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

from drivetrain.errors import ConfigurationError, UnknownArgumentError, WrongKindError, nearest

_NO_SUPPORT = {
    "tpu": "TPUs",
    "hpu": "Gaudi accelerators",
    "mps": "Apple's GPUs",
    "xpu": "Intel's GPUs",
    "ipu": "Graphcore's IPUs",
    "npu": "NPUs",
}  # accelerators of Lightning's, torch's and their extensions

_FORMERLY = {
    "auto_lr_find": "use Tuner(trainer).lr_find(module)",
    "auto_scale_batch_size": "use Tuner(trainer).scale_batch_size(module)",
    "checkpoint_callback": "use enable_checkpointing, and callbacks for a ModelCheckpoint",
    "distributed_backend": "use strategy",
    "gpus": "use devices, with accelerator='gpu'",
    "num_processes": "use devices",
    "progress_bar_refresh_rate": "use enable_progress_bar, or callbacks for a progress bar of your own",
    "resume_from_checkpoint": "use fit(module, ckpt_path=...)",
    "weights_summary": "use enable_model_summary",
}  # arguments that Lightning's Trainer once had

_NUMBERS = (
    "devices",
    "num_nodes",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "log_every_n_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "reload_dataloaders_every_n_epochs",
)  # arguments that are numbers; True and False are 1 and 0 for Lightning

_FLAGS = (
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "benchmark",
    "deterministic",
    "inference_mode",
    "use_distributed_sampler",
    "detect_anomaly",
    "barebones",
    "sync_batchnorm",
    "enable_autolog_hparams",
    "return_weights",
)  # arguments that are True or False, for which 1 and 0 will do

Init = TypeVar("Init", bound=Callable[..., None])


def unknown_argument(name: str, known: Iterable[str]) -> UnknownArgumentError:
    """What to raise for an argument of the Trainer that there is not."""
    return UnknownArgumentError(f"the Trainer has no argument {name!r}: {_FORMERLY.get(name) or nearest(name, known)}")


def by_name(unnamed: Sequence[Any]) -> None:
    """Refuse what the Trainer was given without a name."""
    if unnamed:
        raise UnknownArgumentError(
            f"the Trainer takes its arguments by name, and {unnamed[0]!r} has none: Trainer(devices=2), for example."
        )


def known_arguments(init: Init) -> Init:
    """``init`` of the Trainer, which refuses arguments by other names than its own, or by none, in one sentence."""
    names = set(inspect.signature(init).parameters) - {"self"}

    @wraps(init)
    def checked(self: Any, *unnamed: Any, **given: Any) -> None:
        by_name(unnamed)
        for name in given:
            if name not in names:
                raise unknown_argument(name, names)
        given = as_meant(given)
        init(self, **(_as_numbers(given) if self.meanings.truths == "numbers" else given))

    return checked  # type: ignore[return-value]


def as_meant(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with Python's numbers for those of numpy and torch, and True and False for flags of 1 and 0."""
    found = {name: _python_number(value) for name, value in given.items()}
    if isinstance(found.get("devices"), (list, tuple)):
        found["devices"] = [_python_number(one) for one in found["devices"]]
    flags = {name: bool(found[name]) for name in _FLAGS if type(found.get(name)) is int and found[name] in (0, 1)}
    return found | flags


def _python_number(value: Any) -> Any:
    """A scalar of a library that computes, which is known without importing any by what all of them have."""
    is_scalar = getattr(value, "shape", None) == () and callable(getattr(value, "item", None))
    return value.item() if is_scalar else value


def _as_numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with 1 and 0 for True and False where a number is meant."""
    return {name: int(v) if name in _NUMBERS and isinstance(v, bool) else v for name, v in given.items()}


def _whole(name: str, value: Any, least: int, *, none: bool = True, unlimited: bool = False) -> None:
    if value is None and none:
        return
    if unlimited and value == -1:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        extra = ", or -1 for no limit" if unlimited else ""
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}{extra}.")


def counted(value: Any) -> Any:
    """A limit as a whole number where it is one that is written with a point (``10.0``), as parsers of commands give
    it; up to 1.0 it is a fraction."""
    return int(value) if isinstance(value, float) and value > 1 and value.is_integer() else value


def _limit(name: str, value: Any) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value >= 0 or (isinstance(value, float) and value > 1.0):
        raise ConfigurationError(f"{name}={value!r}: give a number of batches (0 or more) or a fraction (0.0 to 1.0).")


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        hint = nearest(str(value), [str(c) for c in choices if c is not None])
        raise ConfigurationError(f"{name}={value!r}: {hint}")


_SLOWING = (
    "logger",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "log_every_n_steps",
    "num_sanity_val_steps",
    "fast_dev_run",
    "detect_anomaly",
    "profiler",
)


def _check_barebones(a: dict[str, Any]) -> None:
    """The bare loop is there to be measured: what would slow it down is refused where it is asked for by name."""
    against = [f"{name}={a[name]!r}" for name in _SLOWING if a.get(name) not in (None, False, 0)]
    callbacks = a.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if getattr(callback, "saves_checkpoints", False) or getattr(callback, "shows_progress", False):
            against.append(f"the {type(callback).__name__} in callbacks")
    if against:
        raise ConfigurationError(
            f"barebones=True trains without extras, which goes against {' and '.join(against)}: leave out"
            f" {'that' if len(against) == 1 else 'these'}, or barebones."
        )


def check_arguments(a: dict[str, Any]) -> None:
    """Raise :class:`ConfigurationError` for the first of the Trainer's keyword arguments that cannot be meant."""
    _whole("max_epochs", a.get("max_epochs"), 0, unlimited=True)
    _whole("min_epochs", a.get("min_epochs"), 0)
    _whole("max_steps", a.get("max_steps", -1), 0, none=False, unlimited=True)
    _whole("min_steps", a.get("min_steps"), 0)
    _whole("num_nodes", a.get("num_nodes", 1), 1, none=False)
    _whole("accumulate_grad_batches", a.get("accumulate_grad_batches", 1), 1, none=False)
    _whole("check_val_every_n_epoch", a.get("check_val_every_n_epoch", 1), 1)
    _whole("num_sanity_val_steps", a.get("num_sanity_val_steps"), 0, unlimited=True)
    _whole("log_every_n_steps", a.get("log_every_n_steps"), 1)
    _whole("reload_dataloaders_every_n_epochs", a.get("reload_dataloaders_every_n_epochs", 0), 0, none=False)
    for name in _FLAGS:
        if name != "deterministic" and not isinstance(a.get(name), (bool, type(None))):
            raise WrongKindError(f"{name}={a[name]!r}: give True or False.")
    if a.get("deterministic") not in (None, True, False, "warn"):
        raise ConfigurationError(f"deterministic={a['deterministic']!r}: give True, False or 'warn'.")
    for name in ("train", "val", "test", "predict"):
        _limit(f"limit_{name}_batches", counted(a.get(f"limit_{name}_batches")))
    _limit("overfit_batches", counted(a.get("overfit_batches", 0.0)))
    if a.get("max_time") is not None:
        in_seconds("max_time", a["max_time"], zero=True)
    interval = a.get("val_check_interval")
    if isinstance(interval, (str, timedelta, Mapping)):
        in_seconds("val_check_interval", interval)
        interval = 1
    interval = counted(interval)
    if isinstance(interval, bool) or (
        interval is not None
        and (
            not isinstance(interval, (int, float)) or not interval > 0 or (isinstance(interval, float) and interval > 1)
        )
    ):
        raise ConfigurationError(
            f"val_check_interval={interval!r}: give a number of batches (1 or more) or a fraction (0.0 to 1.0)."
        )
    if a.get("check_val_every_n_epoch", 1) is None and not isinstance(interval, int):
        raise ConfigurationError(
            "check_val_every_n_epoch=None counts batches over epochs: give val_check_interval as a number, or"
            " leave check_val_every_n_epoch at 1."
        )
    clip = a.get("gradient_clip_val")
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and (not number or not clip >= 0):
        kind = ConfigurationError if number else WrongKindError
        raise kind(f"gradient_clip_val={clip!r}: give a number of at least 0, or null for no clipping.")
    _choice("gradient_clip_algorithm", a.get("gradient_clip_algorithm"), (None, "norm", "value"))
    _choice("batch", a.get("batch", "global"), ("global", "per_process"))
    _choice("nonfinite", a.get("nonfinite", "raise"), ("raise", "skip", "warn"))
    fast = a.get("fast_dev_run", False)
    if not isinstance(fast, bool):
        _whole("fast_dev_run", fast, 0, none=False)
    if a.get("barebones"):
        _check_barebones(a)
    device = str(a.get("accelerator")).lower()
    if device in _NO_SUPPORT:
        raise ConfigurationError(
            f"accelerator={a['accelerator']!r}: {_NO_SUPPORT[device]} are not supported: use accelerator='gpu'"
            " or 'cpu', or 'auto' for what is here."
        )
    _choice("accelerator", a.get("accelerator", "auto"), ("auto", "cpu", "gpu", "cuda"))
    _choice("backend", a.get("backend"), (None, "gloo", "nccl"))
    seed = a.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ConfigurationError(f"seed={seed!r}: give a whole number from 0 on.")


def in_seconds(name: str, value: Any, zero: bool = False) -> float:
    """A time given as ``"DD:HH:MM:SS"``, a timedelta or its keywords, in seconds.

    Args:
        zero: whether no time at all is one, too.

    Raises:
        ConfigurationError: it is none of these, or not above zero.
    """
    try:
        if isinstance(value, str):
            days, hours, minutes, seconds = (int(part) for part in value.split(":"))
            value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        elif isinstance(value, Mapping):
            value = timedelta(**value)
        total = value.total_seconds()
    except (ValueError, TypeError, AttributeError, OverflowError):
        total = -1.0
    if total < 0 or (total == 0 and not zero):
        raise ConfigurationError(f"{name}={value!r}: give a time as 'DD:HH:MM:SS', a timedelta or its keywords.")
    return float(total)


def listed_devices(devices: Any) -> list[Any] | None:
    """The indices that ``devices`` names: of a list, or of a text such as ``"0,1"`` (and ``"2,"``: the index 2 alone);
    None where it names none."""
    if isinstance(devices, str) and "," in devices:
        return [int(part) if part.strip().isdigit() else part for part in devices.split(",") if part.strip()]
    # Configurations have lists of a kind of their own.
    return list(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else None


def resolve_devices(devices: Any, available: int, accelerator: str, default: int) -> int:
    """Number of workers on this node for the ``devices`` argument.

    Args:
        devices: ``"auto"``, -1 or ``"-1"`` (all), a number, or a list of device indices.
        available: GPUs present.
        accelerator: ``"cpu"`` or ``"cuda"``.
        default: what ``"auto"`` means.
    """
    if devices in ("auto", None):
        return default
    listed = listed_devices(devices)
    if listed is not None:
        for index in listed:
            _whole("devices", index, 0, none=False)
            if accelerator == "cuda" and index >= available:
                raise ConfigurationError(f"devices={listed}: there are {available} GPUs here, 0 to {available - 1}.")
        if accelerator == "cuda" and len(set(listed)) < len(listed):
            raise ConfigurationError(f"devices={listed} names a GPU twice: each worker needs one of its own.")
        count = len(listed)
    else:
        try:
            count = int(devices)
        except (TypeError, ValueError):
            raise WrongKindError(
                f"devices={devices!r}: give a number of workers, a list of devices or 'auto'."
            ) from None
        if isinstance(devices, bool) or (isinstance(devices, float) and devices != count):
            raise WrongKindError(f"devices={devices!r}: give a whole number of workers.")
    if count == -1:
        return default
    if count < 1:
        raise ConfigurationError(f"devices={devices!r}: at least one worker is needed, set devices=1 or more.")
    if accelerator == "cuda" and count > available:
        raise ConfigurationError(
            f"devices={devices!r}: there are {available} GPUs here, set devices={available} or accelerator=cpu."
        )
    return count
