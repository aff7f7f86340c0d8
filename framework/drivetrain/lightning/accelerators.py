"""Accelerators are chosen by name here: ``accelerator="cpu"``, ``"gpu"``, ``"cuda"`` or ``"auto"``."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain import device_stats
from drivetrain.errors import ConfigurationError
from drivetrain.lightning import deep_names
from drivetrain.lightning.refused_classes import refused
from drivetrain.lightning.registries import Accelerators

__path__: list[str] = []


class Accelerator:
    """A kind of device. An object of a subclass may be given as ``accelerator=``."""

    name = "auto"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1


class CPUAccelerator(Accelerator):
    name = "cpu"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The load and the memory in use of the machine, in per cent.

        Raises:
            ConfigurationError: psutil is not installed.
        """
        return device_stats.of_cpus()


class CUDAAccelerator(Accelerator):
    name = "cuda"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """What torch's allocator has on ``device`` (``torch.cuda.memory_stats``)."""
        return device_stats.of_gpu(device)

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def auto_device_count() -> int:
        return torch.cuda.device_count()


_NOT_HERE = {"is_available": staticmethod(lambda: False), "auto_device_count": staticmethod(lambda: 0)}
MPSAccelerator = refused("accelerators", "MPSAccelerator", Accelerator, name="mps", **_NOT_HERE)
XLAAccelerator = refused("accelerators", "XLAAccelerator", Accelerator, name="xla", **_NOT_HERE)
AcceleratorRegistry = Accelerators("accelerator", {"cpu": (CPUAccelerator, {}), "cuda": (CUDAAccelerator, {})})


def num_cuda_devices() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count()


def is_cuda_available() -> bool:
    """Whether it sees any."""
    return num_cuda_devices() > 0


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Numbers of the first ``num_devices`` GPUs (-1: all).

    Raises:
        ConfigurationError: there are not so many.
    """
    found = list(range(torch.cuda.device_count()))
    if num_devices > len(found):
        raise ConfigurationError(f"there are {len(found)} GPUs here, not {num_devices}: ask for fewer.")
    return found if num_devices == -1 else found[:num_devices]


deep_names.name_below(__name__)
