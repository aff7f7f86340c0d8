"""Compose the config once before Hydra runs, so that a request is refused before a folder is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra import compose, initialize
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString, Sweep
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from drivetrain.cli import search
from drivetrain.cli.options import JobOptions
from drivetrain.cli.schema import written
from drivetrain.errors import ConfigurationError, nearest

CONFIG_NAME = "config"
VERSION_BASE = "1.3"
GROUPS = (
    "strategy", "recipe", "model", "data", "optimizer", "scheduler", "precision", "compression", "callbacks", "logger",
    "checkpoint", "launcher", "trainer",
)  # fmt: skip


@contextmanager
def session(config_dir: str | None = None) -> Iterator[None]:
    """Within it :func:`composed` and :func:`loader` work; Hydra's global state is given back afterwards."""
    search.register(config_dir)
    with initialize(config_path=None, version_base=VERSION_BASE):
        yield


def composed(overrides: Sequence[str] = (), config_name: str = CONFIG_NAME) -> DictConfig:
    """The config with Hydra's own node. Raises Hydra's and OmegaConf's errors; see :mod:`drivetrain.cli.mistakes`."""
    _choices_are_names(overrides)
    config = compose(config_name, overrides=list(overrides), return_hydra_config=True)
    _known_or_used(config)
    return config


def _known_or_used(config: DictConfig) -> None:
    """Refuse a top-level key that means nothing: a variable of one's own (``+width=8``) is one that others refer to."""
    known = {*JobOptions.__dataclass_fields__, *GROUPS, "hydra"}
    unresolved = str(OmegaConf.to_container(config, resolve=False))
    for key in map(str, config):
        if key not in known and not re.search(rf"\$\{{\.*{re.escape(key)}\b", unresolved):
            raise ConfigurationError(
                f"there is no option {key!r}, and nothing in the config refers to ${{{key}}}:"
                f" {nearest(key, known - {'hydra'})}"
            )


def _choices_are_names(overrides: Sequence[str]) -> None:
    """``precision=7``, ``data=null``, ``logger=[1]``: Hydra has no sentence for a choice that is no name."""
    for override in OverridesParser.create(config_loader=loader()).parse_overrides(list(overrides)):
        group, value = override.key_or_group, override.value()
        if not group:
            raise ConfigurationError(f"cannot read {override.input_line!r}: write key=value")
        added = isinstance(value, dict) and (override.is_add() or override.is_force_add())  # options beside a choice
        if override.is_delete() or added or group not in loader().list_groups(""):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str | QuotedString | Sweep):
                continue
            name = written(one)
            raise MissingConfigException(
                f"no {group} {name}", missing_cfg_file=f"{group}/{name}", options=loader().get_group_options(group)
            )


def loader() -> ConfigLoaderImpl:
    """The loader of the open session: group names and their choices."""
    found = GlobalHydra.instance().config_loader()
    assert isinstance(found, ConfigLoaderImpl)
    return found


def probes(overrides: Sequence[str]) -> list[list[str]]:
    """Override lists that together hold every value of a sweep: the sum of the choices, not their product."""
    first: list[str] = []
    others: list[tuple[int, str]] = []
    for override in OverridesParser.create(config_loader=loader()).parse_overrides(list(overrides)):
        if not override.is_sweep_override():
            assert override.input_line is not None
            first.append(override.input_line)
        elif override.is_discrete_sweep():
            values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            others += [(len(first), value) for value in values[1:]]
            first.append(values[0])
        # What a sweeper draws from a range is known only to the sweeper: left at the config's value.
    return [first, *([*first[:place], value, *first[place + 1 :]] for place, value in others)]
