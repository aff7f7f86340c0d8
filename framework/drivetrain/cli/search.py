"""Where Hydra finds configs: drivetrain's ``conf/``, other packages' and, last, the plugin registry itself.

A plugin without a yaml file is still a choice of its group: its config is made from what it declares.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import SearchPathException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from drivetrain import registry
from drivetrain.folders import folder


class DrivetrainSearchPath(SearchPathPlugin):
    """The user's folder first, so that a file there stands for ours of that name; then these, in this order."""

    config_dir: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.config_dir is not None:
            search_path.append("config-dir", f"file://{Path(self.config_dir).absolute()}")
        search_path.append("drivetrain", f"file://{folder('conf')}")
        for entry in sorted(entry_points(group="drivetrain.configs"), key=lambda entry: entry.name):
            search_path.append(entry.name, f"pkg://{entry.value}")
        search_path.append("plugins", "drivetrain://plugins")


def _strategy(name: str) -> dict[str, Any]:
    options = OmegaConf.to_container(OmegaConf.structured(registry.load("strategies", name).options))
    assert isinstance(options, dict)
    return {"name": name, **{str(key): value for key, value in options.items()}}


def _precision(name: str) -> dict[str, Any]:
    return {"name": name, "loss_scale": None}


def _compression(name: str) -> dict[str, Any]:
    options = OmegaConf.to_container(OmegaConf.structured(registry.load("compressors", name).options))
    assert isinstance(options, dict)
    return {"name": name, **{str(key): value for key, value in options.items()}}


def _part(name: str) -> dict[str, Any]:
    return {name: {}}


_GROUPS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "strategy": ("strategies", _strategy),
    "precision": ("precisions", _precision),
    "compression": ("compressors", _compression),
    "callbacks": ("callbacks", _part),
    "logger": ("loggers", _part),
}


class PluginSource(ConfigSource):
    """Registered plugins as Hydra choices. Listing imports nothing; the one that is chosen is imported (no torch)."""

    @staticmethod
    def scheme() -> str:
        return "drivetrain"

    def available(self) -> bool:
        return True

    def _split(self, config_path: str) -> tuple[str, str]:
        group, _, name = config_path.strip("/").rpartition("/")
        return group, name.removesuffix(".yaml")

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in {"", *_GROUPS}

    def is_config(self, config_path: str) -> bool:
        group, name = self._split(config_path)
        return group in _GROUPS and name in registry.names(_GROUPS[group][0])

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"no plugin is registered for {config_path}")
        group, name = self._split(config_path)
        return ConfigResult(
            config=OmegaConf.create(_GROUPS[group][1](name)),
            path=self.full_path(),
            provider=self.provider,
            header={"package": None},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group == "":
            return [] if results_filter == ObjectType.CONFIG else sorted(_GROUPS)
        if group not in _GROUPS or results_filter == ObjectType.GROUP:
            return []
        return registry.names(_GROUPS[group][0])


def register(config_dir: str | None = None) -> None:
    """Make Hydra look there; before ``hydra.main`` or ``hydra.initialize``, any number of times.

    Raises:
        SearchPathException: ``config_dir`` is no folder.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise SearchPathException(f"--config-dir {config_dir}: there is no such folder")
    DrivetrainSearchPath.config_dir = config_dir
    plugins = Plugins.instance()
    plugins.register(DrivetrainSearchPath)
    plugins.register(PluginSource)
