"""How a server's parameters lie in a message: flat, one tensor per dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        """One flat tensor per dtype; zeros where there is None. Put together where the tensors are, moved once."""
        where = next((value.device for value in tensors.values() if value is not None), torch.device(device))
        return [
            torch.cat(
                [
                    torch.zeros(shape.numel(), dtype=dtype, device=where)
                    if (value := tensors[name]) is None
                    else value.detach().reshape(-1)
                    for name, shape in members
                ]
            ).to(device)
            for dtype, members in self.groups
        ]

    @property
    def sizes(self) -> list[tuple[torch.dtype, int]]:
        """Dtype and number of elements of each tensor that :meth:`flatten` makes."""
        return [(dtype, sum(shape.numel() for _, shape in members)) for dtype, members in self.groups]

    def fill(self, flats: Sequence[Tensor], tensors: Mapping[str, Tensor | None]) -> None:
        """:meth:`flatten` into ``flats``. From a CUDA device the copies may still be under way on its stream."""
        for name, view in self.split(flats).items():
            value = tensors[name]
            if value is None:
                view.zero_()
            else:
                view.copy_(value.detach(), non_blocking=value.is_cuda)

    def split(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The views by name into what :meth:`flatten` made."""
        views: dict[str, Tensor] = {}
        for (_, members), flat in zip(self.groups, flats, strict=True):
            parts = flat.split([shape.numel() for _, shape in members])
            views |= {name: part.view(shape) for (name, shape), part in zip(members, parts, strict=True)}
        return views

    def fits(self, flats: Sequence[Tensor]) -> bool:
        """Whether ``flats`` are as :meth:`flatten` makes them."""
        return [(flat.dtype, tuple(flat.shape)) for flat in flats] == [(dtype, (count,)) for dtype, count in self.sizes]

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor that :meth:`flatten` makes."""
        return max((dtype.itemsize * count for dtype, count in self.sizes), default=0)
