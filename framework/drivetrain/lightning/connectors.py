"""What projects ask of Lightning's connectors: which accelerator ``auto`` stands for on this machine."""

from __future__ import annotations

from typing import Literal

import torch

from drivetrain.errors import ConfigurationError

__path__: list[str] = []

_LITERAL_WARN = Literal["warn"]


class _AcceleratorConnector:
    """Chooses an accelerator; a Trainer's own is ``trainer.accelerator``."""

    @staticmethod
    def _choose_auto_accelerator() -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @staticmethod
    def _choose_gpu_accelerator_backend() -> str:
        """What ``gpu`` stands for.

        Raises:
            ConfigurationError: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise ConfigurationError("there is no GPU that torch can use here.")
        return "cuda"
