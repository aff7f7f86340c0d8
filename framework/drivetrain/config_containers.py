"""Configurations of OmegaConf, which may never have been imported: told from other data, made plain, and changed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.attribute_dict import AttributeDict


def is_config(obj: Any) -> bool:
    """Whether ``obj`` is a container of OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(obj, (omegaconf.DictConfig, omegaconf.ListConfig))


def is_mapping_config(obj: Any) -> bool:
    """Whether ``obj`` is one with names, such as hyper-parameters may be."""
    return is_config(obj) and isinstance(obj, Mapping)


def plain_config(obj: Any) -> Any:
    """A container of OmegaConf as dictionaries and lists; None where ``obj`` is none."""
    if not is_config(obj):
        return None
    import omegaconf

    mode = omegaconf.SCMode.DICT
    try:
        plain = omegaconf.OmegaConf.to_container(obj, resolve=True, structured_config_mode=mode)
    except omegaconf.errors.OmegaConfBaseException:  # refers to what is not there outside its parent: keep the text
        plain = omegaconf.OmegaConf.to_container(obj, resolve=False, structured_config_mode=mode)
    return {} if plain is None or isinstance(plain, str) else plain


def config_of(plain: Any) -> Any:
    """The container of OmegaConf that holds ``plain``; a dictionary with attributes where that can be none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.create(plain)
    except OmegaConfBaseException:  # a configuration that was allowed objects
        return AttributeDict(plain) if isinstance(plain, dict) else plain


def values_of(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What ``mapping`` holds; of a configuration also what is still missing in it (``???``) or refers to what is not
    there, as the text that stands there."""
    if not is_config(mapping):
        return dict(mapping)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values = dict(OmegaConf.to_container(mapping, resolve=False))  # type: ignore[arg-type]
    for name in values:
        try:
            values[name] = mapping[name]
        except OmegaConfBaseException:
            continue
    return values


def without(config: Any, names: Iterable[str]) -> Any:
    """The configuration without these names, which whoever gave it keeps; itself where it has none of them."""
    from omegaconf import OmegaConf

    left = [name for name in config._content if name not in set(names)]
    return config if len(left) == len(config._content) else OmegaConf.masked_copy(config, left)


def changed(config: Any, overrides: Mapping[str, Any]) -> Any:
    """A copy of the configuration in which these names have other values."""
    from omegaconf import flag_override

    config = copy.deepcopy(config)
    with flag_override(config, ["readonly", "struct"], False):
        for name, value in overrides.items():
            config[name] = value
    return config
