"""``load_from_checkpoint``: a module or data module made of what a checkpoint holds, without a Trainer."""

from __future__ import annotations

import argparse
import csv
import inspect
import os
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden

from drivetrain import checkpoint as store
from drivetrain.checkpoint import kept_hyperparameters, layout, single
from drivetrain.checkpoint.trust import trusted
from drivetrain.config_containers import changed, is_config, values_of
from drivetrain.errors import CheckpointError, MisfitError, UnbuildableError
from drivetrain.module import TrainModule

if TYPE_CHECKING:
    from drivetrain.data import DataModule

# What a checkpoint of a module that a command line made is made with anew, under whatever name it was saved.
_INSTANTIATORS = {
    f"{package}.cli.instantiate_module"
    for package in ("lightning.pytorch", "pytorch_lightning", "drivetrain.lightning")
}
Source = str | os.PathLike[str] | IO[bytes]


def module_from_checkpoint(
    cls: type[TrainModule],
    source: Source,
    map_location: Any,
    hparams_file: str | Path | None,
    strict: bool | None,
    weights_only: bool | None,
    overrides: dict[str, Any],
) -> TrainModule:
    """See :meth:`TrainModule.load_from_checkpoint`."""
    content, directory = _content(source, map_location, weights_only)
    if "state_dict" not in content:
        raise CheckpointError(f"{source} holds no 'state_dict'; name a checkpoint that a Trainer wrote")
    arguments = _arguments(cls, content, layout.HPARAMS, layout.HPARAMS_NAME, hparams_file, overrides, weights_only)
    module: TrainModule = _build(cls, source, arguments, weights_only)
    if is_overridden("configure_model", module, TrainModule):
        module.configure_model()
    module.on_load_checkpoint(content)
    strictly = module.strict_loading if strict is None else strict
    try:
        odd = module.load_state_dict(content["state_dict"], strict=strictly)
    except RuntimeError as error:
        raise MisfitError(f"the weights in {source} do not fit {cls.__name__}: {error}") from error
    if not strictly and (odd.missing_keys or odd.unexpected_keys):
        warnings.warn(
            f"{cls.__name__} and {source} differ: missing in the checkpoint {odd.missing_keys or 'nothing'}, unknown to"
            f" the module {odd.unexpected_keys or 'nothing'}.",
            stacklevel=3,
        )
    if isinstance(map_location, (str, torch.device)):
        module.to(map_location)
    elif (first := next((t for t in content["state_dict"].values() if torch.is_tensor(t)), None)) is not None:
        module.to(first.device)
    return module.eval() if directory else module


def data_from_checkpoint(
    cls: type[DataModule],
    source: Source,
    hparams_file: str | Path | None,
    weights_only: bool | None,
    overrides: dict[str, Any],
) -> DataModule:
    """See :meth:`DataModule.load_from_checkpoint`."""
    content, _ = _content(source, None, weights_only)
    names = (layout.DATA_HPARAMS, layout.DATA_HPARAMS_NAME)
    arguments = _arguments(cls, content, *names, hparams_file, overrides, weights_only)
    data: DataModule = _build(cls, source, arguments, weights_only)
    state = content.get(cls.__qualname__, content.get("datamodule"))
    if state is not None:
        data.load_state_dict(state)
    return data


