"""FedProx (Li et al., arXiv 1812.06127): clients are held near the model that they began at."""

from __future__ import annotations

from collections.abc import Iterable

import torch


@torch.no_grad()
def add_proximal_gradient(pairs: Iterable[tuple[torch.nn.Parameter, torch.Tensor]], mu: float) -> None:
    """Add the gradient of ``mu / 2 * ||w - start||^2`` to that of each parameter of the ``(w, start)`` that has one."""
    for parameter, start in pairs:
        if parameter.grad is not None:
            parameter.grad.add_(parameter - start, alpha=mu)
