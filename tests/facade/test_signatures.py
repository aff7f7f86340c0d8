"""What a configuration, a command line and a positional call see of Lightning's classes and functions is the same."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

import pytest

MODULES = (
    *("", "accelerators", "callbacks", "callbacks.timer", "callbacks.progress.rich_progress", "cli", "core", "demos"),
    *("loggers", "plugins", "profilers", "strategies", "trainer", "trainer.states", "tuner", "utilities"),
    *("demos.boring_classes", "plugins.environments", "utilities.parsing", "utilities.seed", "core.saving"),
    *("utilities.combined_loader", "utilities.memory", "utilities.model_summary", "utilities.data", "utilities.types"),
    *("utilities.grads", "utilities.compile", "utilities.model_helpers", "utilities.rank_zero", "tuner.tuning"),
)
# What differs, and why that is meant. Patterns of names.
EXCEPTIONS = {
    "strategies.*": "they take what drivetrain's strategies take, by name; the rest is refused by its name",
    "*.to_tensorrt: *": "not offered, and says so whatever it is given",
    "callbacks.RichProgressBar: refresh_rate": "batches between two drawings, of which there are ten a second at most",
    "callbacks.progress.rich_progress.RichProgressBarTheme: *": "the colours are those of the terminal",
    "callbacks.StochasticWeightAveraging: device": "the same, by a name that a configuration can be written with",
    "callbacks.ThroughputMonitor: batch_size_fn": "may be left out: the batch's own size is taken",
    "loggers.CometLogger: *": "not offered, and says so whatever it is given",
    "loggers.LitLogger*": "not offered, and says so whatever it is given",
    "loggers.*.log_hyperparams: params": "may be left out",
    "cli.LightningCLI: parser_class": "None stands for LightningArgumentParser, which is there once jsonargparse is",
    "cli.LightningArgumentParser.add_lr_scheduler_args: lr_scheduler_class": "ReduceLROnPlateau is of another module",
    "plugins.MixedPrecision: *": "both may be left out",
    "plugins.Precision.*: *": "the contract is drivetrain's: its methods get what its loop has",
    "plugins.TorchCheckpointIO.load_checkpoint: map_location": "None stands for the host, as there",
    "utilities.types.DistributedDataParallel*": "the class is torch's own; Lightning's is a type to check against",
    "utilities.rank_zero*: stacklevel": "counted from the caller, which is nearer here",
}


def found() -> Iterator[tuple[str, Any, Any]]:
    """Name, Lightning's and ours, of each class or function, and of each method of a class, that is in both."""
    seen = set()
    for path in MODULES:
        theirs = importlib.import_module(f"lightning.pytorch.{path}".rstrip("."))
        ours = importlib.import_module(f"drivetrain.lightning.{path}".rstrip("."))
        own = [name for name, value in vars(theirs).items() if getattr(value, "__module__", "") == theirs.__name__]
        for name in dict.fromkeys([*getattr(theirs, "__all__", []), *own]):
            there = getattr(theirs, name)
            if name.startswith("_") or there in seen or not callable(there) or not hasattr(ours, name):
                continue
            seen.add(there)
            here, whole = getattr(ours, name), f"{path}.{name}".lstrip(".")
            yield whole, there, here
            for method in sorted(_methods(there)) if inspect.isclass(there) else ():
                if callable(getattr(here, method, None)):
                    yield f"{whole}.{method}", getattr(there, method), getattr(here, method)


def _methods(kind: type) -> set[str]:
    lightnings = [each for each in kind.__mro__ if each.__module__.startswith("lightning")]
    names = {name for each in lightnings for name in vars(each) if not name.startswith("_")}
    return {name for name in names if callable(getattr(kind, name)) and not inspect.isclass(getattr(kind, name))}


def differences(name: str, theirs: Any, ours: Any) -> Iterator[str]:
    try:
        there, here = _parameters(theirs), _parameters(ours)
    except ValueError:  # of a class that has none
        return
    any_position = any(one.kind is one.VAR_POSITIONAL for one in there.values())
    named = {key: one for key, one in there.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    places = [key for key, one in named.items() if one.kind is not one.KEYWORD_ONLY]
    ours_in_place = [key for key, one in here.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    for key, one in named.items():
        if key not in here:
            yield f"{name}: {key} is missing"
        elif not _same(one.default, here[key].default):
            yield f"{name}: {key} is {one.default!r} there and {here[key].default!r} here"
    if places != ours_in_place[: len(places)] and {*places} <= {*here}:
        yield f"{name}: places {places} there, {ours_in_place} here"
    for key, one in here.items():
        needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if needed and key not in there and not any_position:
            yield f"{name}: {key} has to be given"


def _parameters(called: Any) -> Mapping[str, inspect.Parameter]:
    if isinstance(called, property):
        return {}
    found = dict(inspect.signature(called).parameters)
    return {key: one for key, one in found.items() if key not in ("self", "cls")}


def _same(there: Any, here: Any) -> bool:
    if isinstance(there, Enum):
        return bool(there.value == getattr(here, "value", here))
    if callable(there) and not hasattr(there, "__dataclass_fields__"):
        return getattr(there, "__name__", "") == getattr(here, "__name__", None)
    return type(there).__name__ == type(here).__name__ and (there == here or type(there) is not type(here))


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [line for name, theirs, ours in found() for line in differences(name, theirs, ours)]


def test_the_same_parameters(lines: list[str]) -> None:
    left = [line for line in lines if not any(fnmatchcase(_short(line), pattern) for pattern in EXCEPTIONS)]
    assert not left, "\n" + "\n".join(left)


@pytest.mark.parametrize("pattern", EXCEPTIONS)
def test_the_exceptions_are_needed(pattern: str, lines: list[str]) -> None:
    assert any(fnmatchcase(_short(line), pattern) for line in lines)


def _short(line: str) -> str:
    """Name of what is called, and of the parameter."""
    return " ".join(line.split(" ")[:2])


def test_there_is_much_to_compare() -> None:
    assert len(list(found())) > 500


@pytest.mark.parametrize("name", ["Timer", "StochasticWeightAveraging", "LambdaCallback", "RichProgressBar"])
def test_configurations_of_callbacks_can_be_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not so with Lightning's Timer, nor with the device of its StochasticWeightAveraging."""
    given = ["--trainer.callbacks", name, *(["--trainer.callbacks.swa_lrs=0.1"] if name.startswith("Stoch") else [])]
    command_line = importlib.import_module("drivetrain.lightning.cli").LightningCLI
    model = importlib.import_module("drivetrain.lightning").demos.BoringModel
    with pytest.raises(SystemExit) as ended:
        command_line(model, args=["fit", *given, "--print_config"])
    written = capsys.readouterr().out
    assert ended.value.code == 0 and f"callbacks.{name}" in written and "Unable" not in written
