"""Hyper-parameters in files beside a checkpoint: ``hparams.yaml``, or a table with columns ``key`` and ``value``."""

from __future__ import annotations

import csv
import warnings
from argparse import Namespace
from ast import literal_eval
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import IO, Any

import yaml

from drivetrain.data import DataModule
from drivetrain.lightning import deep_names
from drivetrain.module import TrainModule
from drivetrain.yaml_text import yaml_text

__path__: list[str] = []


def _load_from_checkpoint(
    cls: type[Any],
    checkpoint_path: str | Path | IO[bytes],
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Any:
    """What ``load_from_checkpoint`` of a module or data module does, for a ``cls`` that overrides it."""
    if issubclass(cls, DataModule):
        load: Any = DataModule.__dict__["load_from_checkpoint"]
        return load.__get__(None, cls)(checkpoint_path, map_location, hparams_file, weights_only, **kwargs)
    load = TrainModule.__dict__["load_from_checkpoint"]
    return load.__get__(None, cls)(checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs)


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """The file's hyper-parameters; as a configuration of OmegaConf where that is asked for and possible. A file that
    is missing is told, and has none.

    Raises:
        yaml.YAMLError: the file is no YAML of plain data.
    """
    path = Path(config_yaml)
    if not path.is_file():
        return _none_in(path)
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not use_omegaconf:
        return found
    from omegaconf import OmegaConf
    from omegaconf.errors import UnsupportedValueType, ValidationError

    try:
        return OmegaConf.create(found)
    except (UnsupportedValueType, ValidationError):
        return found


def save_hparams_to_yaml(
    config_yaml: str | Path, hparams: Mapping[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write ``hparams`` to the file; what YAML cannot hold is left out and told. A configuration of OmegaConf is
    written with its references where ``use_omegaconf``.

    Raises:
        FileNotFoundError: there is no such folder.
        TypeError: ``hparams`` are no mapping.
    """
    path = _in_a_folder(config_yaml)
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if isinstance(hparams, DictConfig) and use_omegaconf:
        path.write_text(OmegaConf.to_yaml(hparams), encoding="utf-8")
        return
    values = _mapping(hparams)
    kept: dict[str, Any] = {}
    for name, value in values.items():
        plain = OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value
        plain = plain.name if isinstance(plain, Enum) else plain
        try:
            yaml_text(plain)
        except yaml.YAMLError:
            warnings.warn(f"{name!r} is left out of {path.name}: YAML has no {type(value).__name__}.", stacklevel=2)
            continue
        kept[name] = plain
    path.write_text(yaml_text(kept), encoding="utf-8")


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """The hyper-parameters of a table; a file that is missing is told, and has none."""
    path = Path(tags_csv)
    if not path.is_file():
        return _none_in(path)
    with open(path, newline="", encoding="utf-8") as stream:
        return {row["key"]: convert(row["value"]) for row in csv.DictReader(stream)}


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: Mapping[str, Any] | Namespace) -> None:
    """Write ``hparams`` as a table, a row for each.

    Raises:
        FileNotFoundError: there is no such folder.
        TypeError: ``hparams`` are no mapping.
    """
    path = _in_a_folder(tags_csv)
    with open(path, "w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(("key", "value"))
        rows.writerows(_mapping(hparams).items())


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Put ``updates`` into ``hparams``, also into the mappings in it."""
    for name, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(name), dict):
            update_hparams(hparams[name], value)
        else:
            hparams[name] = value


def convert(val: str) -> Any:
    """What ``val`` is written as in Python; itself where it is no literal."""
    try:
        return literal_eval(val)
    except (ValueError, SyntaxError):
        return val


def _in_a_folder(file: str | Path) -> Path:
    path = Path(file)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no folder: make it before {path.name} is written to it.")
    return path


def _none_in(path: Path) -> dict[str, Any]:
    warnings.warn(f"there is no file of hyper-parameters {path}: none are taken from it.", RuntimeWarning, stacklevel=3)
    return {}


def _mapping(hparams: Mapping[str, Any] | Namespace) -> dict[str, Any]:
    if isinstance(hparams, Namespace):
        return vars(hparams)
    if isinstance(hparams, Mapping):
        return dict(hparams)
    raise TypeError(f"hyper-parameters are a mapping or a Namespace, not a {type(hparams).__name__}.")


deep_names.name_below(__name__)
