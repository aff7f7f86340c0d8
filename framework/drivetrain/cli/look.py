"""Building the model once without its data, in a copy of this process, to refuse before workers start what they would.

The copy makes the module on torch's meta device, where a tensor has a shape and no memory, asks the strategy and the
checkpoint whether it fits them, and ends. A module that cannot be made so, or a process that cannot be copied, is left
to the workers, who see the real one.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain import registry
from drivetrain.cli.request import Request
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.launch.start_method import why_not_fork
from drivetrain.launch.worker import bind_to_parent


def refuse_module(request: Request, folder: Path) -> None:
    """Raise :class:`ConfigurationError` where the model is known not to be trainable as asked.

    Costs a fork and the module's constructor; done only where the strategy or a checkpoint has a say in the module.
    """
    from drivetrain.strategy import Strategy

    strategy = registry.load("strategies", request.plan.strategy).build(request.plan.options)
    asks = type(strategy).check_module is not Strategy.check_module
    if not (asks or request.resume_from) or why_not_fork() is not None:
        return
    told = _in_copy(request, folder, strategy)
    if told:
        raise ConfigurationError(told)


def _in_copy(request: Request, folder: Path, strategy: Any) -> str:
    """What a copy of this process finds wrong; empty for nothing."""
    reads, writes = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            bind_to_parent(parent)  # a constructor may take long
            os.close(reads)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the workers will say it
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            os.write(writes, _wrong(request, folder, strategy).encode()[:4096])
        finally:
            os._exit(0)  # nothing of this process ends here
    os.close(writes)
    try:
        with os.fdopen(reads, "rb") as stream:
            return stream.read().decode(errors="replace")
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(pid, 0)


def _wrong(request: Request, folder: Path, strategy: Any) -> str:
    import torch

    from drivetrain import resumption
    from drivetrain.cli import worker
    from drivetrain.folders import make_importable

    make_importable()
    try:
        with torch.device("meta"):
            module = worker._module(request.config)
        strategy.check_module(module, replace(request.plan, automatic_optimization=module.automatic_optimization))
        if request.resume_from is not None:
            callbacks = worker._callbacks(request.config, folder)
            resumption.compare(module, callbacks, request.plan.stages[0], Path(request.resume_from))
    except ConfigurationError as error:
        return str(error)
    except CheckpointError as error:
        return f"resume={request.job.resume}: {error}"
    except Exception:  # a constructor that needs numbers, or fails: the workers will say how
        return ""
    return ""
