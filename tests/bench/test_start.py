"""The benchmark of how long training takes to begin: that it times the command that it names."""

from __future__ import annotations

import json
import time

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain_plugins.bench import start


def test_the_first_batch_comes_after_torch_and_before_the_command_ends(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert start.main(["strategy=single", "devices=1", "--repeats", "1", "--json"]) == 0
    passed = time.perf_counter() - began
    found = json.loads(capsys.readouterr().out)
    assert found["words"] == ["strategy=single", "devices=1"]
    [first], [torch] = found["first_batch"], found["import_torch"]
    assert torch < first and torch + first < passed


def test_what_the_command_refuses_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'ring'"):
        start.seconds_to_first_batch(["strategy=rng"])
    with pytest.raises(ConfigurationError, match="--repeats 0"):
        start.main(["--repeats", "0"])
