"""What FSDP2 cannot cut, and what is lost when it puts parameters of its own in the place of a module's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from drivetrain.errors import ConfigurationError


def refuse_uncuttable(named: Iterable[tuple[str, nn.Parameter]], way: str) -> None:
    """Refuse a parameter of no dimension, and one that lies in memory otherwise than row after row.

    Args:
        named: the parameters that are cut.
        way: what cannot cut them, as a user chose it.
    """
    for name, parameter in named:
        if not parameter.ndim:
            raise ConfigurationError(
                f"parameter {name} is a single number without a dimension, which {way} cannot cut: make it a tensor of"
                " one element, as of torch.ones(1), or use strategy=ddp."
            )
        if not parameter.is_contiguous():
            raise ConfigurationError(
                f"parameter {name} does not lie in memory row after row (it was transposed, or is channels_last), which"
                f" {way} cannot cut: give it contiguous() values, or use strategy=ddp."
            )


def refuse_hooks_on_parts(named: Iterable[tuple[str, nn.Parameter]], way: str) -> None:
    """Refuse a hook on the gradient of a part, before the first step: FSDP2 puts gradients there by itself, and calls
    of all hooks those after it was accumulated only."""
    for name, parameter in named:
        if parameter._backward_hooks:
            raise ConfigurationError(
                f"parameter {name} was given a hook on its gradient (register_hook) before the first step, which is not"
                f" called under {way}: do it in on_before_optimizer_step, or use strategy=ddp."
            )


def refuse_hooks(named: Iterable[tuple[str, nn.Parameter]], way: str) -> None:
    """Refuse a parameter with a hook of its own on its gradient, which would never be called.

    Args:
        named: the parameters in whose place others come.
        way: what puts them there, as a user chose it.
    """
    for name, parameter in named:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                f"parameter {name} has a hook on its gradient (register_hook), and {way} puts parts in its place, which"
                " have none: do it in on_before_optimizer_step, or use strategy=ddp."
            )
