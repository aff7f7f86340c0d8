"""Which server holds which parameters, and how a server's parameters lie in a message: flat, one tensor per dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def divide(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """Names for each server: the largest first, each to the server that has least (Graham, 1969: no server gets more
    than 4/3 of what is unavoidable). The same on every rank."""
    shares: list[list[str]] = [[] for _ in range(servers)]
    load = [0] * servers
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += sizes[name]
    return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Layout:
    """Names with their shapes, grouped by dtype in a fixed order."""

    groups: tuple[tuple[torch.dtype, tuple[tuple[str, torch.Size], ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        dtypes = sorted({t.dtype for t in tensors.values()}, key=str)
        return cls(
            tuple(
                (dtype, tuple((name, tensors[name].shape) for name in sorted(tensors) if tensors[name].dtype == dtype))
                for dtype in dtypes
            )
        )

    @property
    def names(self) -> list[str]:
        return [name for _, members in self.groups for name, _ in members]

    def flatten(self, tensors: Mapping[str, Tensor | None], device: torch.device | str = "cpu") -> list[Tensor]:
        """One flat tensor per dtype; zeros where there is None."""
        return [
            torch.cat(
                [
                    torch.zeros(shape.numel(), dtype=dtype)
                    if (value := tensors[name]) is None
                    else value.detach().reshape(-1).to(device)
                    for name, shape in members
                ]
            )
            for dtype, members in self.groups
        ]

    def split(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The views by name into what :meth:`flatten` made."""
        views: dict[str, Tensor] = {}
        for (_, members), flat in zip(self.groups, flats, strict=True):
            parts = flat.split([shape.numel() for _, shape in members])
            views |= {name: part.view(shape) for (name, shape), part in zip(members, parts, strict=True)}
        return views

    def fits(self, flats: Sequence[Tensor]) -> bool:
        """Whether ``flats`` are as :meth:`flatten` makes them."""
        wanted = [(dtype, sum(shape.numel() for _, shape in members)) for dtype, members in self.groups]
        return [(flat.dtype, flat.numel()) for flat in flats] == wanted
