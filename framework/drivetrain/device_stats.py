"""How much of a device is in use, as figures by name."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.errors import ConfigurationError


def of_gpu(device: Any) -> dict[str, Any]:
    """What torch's allocator has on ``device``, in bytes and numbers of blocks (``torch.cuda.memory_stats``)."""
    return torch.cuda.memory_stats(device)


def of_cpus() -> dict[str, float]:
    """The load and the memory in use of the machine, in per cent.

    Raises:
        ConfigurationError: psutil is not installed.
    """
    try:
        import psutil
    except ModuleNotFoundError:
        raise ConfigurationError("the load of CPUs is read with the package psutil: pip install psutil") from None
    return {
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_percent": psutil.cpu_percent(),
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
