"""What ZeRO's ranks hold in pieces, as whole tensors by the module's own names, and back.

In stages 1 and 2 each rank's part of an optimizer's group is one flat tensor, of which a parameter has a fragment; in
stage 3 each rank has an equal slice of every parameter, and slices lie in flat tensors, one for each sub-group. In both
the optimizer's state is that of the flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator


class Layout(Protocol):
    """Where the pieces are."""

    def flats(self) -> list[Tensor]:
        """This rank's flat tensors: the keys of the optimizer's state."""

    def piece(self, parameter: nn.Parameter) -> tuple[int, int, int, int] | None:
        """``(index of the flat tensor, offset in it, offset in the whole parameter, elements)`` held here, if any."""


class Fragments:
    """Stages 1 and 2."""

    def __init__(self, engine: Any) -> None:
        self.zero = engine.optimizer
        self.group = {id(p): i for i, group in enumerate(self.zero.bit16_groups) for p in group}
        self._places = [(p, p.data) for group in self.zero.bit16_groups for p in group]

    def flats(self) -> list[Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def take_up(self, rank: int) -> None:
        """What was written to parameters since the last step (weights that are clipped, averaged or loaded in a hook)
        is what the next one starts from. The engine steps a copy of this rank's part, and puts it over them. What was
        given to a parameter in the place of its ``data`` lies elsewhere than the engine looks."""
        with torch.no_grad():
            for parameter, place in self._places:
                if parameter.data_ptr() != place.data_ptr():
                    place.copy_(parameter.data)
                    parameter.data = place
            for flat, parts in zip(self.flats(), self.zero.parallel_partitioned_bit16_groups, strict=True):
                flat.copy_(parts[rank])

    def piece(self, parameter: nn.Parameter) -> tuple[int, int, int, int] | None:
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        whole, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return self.group[id(parameter)], flat.start, whole.start, whole.numel


class Slices:
    """Stage 3."""

    def __init__(self, engine: Any, rank: int) -> None:
        self.zero, self.rank = engine.optimizer, rank
        self.fill(engine.optimizer.optimizer)

    def fill(self, optimizer: Optimizer) -> None:
        """Put into each group of ``optimizer`` the flat tensors that it steps, as the other stages have them there. Who
        looks at it between steps (``state_dict``) finds what it has a state of: the engine leaves its groups empty."""
        groups: dict[int, list[Tensor]] = {}
        for index, flat in enumerate(self.flats()):
            groups.setdefault(self.zero.sub_group_to_group_id[index], []).append(flat)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = groups.get(index, [])

    @staticmethod
    def empty(optimizer: Optimizer) -> None:
        """Before the engine's step, which fills one group at a time."""
        for group in optimizer.param_groups:
            group["params"] = []

    def flats(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def piece(self, parameter: Any) -> tuple[int, int, int, int] | None:
        index, offset, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        start = int(self.rank * length)
        held = min(int(length), parameter.ds_numel - start)  # the last slices are padded
        return (index, int(offset), start, held) if held > 0 else None


class Whole:
    """Reads and writes whole tensors through a layout."""

    def __init__(self, layout: Layout, optimizer: Optimizer, parameters: dict[str, nn.Parameter], comm: Communicator):
        self.layout, self.optimizer, self.parameters, self.comm = layout, optimizer, parameters, comm

    def set_master(self, values: dict[str, Tensor]) -> None:
        """Take over whole parameters; those that ``values`` lacks stay as they are."""
        flats = self.layout.flats()
        for name in self.parameters.keys() & values.keys():
            self._write(self.parameters[name], flats, values[name])

    def states(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by name; empty before its first step."""
        flats = self.layout.flats()
        kept = [self.optimizer.state.get(flat, {}) for flat in flats]
        keys = sorted({key for state in kept for key in state})
        # A rank may hold no part of anything: it takes part with the keys of the others.
        kinds = {key: self._kind(key, kept, flats) for key in keys}
        for listed in self.comm.all_gather_plain([[key, *kinds[key]] for key in keys]):
            for key, split, value in listed:
                kinds.setdefault(key, (split, value))
        result: dict[str, dict[str, Any]] = {name: {} for name in self.parameters} if kinds else {}
        for key in sorted(kinds):
            split, value = kinds[key]
            for name, parameter in self.parameters.items():
                if split:
                    result[name][key] = self._read(parameter, [state.get(key) for state in kept])
                else:
                    result[name][key] = torch.tensor(value) if isinstance(value, float) else value
        return result

    @staticmethod
    def _kind(key: str, kept: list[dict[str, Any]], flats: list[Tensor]) -> tuple[bool, Any]:
        """Whether the value is one number for each element; else the one value, of which a tensor is given as float."""
        for state, flat in zip(kept, flats, strict=True):
            if key in state:
                value = state[key]
                if isinstance(value, Tensor) and value.shape == flat.shape and value.ndim:
                    return True, None
                return False, float(value) if isinstance(value, Tensor) else value
        raise KeyError(key)

    def load_states(self, saved: dict[str, dict[str, Any]]) -> None:
        """Take over :meth:`states`, of any strategy."""
        flats = self.layout.flats()
        for flat in flats:
            self.optimizer.state.pop(flat, None)
        for name, parameter in self.parameters.items():
            place = self.layout.piece(parameter)
            if name not in saved or place is None:
                continue
            flat = flats[place[0]]
            state = self.optimizer.state[flat]
            for key, value in saved[name].items():
                if isinstance(value, Tensor) and value.shape == _shape(parameter) and value.ndim:
                    target = state.setdefault(key, torch.zeros_like(flat))
                    _copy(target, place, value)
                else:
                    state.setdefault(key, value.clone() if isinstance(value, Tensor) else value)

    def _read(self, parameter: nn.Parameter, flats: list[Any]) -> Tensor:
        shape = _shape(parameter)
        whole = torch.zeros(shape, dtype=torch.float32, device=self.comm.device)
        place = self.layout.piece(parameter)
        if place is not None and flats[place[0]] is not None:
            index, offset, start, length = place
            whole.view(-1)[start : start + length].copy_(flats[index].detach()[offset : offset + length])
        return self.comm.all_reduce(whole)  # each element comes from one rank, the others add zero

    def _write(self, parameter: nn.Parameter, flats: list[Tensor], value: Tensor) -> None:
        place = self.layout.piece(parameter)
        if place is not None:
            _copy(flats[place[0]], place, value)


def _shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _copy(flat: Tensor, place: tuple[int, int, int, int], value: Tensor) -> None:
    _, offset, start, length = place
    with torch.no_grad():
        flat[offset : offset + length].copy_(value.reshape(-1)[start : start + length])


def trained(named: Iterator[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {name: parameter for name, parameter in named if parameter.requires_grad}
