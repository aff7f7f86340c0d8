"""Configurations of OmegaConf, which may never have been imported: told from other data, made plain, and changed."""

from __future__ import annotations

import copy
import re
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


_REFERENCE = re.compile(r"(\\*)\$\{")
_TO_A_NAME = re.compile(r"\$\{[^:{}]*\}")


def _calls(text: str) -> bool:
    """Whether a reference in ``text`` names a function; those to names may stand within one another."""
    count = 1
    while count:
        text, count = _TO_A_NAME.subn("", text)
    return ":" in text.partition("${")[2]


def _as_text(plain: Any) -> Any:
    """``plain``, in which a reference that names a function (``${function:argument}``) is the text that stands there:
    a project may have given OmegaConf ``eval`` under a name, and ``plain`` may be of a file that nobody trusts."""
    if isinstance(plain, dict):
        return {key: _as_text(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [_as_text(value) for value in plain]
    if isinstance(plain, str) and _calls(plain):
        return _REFERENCE.sub(lambda found: 2 * found[1] + r"\${", plain)
    return plain


def config_of(plain: Any) -> Any:
    """The container of OmegaConf that holds ``plain``, whose references to functions are text; a dictionary with
    attributes where that can be none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.create(_as_text(plain))
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
