"""What projects ask of a Trainer's loops and results by Lightning's private names, at every hook."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.facade.recorder import QUIET, loader, net

HOOKS = [f"on_{stage}_batch_{at}" for stage in ("train", "validation", "test") for at in ("start", "end")]
HOOKS += [f"on_{stage}_{at}" for stage in ("train", "validation", "test") for at in ("start", "end", "epoch_end")]


def module(L: Any) -> Any:
    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("quiet", loss * 2, logger=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", batch[0].sum(), batch_size=1, on_step=True, on_epoch=True, prog_bar=True)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("test", batch[0].sum(), batch_size=1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def asked(L: Any, ask: Any, loaders: int = 1, hooks: list[str] = HOOKS, **options: Any) -> list[Any]:
    """What ``ask(trainer)`` gives at each of ``hooks`` of a fit, a validation and a test."""
    found: list[Any] = []

    def at(hook: str) -> Any:
        return lambda self, trainer, *rest: found.append((hook, ask(trainer)))

    own = type("Own", (L.Callback,), {hook: at(hook) for hook in hooks})()
    settings = {**QUIET, "max_epochs": 2, "logger": False, "num_sanity_val_steps": 1, "callbacks": own, **options}
    trainer, data = L.Trainer(**settings), [loader(6 + 4 * number, 4) for number in range(loaders)]
    made = module(L)
    trainer.fit(made, loader(10, 4), data)
    trainer.validate(made, data, verbose=False)
    trainer.test(made, data, verbose=False)
    return found


def plain(metrics: Any) -> Any:
    return sorted((name, round(float(value), 4)) for name, value in metrics.items())


def counts(trainer: Any) -> Any:
    def of(progress: Any) -> Any:
        return [(one.ready, one.started, one.processed, one.completed) for one in (progress.current, progress.total)]

    loop = trainer._evaluation_loop
    return loop is trainer._active_loop, of(loop.batch_progress), loop.max_batches, loop.num_dataloaders


@pytest.mark.parametrize("options", [{}, {"loaders": 2}, {"val_check_interval": 1}])
def test_where_an_evaluation_stands(options: dict[str, Any]) -> None:
    hooks = [hook for hook in HOOKS if "train" not in hook]
    there = asked(theirs, counts, hooks=hooks, **options)
    assert asked(ours, counts, hooks=hooks, **options) == there and len(there) > 20


@pytest.mark.parametrize("name", ["callback_metrics", "logged_metrics", "progress_bar_metrics"])
@pytest.mark.parametrize("private", ["", "_"])
def test_what_is_known(private: str, name: str) -> None:
    def ask(trainer: Any) -> Any:
        return plain(getattr(trainer._logger_connector, private + name))

    hooks = [hook for hook in HOOKS if not private or hook.endswith("_start")]
    there = asked(theirs, ask, hooks=hooks)
    assert asked(ours, ask, hooks=hooks) == there and any(found for _, found in there)


@pytest.mark.parametrize("loaders", [1, 2])
def test_what_was_logged(loaders: int) -> None:
    def ask(trainer: Any) -> Any:
        results, metrics = trainer._results, trainer._logger_connector.metrics
        return sorted(results), results.dataloader_idx, {kind: plain(part) for kind, part in metrics.items()}

    there = asked(theirs, ask, loaders)
    assert asked(ours, ask, loaders) == there


def test_what_was_logged_of_the_epoch() -> None:
    def ask(trainer: Any) -> Any:
        return {kind: plain(part) for kind, part in trainer._results.metrics(False).items()}

    hooks = ["on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end"]
    there = asked(theirs, ask, hooks=hooks)
    assert asked(ours, ask, hooks=hooks) == there and all(found["callback"] for _, found in there[1:])


def test_what_a_callback_knows_of_it() -> None:
    def run(L: Any) -> list[Any]:
        found: list[Any] = []

        class Own(L.Callback):  # type: ignore[misc, name-defined]
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                trainer._logger_connector._callback_metrics["mine"] = torch.tensor(1.0)
                trainer._logger_connector._logged_metrics.update(other=torch.tensor(2.0))

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                found.append([plain(trainer.callback_metrics), plain(trainer.logged_metrics)])

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                found.append(plain(trainer.callback_metrics))
                if trainer.current_epoch == 0:
                    trainer._logger_connector.reset_metrics()
                else:
                    trainer._logger_connector.reset_results()

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                found.append(plain(trainer.callback_metrics))

        settings = {**QUIET, "max_epochs": 2, "logger": False, "num_sanity_val_steps": 0, "callbacks": Own()}
        L.Trainer(**settings).fit(module(L), loader(10, 4))
        return found

    assert run(ours) == run(theirs)


@pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])
def test_the_end_of_a_stage(L: Any) -> None:
    trainer, made = L.Trainer(**QUIET, max_epochs=1, logger=False), module(L)
    assert trainer._results is None and trainer._active_loop is None
    with pytest.raises((RuntimeError, ConfigurationError), match=r"_evaluation_loop"):
        _ = trainer._evaluation_loop
    trainer.fit(made, loader(10, 4))
    trainer._teardown()
    assert next(made.parameters()).device.type == "cpu" and trainer._active_loop is None
    trainer.validate(made, loader(10, 4), verbose=False)


def test_the_end_of_a_stage_within_it() -> None:
    class Own(ours.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer._teardown()

    with pytest.raises(ConfigurationError, match=r"_teardown\(\) is called within fit.*should_stop"):
        ours.Trainer(**QUIET, max_epochs=1, logger=False, callbacks=Own()).fit(module(ours), loader(10, 4))
