"""Complex parameters: engines that keep parameters in flat shards of one dtype hold real ones only."""

from __future__ import annotations

from torch import nn

from drivetrain.errors import ConfigurationError


def refuse_complex(module: nn.Module, way: str) -> None:
    """Refuse a complex parameter.

    Args:
        way: what cannot take it, as a user chose it.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ConfigurationError(
                f"parameter {name} is complex, which {way} cannot hold: use strategy=ddp, or two real parameters and"
                " torch.view_as_complex."
            )
