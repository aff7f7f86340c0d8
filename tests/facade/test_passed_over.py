"""Members of Lightning's callbacks, loggers and profilers that a project may override: called here, or told of."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch as theirs
import pytest
import torch
from torch import nn

import drivetrain
import drivetrain.lightning as ours
import drivetrain_plugins
from drivetrain.lightning.passed_over import PASSED_OVER
from tests.facade.recorder import QUIET, loader, net

_SECTIONS = ("callbacks", "loggers", "profilers")
_HERE = (*map(Path, drivetrain.__path__), *map(Path, drivetrain_plugins.__path__))
_THERE = (*map(Path, theirs.__path__), *map(Path, lightning.fabric.__path__))


@functools.cache
def _read_in(file: Path) -> dict[str, frozenset[str]]:
    """The names that are read of objects in ``file``, each with the names of those objects ("" for an expression)."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found.setdefault(node.attr, set()).add(owner)
    return {name: frozenset(owners) for name, owners in found.items()}


def _read(kind: type, roots: tuple[Path, ...], section: str) -> dict[str, set[str]]:
    """What is read where objects of ``kind`` are used: in the files of its classes, and outside of its section."""
    own = {Path(inspect.getfile(each)) for each in kind.__mro__ if each.__module__ not in ("builtins", "abc")}
    files = {file for root in roots for file in root.rglob("*.py") if section not in file.relative_to(root).parts}
    found: dict[str, set[str]] = {}
    for file in files | {file for file in own if any(file.is_relative_to(root) for root in roots)}:
        for name, owners in _read_in(file).items():
            found.setdefault(name, set()).update(owners)
    return found


def _never_read(section: str, name: str) -> list[str]:
    """Members of Lightning's class of this name that Lightning reads of its objects, and drivetrain of none."""
    there, here = (getattr(getattr(L, section), name) for L in (theirs, ours))
    read_there, read_here = _read(there, _THERE, section), _read(here, _HERE, section)
    classes = {each.__name__ for each in there.__mro__}  # what is read of a class by its name cannot be overridden
    found = set()
    for owner in there.__mro__:
        if owner.__module__.startswith("lightning."):
            for member, value in vars(owner).items():
                made = callable(value) or isinstance(value, (property, classmethod, staticmethod))
                inner = member.startswith(("__", "_abc", f"_{owner.__name__}__"))
                if inner or member in dir(theirs.Callback) or not (made or member.isupper() or member[0] != "_"):
                    continue
                if read_there.get(member, set()) - classes and member not in read_here:
                    found.add(member)
    return sorted(found)


def _offered() -> list[tuple[str, str]]:
    return [
        (section, name)
        for section in _SECTIONS
        for name in getattr(theirs, section).__all__
        if name in getattr(ours, section).__all__ and name != "Callback"
    ]


@pytest.mark.parametrize(("section", "name"), _offered())
def test_every_member_that_lightning_reads_is_read_or_told_of(section: str, name: str) -> None:
    assert list(PASSED_OVER.get(name, ())) == _never_read(section, name)


class Skips(ours.callbacks.ModelCheckpoint):
    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        return set()


class Rows(ours.loggers.CSVLogger):
    def _get_next_version(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"callbacks": Skips()},
            "Skips overrides _find_last_checkpoints of Lightning's ModelCheckpoint, which",
        ),
        ({"logger": [Rows("x")]}, "Rows overrides _get_next_version of Lightning's CSVLogger, which nothing here asks"),
    ],
)
def test_what_has_no_effect_is_told(given: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        ours.Trainer(**{**QUIET, "enable_checkpointing": None, **given})


def test_what_has_an_effect_is_not() -> None:
    class Own(ours.callbacks.ModelCheckpoint):
        def format_checkpoint_name(self, *args: Any, **options: Any) -> str:
            return super().format_checkpoint_name(*args, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[Own(), ours.callbacks.EarlyStopping("x")])


class Module(nn.Module):
    """Of either library: ``Module.of(L)``."""

    @staticmethod
    def of(L: Any, batchnorm: bool = False) -> Any:
        class Project(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(2)
                self.net = nn.Sequential(nn.BatchNorm1d(6), net()) if batchnorm else net()

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.log("loss", loss)
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None: ...

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Project()


both = pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])


