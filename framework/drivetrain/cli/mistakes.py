"""Hydra's and OmegaConf's errors as one sentence each, with the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from drivetrain import registry
from drivetrain.cli.compose import composed, loader, probes, session
from drivetrain.cli.schema import first_line
from drivetrain.errors import nearest

#: What composing a config may raise.
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)


def explain(error: BaseException, overrides: Sequence[str] = (), config_dir: str | None = None) -> str:
    """One sentence for ``error``, which composing ``overrides`` raised."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group:
            return f"there is no {group} {name!r}: {nearest(name, error.options or [])}"
        return f"there is no config {name!r}: leave --config-name out or give --config-dir"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: write key=value, and put quotes around special characters"
    if isinstance(error, YAMLError):
        return f"a config file is not valid YAML: {' '.join(str(error).split())}"
    text = str(error)
    ambiguous = re.search(r"Ambiguous value for argument '([^']+)'", text)
    if ambiguous:
        return f"{ambiguous.group(1)} has several values: add -m to run one job for each, or write [..] for a list"
    unknown = re.search(r"Could not (?:override|delete)[^']*'([^']+)'", text)
    if unknown:
        return _unknown(unknown.group(1), overrides, config_dir) or first_line(error)
    return first_line(error)


def _unknown(key: str, overrides: Sequence[str], config_dir: str | None) -> str | None:
    """``key`` (``group.option`` or ``group/sub``) is in no config: suggest from the config without it."""
    with session(config_dir):
        job, config = _job_without(key, overrides)
        groups = [group for group in loader().list_groups("") if group != "hydra"]
    parent, _, last = key.rpartition(".")
    while parent and not isinstance(OmegaConf.select(config, parent), DictConfig):
        parent, _, last = parent.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    known = {str(name) for name in node if name != "hydra"} | (set() if parent else set(groups))
    if parent == "strategy":
        # A yaml file need not list all that the strategy declares.
        known |= {item.name for item in fields(registry.load("strategies", config.strategy.name).options)}
        if last in known:
            return f"the chosen config does not list {key!r}: add it with +{key}=VALUE"
    chosen = next((one for one in job if parent and one.partition("=")[0] == parent.replace(".", "/")), None)
    where = f" with {chosen}" if chosen and chosen not in overrides else ""
    return f"there is no option {key!r}{where}: {nearest(last, known)}"


def _job_without(key: str, overrides: Sequence[str]) -> tuple[list[str], DictConfig]:
    """The overrides of the first job, of all that a sweep starts, that ``key`` breaks, and its config without it."""
    for job in probes(overrides):
        others = [one for one in job if one.lstrip("+~").partition("=")[0] != key]
        try:
            composed(job)
        except COMPOSITION_ERRORS:
            try:
                return others, composed(others)
            except COMPOSITION_ERRORS:  # something else is wrong as well
                break
    return [], composed()