def _content(source: Source, map_location: Any, weights_only: bool | None) -> tuple[dict[str, Any], bool]:
    """What the checkpoint holds, and whether it is a directory."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if path.is_dir() or (path.is_file() and not single.is_file(path)):
            return store.load(path).shared, True
    location = map_location
    if map_location is None:  # where it was saved, as far as that is here
        location = _as_saved
    stream_or_path: Any = os.fspath(source) if isinstance(source, os.PathLike) else source
    return single.read(stream_or_path, weights_only=weights_only, map_location=location), False


def _as_saved(storage: Any, place: str) -> Any:
    """Where the tensor was saved (None), or on the CPU where there is no such device."""
    return storage if place.startswith("cuda") and not torch.cuda.is_available() else None


def _arguments(
    cls: type,
    content: dict[str, Any],
    key: str,
    name_key: str,
    hparams_file: str | Path | None,
    overrides: dict[str, Any],
    weights_only: bool | None,
) -> dict[str, Any]:
    """What ``cls`` is made with: the saved hyper-parameters, then what the caller gives."""
    ours = content.get(layout.OURS)
    rest = ours.get(key, {}) if isinstance(ours, dict) else {}
    saved, withheld = kept_hyperparameters.read_hyperparameters(content.get(key) or {}, rest, weights_only)
    if hparams_file is not None:
        saved, withheld = _from_file(cls, Path(hparams_file)), []
    accepted = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    name = content.get(name_key)
    if isinstance(name, str) and name in accepted and accepted[name].kind is not inspect.Parameter.VAR_KEYWORD:
        saved = {name: _configuration(saved, overrides)}
    saved = values_of(saved)
    if saved.get("_instantiator") in _INSTANTIATORS:
        return {**saved, **{k: v for k, v in overrides.items() if k in accepted or "_class_path" in saved}}
    arguments = {k: v for k, v in {**saved, **overrides}.items() if k not in ("_instantiator", "_class_path")}
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        arguments = {k: v for k, v in arguments.items() if k in accepted}
    absent = [n for n in withheld if n in accepted and n not in arguments]
    lacking = [n for n in absent if accepted[n].default is inspect.Parameter.empty]
    if absent and not lacking:
        warnings.warn(
            f"{cls.__name__} is made with the defaults of {', '.join(absent)}: the checkpoint holds objects that are"
            f" not made unasked; pass {absent[0]}=..., or weights_only=False if you trust where it comes from.",
            stacklevel=4,
        )
    if lacking:
        raise CheckpointError(
            f"{cls.__name__} needs {', '.join(lacking)}, which the checkpoint holds as an object that is not made"
            f" unasked: pass {lacking[0]}=..., or weights_only=False if you trust where the checkpoint comes from"
        )
    return arguments


def _configuration(saved: Any, overrides: dict[str, Any]) -> Any:
    """What one argument holds: of OmegaConf's kind where it was and can be, else a dictionary with attributes."""
    if is_config(saved):
        from omegaconf.errors import OmegaConfBaseException

        try:
            return changed(saved, overrides)
        except OmegaConfBaseException:  # the caller gives an object, which no configuration may hold
            saved = values_of(saved)
    return kept_hyperparameters.nested({**saved, **overrides})


def _build(cls: Any, source: Source, arguments: dict[str, Any], weights_only: bool | None) -> Any:
    try:
        if "_instantiator" in arguments:
            from drivetrain.lightning.cli.instantiation import configured

            return configured(cls, arguments, trusted(weights_only))
        return cls(**arguments)
    except (TypeError, argparse.ArgumentError) as error:
        raise UnbuildableError(
            f"{cls.__name__} cannot be built from the hyper-parameters in {source} ({error}): call"
            " save_hyperparameters() in its __init__, or give the missing arguments to load_from_checkpoint."
        ) from error


def _from_file(cls: type, path: Path) -> dict[str, Any]:
    """Hyper-parameters in a YAML file, or in a CSV file with the columns ``key`` and ``value``. A file that is missing
    is told, and has none, as under Lightning."""
    if not path.is_file():
        warnings.warn(
            f"there is no file of hyper-parameters {path}: {cls.__name__} is made with its defaults and what"
            " load_from_checkpoint is given; leave hparams_file out for those that the checkpoint holds.",
            category=RuntimeWarning,
            stacklevel=5,
        )
        return {}
    import yaml

    if path.suffix.lower() in (".yaml", ".yml"):
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    elif path.suffix.lower() == ".csv":
        with open(path, newline="", encoding="utf-8") as stream:
            values = {row["key"]: yaml.safe_load(row["value"]) for row in csv.DictReader(stream)}
    else:
        raise CheckpointError(f"hparams_file={path}: give a .yaml, .yml or .csv file")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__} and no mapping of hyper-parameters")
    return values
