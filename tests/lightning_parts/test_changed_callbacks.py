"""The Trainer's list of callbacks, changed after the Trainer was made: between stages, in hooks, and by the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.lightning_parts.both import classifier, compare, loader, trainer, weights


def _teller(L: Any, seen: list[str], base: Any = None) -> Any:
    """A class of callbacks that note what they are told of, under their name."""

    class Teller(base or L.Callback):  # type: ignore[misc]
        def __init__(self, name: str, **options: Any) -> None:
            super().__init__(**options)
            self.name = name

        def note(self, hook: str) -> None:
            seen.append(f"{self.name} {hook}")

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self.note(f"setup {stage}")

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.note("fit")

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.note("train")

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            self.note("epoch")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.note("batch")

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.note("step")

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.note("zero")

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            self.note("backward")
            pl_module.log(f"of {self.name}", 1.0, on_step=False, on_epoch=True)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.note("validation")

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            self.note("test")

    return Teller


def test_what_is_added_between_stages_is_called_and_what_is_taken_out_is_not(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[str] = []
        teller = _teller(L, seen)
        fit = trainer(L, tmp_path, callbacks=[teller("given")], max_epochs=1, limit_train_batches=2)
        fit.callbacks.append(teller("added"))
        fit.callbacks.insert(0, teller("first"))
        module = classifier(L, test_step=lambda self, batch, index: None)
        fit.fit(module, loader(8), loader(8))
        seen += sorted(fit.callback_metrics)
        del fit.callbacks[0]
        fit.callbacks = [*fit.callbacks, teller("last")]
        fit.test(module, loader(8), verbose=False)
        return {"seen": seen}

    compare(run)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_what_a_hook_of_the_module_adds_is_called_from_then_on(tmp_path: Path, hook: str) -> None:
    """The hook itself is the module's, which comes after the callbacks'."""

    def run(L: Any) -> dict[str, Any]:
        seen: list[str] = []
        added: list[Any] = []

        def add(self: Any, *args: Any, **named: Any) -> None:
            if not added:
                added.append(_teller(L, seen)("added"))
                self.trainer.callbacks.append(added[0])

        module = classifier(L, **{hook: add})
        trainer(L, tmp_path, max_epochs=2, limit_train_batches=2).fit(module, loader(8))
        return {"seen": seen}

    assert "added zero" in compare(run)["seen"]


def test_clipping_that_changes_while_training_runs_holds_from_the_next_epoch_on(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        def change(self: Any) -> None:
            self.trainer.gradient_clip_val = [None, 1e-4, None][self.trainer.current_epoch]

        module = classifier(L, on_train_epoch_start=change)
        trainer(L, tmp_path, max_epochs=3).fit(module, loader(8))
        return weights(module)

    compare(run)


def test_the_modules_callback_replaces_one_of_a_class_that_it_derives_from(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Stopping(L.callbacks.EarlyStopping):  # type: ignore[misc, name-defined]
            pass

        mine = Stopping("val")
        fit = trainer(L, tmp_path, callbacks=[L.callbacks.EarlyStopping("nothing")], max_epochs=1)
        fit.fit(classifier(L, configure_callbacks=lambda self: [mine]), loader(8), loader(8))
        return {"found": [type(callback).__name__ for callback in fit.callbacks if hasattr(callback, "patience")]}

    assert compare(run) == {"found": ["Stopping"]}


def test_the_modules_callbacks_are_its_own_and_what_was_added_stays(tmp_path: Path) -> None:
    seen: list[str] = []
    teller = _teller(ours, seen)
    fit = trainer(ours, tmp_path, callbacks=[ours.callbacks.EarlyStopping("val")], max_epochs=1)
    replacing = ours.callbacks.EarlyStopping("val", patience=7)
    fit.fit(classifier(ours, configure_callbacks=lambda self: [replacing]), loader(8), loader(8))
    fit.callbacks.append(teller("added"))
    fit.fit_loop.max_epochs = 2
    fit.fit(classifier(ours), loader(8), loader(8))
    assert [callback.patience for callback in fit.early_stopping_callbacks] == [3]
    assert "added epoch" in seen


def test_what_is_no_callback_is_refused_when_a_stage_begins(tmp_path: Path) -> None:
    fit = trainer(ours, tmp_path)
    fit.callbacks.append("no callback")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="str is no Callback"):
        fit.fit(classifier(ours), loader(8))
