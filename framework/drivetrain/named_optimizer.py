"""Optimizer states by parameter name instead of by position, so that they move between ways of holding a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError


def parameter_names(module: nn.Module) -> dict[int, str]:
    """``id(parameter)`` to its first name in ``module``."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def named_state(module: nn.Module, optimizer: Optimizer, names: dict[int, str] | None = None) -> dict[str, Any]:
    """``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``; tensors are shared, not copied.

    Of an optimizer that keeps more, ``"beside": {key: value}`` is what its ``state`` holds under keys of its own (a
    count of steps), and ``"further"`` what else its ``state_dict`` has (that of an optimizer within). Of one whose
    ``state_dict`` has no ``"param_groups"`` at all, ``"further"`` is what it gave, as it is, and ``"whole"`` says so.
    ``names`` where the optimizer's parameters are not those of ``module`` any more.
    """
    names = parameter_names(module) if names is None else names
    packed = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    by_index = {i: names.get(id(p), f"#{i}") for i, p in enumerate(order)}
    return renamed(packed, by_index)


def renamed(packed: Mapping[str, Any], by_index: Mapping[int, str]) -> dict[str, Any]:
    """``state_dict`` of an optimizer with the names of :func:`named_state` for positions."""
    if "param_groups" not in packed:
        return {
            "state": {},
            "param_groups": [{"params": list(by_index.values())}],
            "further": {**packed},
            "whole": True,
        }
    states = packed.get("state", {})
    named: dict[str, Any] = {
        "state": {by_index[key]: state for key, state in states.items() if key in by_index},
        "param_groups": [
            {**group, "params": [by_index[index] for index in group["params"]]} for group in packed["param_groups"]
        ],
    }
    beside = {key: value for key, value in states.items() if key not in by_index}
    further = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return named | {key: part for key, part in (("beside", beside), ("further", further)) if part}


def packed_again(named: Mapping[str, Any], state: dict[Any, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """``state`` and ``groups`` by position with what else :func:`named_state` had, as the optimizer gave it."""
    if "whole" in named:
        return dict(named["further"])
    return {**named.get("further", {}), "state": state | named.get("beside", {}), "param_groups": groups}


def load_named_state(module: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restore :func:`named_state`; groups must match in number, parameters are found by name."""
    if "whole" in saved:
        _load(optimizer, packed_again(saved, {}, []))
        return
    names = parameter_names(module)
    groups = optimizer.param_groups
    if len(groups) != len(saved["param_groups"]):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, this one has"
            f" {len(groups)}: configure the same groups or load the weights only."
        )
    index, packed_groups = 0, []
    state: dict[Any, Any] = {}
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        indices = []
        for parameter in group["params"]:
            name = names.get(id(parameter), f"#{index}")
            if name in saved["state"]:
                state[index] = saved["state"][name]
            indices.append(index)
            index += 1
        packed_groups.append({**saved_group, "params": indices})
    _load(optimizer, packed_again(saved, state, packed_groups))


def _load(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Groups become those that were saved. Those of another kind of optimizer may lack what this one steps with, which
    is looked at when it does: a hook may put another in its place."""
    own = set(getattr(optimizer, "defaults", {}))
    stepped_with = [own & set(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(packed)
    except KeyError as error:
        raise _of_another_kind(optimizer, error) from error
    _keep_kinds(optimizer, packed.get("state", {}))
    pairs = zip(stepped_with, optimizer.param_groups, strict=False)
    lacking = sorted({name for names, group in pairs for name in names - set(group)})
    if lacking and isinstance(optimizer, Optimizer):

        def refuse(*_: Any) -> None:
            for name in lacking:
                if any(name not in group for group in optimizer.param_groups):  # nothing else was loaded since
                    raise _of_another_kind(optimizer, KeyError(name))

        optimizer.register_step_pre_hook(refuse)


def _of_another_kind(optimizer: Optimizer, missing: KeyError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's optimizer kept its state in another form than {type(optimizer).__name__} does ({missing}"
        " is missing): configure the optimizer that was saved or load the weights only."
    )


def _keep_kinds(optimizer: Optimizer, saved: Mapping[Any, Any]) -> None:
    """Give back their kind of number to states that have one of their own: torch makes what it loads of the parameter's
    kind, also counts, and a product of NAdam's, which an undisturbed run goes on with in single precision."""
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        for key, value in saved.get(index, {}).items():
            now = state.get(key)
            if not isinstance(value, Tensor) or not isinstance(now, Tensor) or now.dtype == value.dtype:
                continue
            if not value.is_floating_point() or value.ndim < min(parameter.ndim, 1):
                state[key] = value.detach().to(now.device, copy=True)
