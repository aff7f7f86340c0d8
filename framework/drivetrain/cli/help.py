"""What ``--help`` prints: every choice of every group and every top-level key, without importing torch."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from drivetrain.cli.compose import loader, session
from drivetrain.folders import folder

_KEY = re.compile(r"^(?P<key>\w+): *(?P<value>[^#]*?) *# (?P<text>.+)$")

_HEAD = """\
drivetrain: one Trainer for PyTorch; any way of distributing the training, chosen by one word.

  {command} [OPTION=VALUE ...]          one run
  {command} -m KEY=VALUE,VALUE ...      one run for each combination
"""

_FOOT = """\
EXAMPLES
  {command} strategy=ring                             train on all local devices
  {command} strategy=ring devices=4 trainer.max_epochs=3
  {command} strategy=ddp precision=bf16-mixed optimizer.lr=0.01
  {command} task=test resume=outputs/DATE/TIME        test a run's newest checkpoint
  {command} -m strategy=single,ddp,ring seed=1,2      six runs in one folder
  {command} hydra.run.dir=runs/a resume=auto          go on where runs/a stopped
  {command} +callbacks.early_stopping.monitor=val/loss callbacks.model_summary=null logger=csv
  torchrun --nproc-per-node=4 {script} strategy=ring    join the workers that are there

FLAGS
  --help, -h          this text
  --cfg job           print the composed config and stop (--resolve: with its interpolations)
  --multirun, -m      run a sweep
  --config-dir DIR    look for configs in DIR first: DIR/GROUP/NAME.yaml is a choice of GROUP
  --hydra-help        the flags and groups of Hydra itself
"""


def text(command: str, script: str, config_dir: str | None = None) -> str:
    """The whole page. ``command``: what the user types, ``script``: what torchrun is given."""
    with session(config_dir):
        source = loader()
        groups = {
            group: sorted(source.get_group_options(group)) for group in source.list_groups("") if group != "hydra"
        }
    width = max(len(group) for group in groups)
    lines = [
        _HEAD.format(command=command),
        "GROUPS  choose with GROUP=NAME, set an option with GROUP.OPTION=VALUE",
    ]
    for group, choices in groups.items():
        lines += textwrap.wrap(
            ", ".join(choices),
            width=110,
            initial_indent=f"  {group:<{width}}  ",
            subsequent_indent=" " * (width + 4),
            break_on_hyphens=False,
        )
    keys = top_level_keys(folder("conf") / "config.yaml")
    wide = max(len(f"{key}={value}") for key, value, _ in keys)
    lines += ["", "KEYS  with their defaults", *(f"  {f'{key}={value}':<{wide}}  {what}" for key, value, what in keys)]
    lines += ["", _FOOT.format(command=command, script=script)]
    return "\n".join(lines)


def top_level_keys(file: Path) -> list[tuple[str, str, str]]:
    """``(key, default, what it means)`` from the commented lines of the primary config."""
    found = (_KEY.match(line) for line in file.read_text().splitlines())
    return [(line["key"], line["value"], line["text"]) for line in found if line]
