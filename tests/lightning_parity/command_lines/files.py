"""What lies in the folder of a run, to compare it with another library's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.lightning_parity.laboratory import _table


def as_of_either(text: str) -> str:
    """Without the name of the library."""
    return re.sub(r"drivetrain\.lightning|lightning\.pytorch|pytorch_lightning", "LIBRARY", text)


def files_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"(tfevents)\..*", r"\1", path.relative_to(folder).as_posix())
        facts[name] = None
        if path.suffix in (".yaml", ".json"):
            text = path.read_text()
            facts[name] = [text.splitlines()[0], yaml.safe_load(text)]
        elif path.name == "metrics.csv":
            facts[name] = _table(path)
        elif path.suffix == ".ckpt":
            held = torch.load(path, weights_only=True)
            facts[name] = {key: held.get(key) for key in ("epoch", "global_step", "hyper_parameters", "hparams_name")}
            facts[name]["data"] = held.get("datamodule_hyper_parameters")
            facts[name]["weights"] = [float(weight.double().sum()) for weight in held["state_dict"].values()]
    return facts
