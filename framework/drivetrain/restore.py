"""``load_from_checkpoint``: a module made of a checkpoint's hyper-parameters and weights, without a Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drivetrain import checkpoint as store
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.data import DataModule
    from drivetrain.module import TrainModule


T = TypeVar("T")
D = TypeVar("D", bound="DataModule")


def module_from_checkpoint(
    cls: type[TrainModule], path: Path, map_location: Any, strict: bool | None, overrides: dict[str, Any]
) -> TrainModule:
    """See :meth:`TrainModule.load_from_checkpoint`."""
    loaded = store.load(path)
    module = _built(cls, path, {**loaded.shared.get("hyper_parameters", {}), **overrides})
    if not list(module.parameters()):
        module.configure_model()
    module.on_load_checkpoint(loaded.shared)
    try:
        module.load_state_dict(loaded.shared["state_dict"], strict=module.strict_loading if strict is None else strict)
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {path} do not fit {cls.__name__}: {error}") from error
    if map_location is not None:
        module.to(map_location)
    module.eval()
    return module


def datamodule_from_checkpoint(cls: type[D], path: Path, overrides: dict[str, Any]) -> D:
    """See :meth:`DataModule.load_from_checkpoint`."""
    loaded = store.load(path)
    module = _built(cls, path, {**loaded.shared.get("datamodule_hyper_parameters", {}), **overrides})
    if "datamodule" in loaded.shared:
        module.load_state_dict(loaded.shared["datamodule"])
    return module


def _built(cls: type[T], path: Path, saved: dict[str, Any]) -> T:
    """``cls`` made of those of the hyper-parameters ``saved`` that its ``__init__`` takes."""
    accepted = inspect.signature(cls.__init__).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        saved = {name: value for name, value in saved.items() if name in accepted}
    try:
        return cls(**saved)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from the hyper-parameters in {path} ({error}): call"
            " save_hyperparameters() in its __init__, or give the missing arguments to load_from_checkpoint."
        ) from error
