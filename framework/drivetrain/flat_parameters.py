"""All parameters of a module as one flat tensor, and back."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

from drivetrain.errors import ConfigurationError


def get_parameters(module: nn.Module) -> Tensor:
    """A copy of all parameters of ``module`` as one tensor of shape ``(numel,)``, on the first one's device.

    They come in the order of ``module.parameters()``, shared ones once, without a graph. Where dtypes differ the result
    has the one to which torch promotes them, so that nothing is lost on the way here and back.
    """
    parameters = [parameter.detach() for parameter in module.parameters()]
    if not parameters:
        return torch.empty(0)
    dtype, device = _dtype(parameters), parameters[0].device
    return torch.cat([parameter.to(device, dtype).reshape(-1) for parameter in parameters])


@torch.no_grad()
def set_parameters(module: nn.Module, flat: Tensor) -> None:
    """Copy ``flat``, as :func:`get_parameters` gives it, into the parameters of ``module``, in place.

    Parameters stay the tensors they are, so optimizers keep their hold on them. ``flat`` may be on any device.

    Raises:
        ConfigurationError: ``flat`` has another shape or dtype than ``get_parameters(module)``; nothing was changed.
    """
    parameters = list(module.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    if not isinstance(flat, Tensor):
        raise ConfigurationError(f"a {type(flat).__name__} holds no parameters: pass the tensor of get_parameters.")
    dtype = _dtype(parameters) if parameters else flat.dtype
    if tuple(flat.shape) != (numel,) or flat.dtype != dtype:
        raise ConfigurationError(
            f"the parameters of {type(module).__name__} are a tensor of shape ({numel},) and {dtype}, not "
            f"{tuple(flat.shape)} and {flat.dtype}: pass what get_parameters gave for the same module."
        )
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, flat.detach().split(sizes), strict=True):
        parameter.copy_(part.view(parameter.shape))


def _dtype(tensors: list[Tensor] | list[nn.Parameter]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
