"""What a script has set for its whole process: defaults and switches of torch, filters of warnings, levels of loggers.

A forked worker has them of its own accord, and so has one whose program runs again from its start. One that comes from
a forkserver would have those of a fresh Python, and compute something else than the script's own process does.
"""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]


def capture() -> dict[str, Any]:
    """The settings of this process, as data that can be pickled by value."""
    settings = {}
    for name, setting in _of_torch().items():
        with suppress(AttributeError, RuntimeError):  # this torch has none, or refuses the older of two ways to ask
            settings[name] = setting.get()
    return {
        "torch": settings,
        "warnings": [one for one in warnings.filters if _travels(one)],
        "loggers": {name: (one.level, one.disabled, one.propagate) for name, one in _loggers().items()},
        "handlers": [
            ("stderr" if one.stream is sys.stderr else "stdout", one.level, one.formatter)
            for one in logging.getLogger().handlers
            if type(one) is logging.StreamHandler and one.stream in (sys.stderr, sys.stdout) and _travels(one.formatter)
        ],
        "logging disabled": logging.root.manager.disable,
        "recursion": sys.getrecursionlimit(),
        "numpy errors": sys.modules["numpy"].geterr() if "numpy" in sys.modules else {},
        "configuration": _of_hydra(),
    }


def restore(settings: dict[str, Any]) -> None:
    """Set in this process what differs from ``settings``. What is alike stays untouched: torch has two ways to set the
    precision of products, and refuses to tell one when the other was used."""
    of_torch = _of_torch()
    for name, value in settings["torch"].items():
        with suppress(AttributeError, RuntimeError):
            if of_torch[name].get() != value:
                of_torch[name].set(value)
    filters: Any = warnings.filters
    filters[:] = settings["warnings"]
    warnings._filters_mutated()  # type: ignore[attr-defined]  # as the functions that change them do
    for name, (level, disabled, propagate) in settings["loggers"].items():
        one = logging.getLogger(name)
        one.setLevel(level)
        one.disabled, one.propagate = disabled, propagate
    root = logging.getLogger()
    for stream, level, formatter in settings["handlers"] if not root.handlers else ():
        handler = logging.StreamHandler(getattr(sys, stream))
        handler.setLevel(level)
        handler.setFormatter(formatter)
        root.addHandler(handler)
    logging.disable(settings["logging disabled"])
    if settings["numpy errors"]:
        import numpy as np

        np.seterr(**settings["numpy errors"])
    if settings["configuration"]:
        _set_hydra(*pickle.loads(settings["configuration"]))
    sys.setrecursionlimit(settings["recursion"])


def _travels(thing: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(thing)
    except Exception:  # a class of a project may raise anything when it is pickled
        return False
    return True


def _loggers() -> dict[str, logging.Logger]:
    known = logging.Logger.manager.loggerDict
    named = {name: one for name, one in known.items() if isinstance(one, logging.Logger)}
    return {"": logging.getLogger(), **named}


def _of_hydra() -> bytes:
    """The pickle of the run's own configuration as Hydra keeps it (``HydraConfig.get()``) and of a project's resolvers,
    without which a configuration that the worker reads has no values. Empty where there is none or it cannot travel."""
    if "omegaconf" not in sys.modules:
        return b""
    import cloudpickle
    from omegaconf.basecontainer import BaseContainer

    resolvers = {name: one for name, one in BaseContainer._resolvers.items() if not name.startswith("oc.")}
    config = sys.modules.get("hydra.core.hydra_config")
    kept = config.HydraConfig.instance().cfg if config is not None and config.HydraConfig.initialized() else None
    if not resolvers and kept is None:
        return b""
    try:
        return bytes(cloudpickle.dumps((resolvers, kept)))
    except Exception as error:  # what a project registers may raise anything when it is pickled
        said = f"resolvers and HydraConfig do not reach the workers: {type(error).__name__}: {error}"
        logging.getLogger(__name__).info(said)
        return b""


def _set_hydra(resolvers: dict[str, Any], kept: Any) -> None:
    from omegaconf.basecontainer import BaseContainer

    for name, resolver in resolvers.items():  # they are wrapped already, which the public way would do again
        BaseContainer._resolvers.setdefault(name, resolver)
    if kept is not None:
        from hydra.core.hydra_config import HydraConfig

        HydraConfig.instance().cfg = kept


def _of_torch() -> dict[str, _Setting]:
    import torch
    import torch.multiprocessing

    backends: Any = torch.backends
    settings = {
        "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
        "default device": _Setting(_default_device, torch.set_default_device),
        "matmul precision": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "deterministic": _Setting(
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        "anomalies": _Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(value[0], check_nan=value[1]),
        ),
        "warn always": _Setting(torch.is_warn_always_enabled, torch.set_warn_always),
        "sharing": _Setting(torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
        "safe globals": _Setting(torch.serialization.get_safe_globals, torch.serialization.add_safe_globals),
        "linear algebra": _Setting(
            lambda: backends.cuda.preferred_linalg_library().name,
            lambda name: backends.cuda.preferred_linalg_library(name.lower()),
        ),
    }
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        get, put = f"{kind}_sdp_enabled", f"enable_{kind}_sdp"
        settings[f"attention {kind}"] = _Setting(getattr(backends.cuda, get), getattr(backends.cuda, put))
    for path in (
        "fp32_precision",
        "cuda.matmul.fp32_precision",
        "cuda.matmul.allow_fp16_reduced_precision_reduction",
        "cuda.matmul.allow_bf16_reduced_precision_reduction",
        "cuda.matmul.allow_fp16_accumulation",
        "cudnn.fp32_precision",
        "cudnn.conv.fp32_precision",
        "cudnn.rnn.fp32_precision",
        "cudnn.enabled",
        "cudnn.benchmark",
        "cudnn.deterministic",
        "mkldnn.fp32_precision",
        "mkldnn.matmul.fp32_precision",
        "mkldnn.conv.fp32_precision",
        "mkldnn.rnn.fp32_precision",
    ):
        settings[path] = _attribute(backends, path)
    fill = "fill_uninitialized_memory"
    settings[fill] = _attribute(torch.utils.deterministic, fill)
    return settings


def _attribute(owner: Any, path: str) -> _Setting:
    *way, name = path.split(".")

    def holder() -> Any:
        return reduce(getattr, way, owner)

    return _Setting(lambda: getattr(holder(), name), lambda value: setattr(holder(), name, value))


def _default_device() -> Any:
    """Without a number for a GPU: each worker has its own."""
    import torch

    device = torch.get_default_device()
    return device if device.type == "cpu" else torch.device(device.type)