@pytest.mark.parametrize("batchnorm", [False, True])
def test_the_parts_of_an_average_of_weights_are_called(batchnorm: bool) -> None:
    def trained(L: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
        calls: list[Any] = []

        class Halving(L.callbacks.StochasticWeightAveraging):  # type: ignore[misc, name-defined]
            @staticmethod
            def pl_module_contains_batch_norm(pl_module: Any) -> bool:
                calls.append("contains")
                return any(isinstance(part, nn.BatchNorm1d) for part in pl_module.modules())

            @staticmethod
            def avg_fn(averaged: Any, weights: Any, number: Any) -> Any:
                return averaged + (weights - averaged) / 2

            @staticmethod
            def update_parameters(average_model: Any, model: Any, n_averaged: Any, avg_fn: Any) -> None:
                calls.append(("update", int(n_averaged)))
                for mean, weights in zip(average_model.parameters(), model.parameters(), strict=True):
                    mean.detach().copy_(avg_fn(mean.detach(), weights.detach(), n_averaged) if n_averaged else weights)
                    mean.detach().mul_(0.9)
                n_averaged += 1

            @staticmethod
            def transfer_weights(src_pl_module: Any, dst_pl_module: Any) -> None:
                calls.append("transfer")
                super(Halving, Halving).transfer_weights(src_pl_module, dst_pl_module)

            def reset_batch_norm_and_save_state(self, pl_module: Any) -> None:
                super().reset_batch_norm_and_save_state(pl_module)
                calls.append(("reset", list(self.momenta.values())))

            def reset_momenta(self) -> None:
                super().reset_momenta()
                calls.append(("back", [part.momentum for part in self.momenta]))

        module = Module.of(L, batchnorm)
        trainer = L.Trainer(**QUIET, max_epochs=4, logger=False, callbacks=Halving(0.05, 2))
        trainer.fit(module, loader(22, 4))
        return calls, module.state_dict()

    (there, expected), (here, found) = trained(theirs), trained(ours)
    assert here == there and ("update", 1) in here and "transfer" in here and (("back", [0.1]) in here) is batchnorm
    same = {name for name in expected if "running" in name or not batchnorm}  # Lightning's pass for them steps as well
    assert same and all(torch.allclose(found[name], expected[name], atol=1e-6) for name in same)


@both
@pytest.mark.parametrize("kind", ["ModelSummary", "RichModelSummary"])
def test_a_summary_of_its_own_is_given_the_columns(L: Any, kind: str) -> None:
    given: list[Any] = []

    class Own(getattr(L.callbacks, kind)):  # type: ignore[misc]
        @staticmethod
        def summarize(
            summary_data: Any,
            total_parameters: int,
            trainable_parameters: int,
            model_size: float,
            *args: Any,
            **more: Any,
        ) -> None:
            given.append([dict(summary_data), total_parameters, trainable_parameters, len(args), more])

    options = {**QUIET, "enable_model_summary": True, "logger": False, "max_steps": 1, "max_epochs": 1}
    L.Trainer(**options, callbacks=Own(1, looks=3)).fit(Module.of(L), loader())
    [columns, parameters, trainable, positional, named] = given[0]
    assert list(columns) == [" ", "Name", "Type", "Params", "Mode", "FLOPs"] and columns["Name"] == ["net"]
    assert parameters == trainable == sum(p.numel() for p in Module.of(L).parameters())
    assert (positional, named["looks"], named["total_flops"]) == (1, 3, 0)


def test_a_summary_of_its_own_may_print_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(ours.callbacks.ModelSummary):
        @staticmethod
        def summarize(*args: Any, **more: Any) -> None:
            ours.callbacks.ModelSummary.summarize(*args, **more)
            print("its own")

    options = {**QUIET, "enable_model_summary": True, "logger": False, "max_steps": 1, "max_epochs": 1}
    ours.Trainer(**options, callbacks=Own()).fit(Module.of(ours), loader())
    shown = capsys.readouterr().out
    assert "Name" in shown and "net" in shown and "trainable" in shown and shown.rstrip().endswith("its own")


def test_the_format_of_a_bar() -> None:
    class Own(ours.callbacks.TQDMProgressBar):
        BAR_FORMAT = "<{desc}{n_fmt} of {total_fmt}, {percentage:.0f}%{postfix}>"

    bars = importlib.import_module(ours.callbacks.TQDMProgressBar.__module__)
    bar = Own()
    bar._enabled = True
    bar._given = bar._console = None
    line = bar.init_train_tqdm()
    line.reset(8)
    line.n, line.postfix = 2, "loss=1"
    assert str(line) == "<Training: 2 of 8, 25%, loss=1>"
    line.bar_format = bars.TQDMProgressBar.BAR_FORMAT
    assert str(line).startswith("Training:  25%|█████               | 2/8 [00:00<00:00, ") and str(line).endswith(
        ", loss=1]"
    )
    line.bar_format = "{l_bar}{bar}{r_bar}"
    assert str(line).startswith("Training:  25%|█████               | 2/8 [")
    line.total = None
    assert str(line).startswith("Training: " + " " * 20 + "| 2/? [00:00<?, ")


@both
def test_an_operator_of_its_own_says_what_is_better(L: Any) -> None:
    class Own(L.callbacks.EarlyStopping):  # type: ignore[misc, name-defined]
        @property
        def monitor_op(self) -> Any:
            return lambda value, best: value > best + 10  # only the first value ever is

    module = Module.of(L)
    trainer = L.Trainer(**QUIET, max_epochs=6, logger=False, callbacks=Own("loss", patience=2))
    trainer.fit(module, loader())
    assert trainer.current_epoch == 3


class Redraws(ours.callbacks.TQDMProgressBar):
    refresh_rate = 0


def test_properties_of_a_bar_and_a_logger_are_asked(tmp_path: Path) -> None:
    assert not Redraws().is_enabled

    class Own(ours.loggers.TensorBoardLogger):
        sub_dir = "below"

    assert Own(str(tmp_path), version=1).log_dir.endswith("version_1/below")


if __name__ == "__main__":
    for section, name in _offered():
        if names := _never_read(section, name):
            print(f'    "{name}": {tuple(names)!r},')
