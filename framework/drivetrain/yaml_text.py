"""Plain data as YAML that readers of both versions of the language understand alike."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.2 takes for a number and PyYAML does not (``1e-4``), as OmegaConf and jsonargparse read
    the former, and the letters that YAML 1.1 takes for yes and no, where PyYAML does not."""


def _represented(dumper: _Dumper, text: str) -> yaml.Node:
    try:
        float(text)
    except ValueError:
        if text not in ("y", "Y", "n", "N"):
            return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _represented)


def yaml_text(values: Any, sort_keys: bool = True) -> str:
    """``values`` (dictionaries, lists, texts, numbers) as YAML.

    Raises:
        yaml.YAMLError: something among them is no plain data.
    """
    return yaml.dump(values, Dumper=_Dumper, sort_keys=sort_keys, allow_unicode=True)
