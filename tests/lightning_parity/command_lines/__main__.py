"""``python -m tests.lightning_parity.command_lines FOLDER``: the scenarios; what was seen is left in ``facts.json``."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.lightning_parity.command_lines import scenarios
from tests.lightning_parity.command_lines.files import as_of_either, files_of


def facts_of(name: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            found = scenarios.SCENARIOS[name]()
        except BaseException:
            found = traceback.format_exc()
    messages = [line.strip() for line in err.getvalue().splitlines() if line.strip() and "eed set to" not in line]
    messages = [re.sub(r"[\w./]+[./](\w+)", r"\1", line) for line in messages]  # where a class is defined, a file lies
    return {"found": found, "out": out.getvalue().splitlines(), "err": messages, "files": files_of(Path())}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for library in ("lightning.pytorch", "lightning.fabric", "drivetrain"):
        logging.getLogger(library).setLevel(logging.ERROR)
    sys.argv = ["script.py"]
    everything = {}
    for name in scenarios.SCENARIOS:
        place = folder / name
        place.mkdir(parents=True)
        os.chdir(place)
        everything[name] = facts_of(name)
    (folder / "facts.json").write_text(as_of_either(json.dumps(everything, default=str)))


main(Path(sys.argv[1]).resolve())
