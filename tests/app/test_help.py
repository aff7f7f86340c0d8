from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain import __main__, app, bench
from drivetrain.cli.compose import loader, session
from drivetrain.cli.help import top_level_keys
from drivetrain.cli.options import JobOptions
from drivetrain.folders import folder
from tests.patience import LIMIT

WITHOUT_TORCH = """
import sys
from drivetrain.app import run
assert run({argv!r}) == {code}
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["strategy=nothing"], 2), (["devices=0"], 2)])
def test_help_and_refusals_import_no_torch(argv: list[str], code: int, tmp_path: Path) -> None:
    script = WITHOUT_TORCH.format(argv=argv, code=code)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=LIMIT)


def test_help_names_every_choice_and_key(strangers: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--help"]) == 0
    text = capsys.readouterr().out
    with session():
        for group in loader().list_groups(""):
            if group != "hydra":
                for choice in loader().get_group_options(group):
                    assert choice in text
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  strategy "))
    after = next(number for number in range(first + 1, len(lines)) if not lines[number].startswith("     "))
    listed = " ".join(lines[first:after])
    assert {"mine", "picky", "ring", "single"} <= set(listed.replace(",", " ").split())
    for key in JobOptions.__dataclass_fields__:
        assert f"  {key}=" in text


def test_the_users_own_choices_are_listed_and_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny.yaml").write_text("_target_: torch.nn.Linear\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "sgd.yaml").write_text("lr: 7.0\n")
    assert app.run(["--config-dir", str(tmp_path), "--help"]) == 0
    assert "tiny" in capsys.readouterr().out
    assert app.run(["--config-dir", str(tmp_path), "optimizer=sgd", "--cfg", "job", "--package", "optimizer"]) == 0
    assert "lr: 7.0" in capsys.readouterr().out


def test_keys_are_documented_with_their_true_defaults() -> None:
    keys = {key: default for key, default, _ in top_level_keys(folder("conf") / "config.yaml")}
    assert set(keys) == set(JobOptions.__dataclass_fields__)
    for name, item in JobOptions.__dataclass_fields__.items():
        assert keys[name] == ("null" if item.default is None else str(item.default))


def test_unknown_commands_are_answered(strangers: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["comapre", "a", "b"]) == 2
    assert "'compare'" in capsys.readouterr().err
    assert __main__.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("train", "compare", "bench"))
    assert __main__.main([]) == 2
    assert bench.main(["shuot"]) == 2
    assert "'shout'" in capsys.readouterr().err
    assert bench.main(["--help"]) == 0
    assert "shout" in capsys.readouterr().out
    assert __main__.main(["bench", "shout", "loud"]) == 3
    assert "shout loud" in capsys.readouterr().out
