"""Everything in one format: ``32-true``, ``64-true`` and ``bf16-true``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.precision import NO_CONTEXT, Precision
from drivetrain_plugins.precision.conversion import cast_floating, convert_floating, refuse_loss_scale

DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16}


class DefaultDtype:
    """Context in which new floating-point tensors get ``dtype``; the default before is put back on leaving."""

    __slots__ = ("before", "dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self.before)


class FullPrecision(Precision):
    """Parameters, buffers, batches and what the module creates on the way, all in one floating-point format.

    Raises:
        ConfigurationError: for a name that is not one of ``DTYPES``, or a loss scale (nothing is scaled here).
    """

    def __init__(self, name: str = "32-true", loss_scale: float | str | None = None) -> None:
        if name not in DTYPES:
            raise ConfigurationError(f"there is no full precision {name!r}: {nearest(name, DTYPES)}")
        refuse_loss_scale(name, loss_scale)
        super().__init__(name, loss_scale)
        self.dtype = DTYPES[name]

    def init_context(self) -> AbstractContextManager[Any]:
        return DefaultDtype(self.dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        convert_floating(module, self.dtype)
        return module

    def convert_input(self, batch: Any) -> Any:
        return cast_floating(batch, self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Tensors that the module creates in a step (noise, masks) get the format too."""
        if torch.get_default_dtype() is self.dtype:
            return NO_CONTEXT
        return DefaultDtype(self.dtype)
