"""Giving a module back: whole plain weights, its own class and methods, and none of the engine's hooks.

A job that was started elsewhere (torchrun) trains the caller's own module. When a stage has ended it must be what it
would be if workers had been started for it: something that can be called, copied, saved and trained again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain.named_optimizer import parameter_names

_ENGINE = "torch.distributed."  # where the functions of the hooks come from that FSDP2 and tensor parallelism put in


class Original:
    """What ``module`` is before an engine takes it; made right before, :meth:`noted` right after.

    Attributes:
        kind: the module's own class.
        names: the parameters that the optimizers have, by identity, once the engine has given the module back.
    """

    def __init__(self, module: nn.Module, fitted: Original | None = None) -> None:
        """
        Args:
            fitted: that of an earlier stage, where this one makes no optimizers: those of the last fit still have the
                parts that its engine held, and are what a script saves after a test.
        """
        self.module, self.kind = module, type(module)
        self.names: dict[int, str] | None = None if fitted is None else fitted.names
        self._before = [(child, type(child), dict(vars(child))) for child in module.modules()]

    def noted(self) -> None:
        """Keep of each sub-module what the engine added to it or replaced, and nothing else."""
        for i, (child, kind, own) in enumerate(self._before):
            now = {name: own.get(name, _ABSENT) for name in vars(child)}
            changed = {name: former for name, former in now.items() if vars(child)[name] is not former}
            self._before[i] = child, kind, changed

    def give_back(self, whole_of: Callable[[DTensor], Tensor] | None = None) -> None:
        """Undo it. Every rank calls it: the weights are gathered, one at a time, and kept on the host, for a device
        may not have room for all of them; or are what ``whole_of`` makes of the parts."""
        for child in self.module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()
                for one in cut_parameters(child):  # where a pass was interrupted the above may leave them gathered
                    one.to_sharded()
        if self.names is None:
            self.names = parameter_names(self.module)
        whole: dict[int, Tensor] = {}
        for child in self.module.modules():
            tables: list[dict[str, Any]] = [child._parameters, child._buffers]
            for held in tables:
                for name, tensor in held.items():
                    if isinstance(tensor, DTensor):
                        if id(tensor) not in whole:
                            whole[id(tensor)] = _plain(tensor, whole_of or DTensor.full_tensor)
                        held[name] = whole[id(tensor)]
        for child, kind, changed in self._before:
            child.__class__ = kind
            for name, value in changed.items():
                if value is _ABSENT:
                    vars(child).pop(name, None)
                else:
                    vars(child)[name] = value
            _unhook(child)
            _module_state_mapping.pop(child, None)  # else torch would not shard it again
        if whole:
            self.module.cpu()


_ABSENT = object()


def cut_parameters(part: FSDPModule) -> list[Any]:
    """What FSDP2 keeps of each parameter that it gathers for ``part``."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # the one of earlier versions
    return [one for group in groups if group is not None for one in group.fsdp_params]


def _plain(tensor: Any, whole_of: Callable[[DTensor], Tensor]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        full = whole_of(tensor.detach()).cpu()
    return nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full


def _unhook(module: nn.Module) -> None:
    """Remove the engine's hooks: FSDP puts some in when it first runs, and the user's may lie between."""
    tables = {name: table for name, table in vars(module).items() if "hooks" in name and isinstance(table, dict)}
    foreign = {key for table in tables.values() for key, hook in table.items() if _origin(hook).startswith(_ENGINE)}
    for table in tables.values():
        for key in foreign & table.keys():
            del table[key]


def _origin(hook: Any) -> str:
    """The module that a hook's function was defined in."""
    for inner in ("func", "hook"):  # a partial, torch's own wrapping of a hook
        hook = getattr(hook, inner, hook)
    return getattr(hook, "__module__", None) or ""
