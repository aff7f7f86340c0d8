"""Searches for learning rate and batch size: results are Lightning's, and the run after them is as without them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.lightning_parts.both import classifier, close, compare, loader, trainer, weights


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Both libraries collect garbage after every size; what was there before is left out of it."""
    gc.freeze()
    yield
    gc.unfreeze()


def optimizer(self: Any) -> Any:
    return torch.optim.Adam(self.parameters(), lr=self.lr)


def module_of(L: Any, **parts: Any) -> Any:
    module = classifier(L, **{"configure_optimizers": optimizer, **parts})
    module.lr = 0.05
    return module


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_lr_find(tmp_path: Path, mode: str) -> None:
    def run(L: Any) -> dict[str, Any]:
        module = module_of(L)
        before = weights(module)
        tuner = L.tuner.Tuner(trainer(L, tmp_path))
        found = tuner.lr_find(
            module,
            loader(),
            loader(9),
            num_training=25,
            max_lr=10.0 ** (2 * (mode == "exponential") - 1),
            min_lr=1e-4,
            mode=mode,
        )
        assert close(before, weights(module))
        figure = found.plot(suggest=True)
        return {
            "results": found.results,
            "suggestion": found.suggestion(),
            "other": found.suggestion(2, 3),
            "attribute": module.lr,
            "axes": [(ax.get_xscale(), ax.get_xlabel(), len(ax.lines)) for ax in figure.axes],
            "settings": (found.mode, found.lr_min, found.lr_max, found.num_training),
        }

    assert len(compare(run)["results"]["loss"]) > 2


@pytest.mark.parametrize("mode", ["exponential", "linear"])
@pytest.mark.parametrize(("first", "last"), [(0.5, 1e-3), (1e-2, 1e-2)])
def test_rates_that_fall_or_stay(tmp_path: Path, mode: str, first: float, last: float) -> None:
    def run(L: Any) -> dict[str, Any]:
        module = module_of(L)
        tuner = L.tuner.Tuner(trainer(L, tmp_path))
        found = tuner.lr_find(module, loader(44, 2), min_lr=first, max_lr=last, num_training=20, mode=mode)
        return {"results": found.results, "suggestion": found.suggestion(), "attribute": module.lr}

    assert len(compare(run)["results"]["lr"]) == 20


def test_finder_callback_trains_on_with_what_it_found(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        module, finder = module_of(L), L.callbacks.LearningRateFinder(num_training_steps=20, min_lr=1e-4)
        fit = trainer(L, tmp_path, callbacks=[finder])
        fit.fit(module, loader(), loader(9))
        return {
            "lr": module.lr,
            "rates": module.rates,
            "weights": weights(module),
            "step": fit.global_step,
            "epoch": fit.current_epoch,
            "losses": module.losses[-6:],
            "best": finder.optimal_lr.suggestion(),
        }

    compare(run)
    plain, searched = module_of(ours), module_of(ours)
    trainer(ours, tmp_path, max_epochs=2).fit(plain, loader())
    finder = ours.callbacks.LearningRateFinder(num_training_steps=15, update_attr=False)
    again = trainer(ours, tmp_path, max_epochs=2, callbacks=[finder])
    again.fit(searched, loader())
    assert close(weights(plain), weights(searched)), "the search left no trace"
    assert again.loss_curve[0][0] == 1 and len(again.loss_curve) == 12


def test_rates_searched_for_at_milestones(tmp_path: Path) -> None:
    """The recipe for finetuning: a search when an epoch begins reads what that epoch would, which is read after it."""

    def run(L: Any) -> dict[str, Any]:
        class AtMilestones(L.callbacks.LearningRateFinder):  # type: ignore[misc, name-defined]
            def on_fit_start(self, *args: Any) -> None: ...

            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch < 2:
                    self.lr_find(trainer, pl_module)
                    found.append((pl_module.lr, list(self.optimal_lr.results["loss"])))

        found: list[Any] = []
        torch.manual_seed(2)
        module, finder = module_of(L), AtMilestones(num_training_steps=16, min_lr=1e-4)
        shuffled = DataLoader(loader(40).dataset, batch_size=4, shuffle=True)
        trainer(L, tmp_path, callbacks=[finder], max_epochs=3).fit(module, shuffled)
        return {"found": found, "weights": weights(module)}

    assert len(compare(run)["found"][0][1]) > 2


def test_lr_find_under_two_workers_is_that_of_one(tmp_path: Path) -> None:
    found = []
    for strategy, devices in (("auto", 1), ("ddp", 2)):
        module = module_of(ours)
        run = trainer(ours, tmp_path, strategy=strategy, devices=devices, batch="global", precision="64-true")
        result = ours.tuner.Tuner(run).lr_find(module, loader(20), num_training=20, min_lr=1e-4)
        assert module.lr == result.suggestion()
        found.append(result.results)
        assert len(result.results["lr"]) == 20
        assert run.callbacks == [], "the Trainer is as it was"
    assert close(found[0]["lr"], found[1]["lr"])
    assert torch.allclose(torch.tensor(found[0]["loss"]), torch.tensor(found[1]["loss"]), atol=1e-12)


def sized(L: Any, limit: int | None = None, **parts: Any) -> Any:
    """A module that makes its own loaders, and is out of memory for batches above ``limit``."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        if limit is not None and len(batch[0]) > limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    make = lambda self: loader(200, self.batch_size)
    module = module_of(
        L, training_step=step, test_step=step, train_dataloader=make, test_dataloader=make, val_dataloader=make, **parts
    )
    module.batch_size, module.sizes = 2, []
    return module


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"mode": "power"}, 40),
        ({"mode": "binsearch", "margin": 0.0}, 40),
        ({"mode": "binsearch", "margin": 0.1, "init_val": 3}, 50),
        ({"mode": "power", "max_trials": 3}, None),
    ],
)
def test_scale_batch_size(tmp_path: Path, options: dict[str, Any], limit: int | None) -> None:
    def run(L: Any) -> dict[str, Any]:
        module = sized(L, limit)
        before = weights(module)
        size = L.tuner.Tuner(trainer(L, tmp_path, limit_val_batches=0)).scale_batch_size(module, **options)
        return {"size": size, "attribute": module.batch_size, "same": close(before, weights(module))}

    assert compare(run)["same"] or limit is None


def test_a_fit_after_two_searches_reads_the_same_order(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        make = lambda self: DataLoader(loader(40).dataset, self.batch_size, shuffle=True)
        module = classifier(L, train_dataloader=make, val_dataloader=lambda self: loader(8))
        module.batch_size = 2
        fit = trainer(L, tmp_path, max_epochs=2)
        search = L.tuner.Tuner(fit).scale_batch_size
        sizes = [search(module, mode=mode, steps_per_trial=2, max_trials=3) for mode in ("power", "binsearch")]
        fit.fit(module)
        return {"sizes": sizes, "weights": weights(module), "drawn": torch.rand(1)}

    compare(run)


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 1, "limit_val_batches": 1}, {"limit_val_batches": 0}])
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_trial_that_ends_the_epoch_validates(tmp_path: Path, mode: str, limits: dict[str, Any]) -> None:
    """What a validation and its loader draw is drawn in the search, too; limits are of the fit, not of a trial."""

    def run(L: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        make = lambda self: DataLoader(loader(40).dataset, self.batch_size, shuffle=True)
        validated = []
        step = lambda self, batch, batch_idx: validated.append((len(batch[0]), torch.rand(1).item()))
        module = classifier(L, train_dataloader=make, val_dataloader=make, validation_step=step)
        module.batch_size = 4
        fit = trainer(L, tmp_path, max_epochs=2, **limits)
        size = L.tuner.Tuner(fit).scale_batch_size(module, mode=mode, init_val=4, max_trials=4)
        fit.fit(module)
        return {"size": size, "validated": validated, "weights": weights(module), "drawn": torch.rand(1)}

    assert len(compare(run)["validated"]) > 4


@pytest.mark.parametrize("trials", [3, 5, 25])
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_after_batches_that_were_too_large_all_goes_on_alike(tmp_path: Path, mode: str, trials: int) -> None:
    """A bisection counts the trials that fit, and the trial that did not draws what it draws under Lightning."""

    def run(L: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        make = lambda self: DataLoader(loader(60).dataset, self.batch_size, shuffle=True)
        module = classifier(L, train_dataloader=make, val_dataloader=lambda self: loader(8))
        module.batch_size, plain = 4, module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 13:
                raise RuntimeError("CUDA out of memory.")
            return plain(batch, batch_idx)

        module.training_step = training_step
        fit = trainer(L, tmp_path, max_epochs=2)
        size = L.tuner.Tuner(fit).scale_batch_size(module, mode=mode, init_val=4, steps_per_trial=2, max_trials=trials)
        fit.fit(module)
        return {"size": size, "weights": weights(module), "drawn": torch.rand(1)}

    compare(run)


def test_batch_size_finder_as_a_callback(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        module, finder = sized(L, 40), L.callbacks.BatchSizeFinder(steps_per_trial=2)
        trainer(L, tmp_path, callbacks=[finder], max_epochs=1, limit_val_batches=0).fit(module)
        tested = sized(L, 20)
        test = L.callbacks.BatchSizeFinder()
        trainer(L, tmp_path, callbacks=[test]).test(tested, verbose=False)
        return {
            "found": (finder.optimal_batch_size, test.optimal_batch_size),
            "trained": module.sizes[-7:],
        }

    assert compare(run)["found"] == (32, 16)
    with pytest.raises(ConfigurationError, match="loaders passed to fit"):
        trainer(ours, tmp_path, callbacks=[ours.callbacks.BatchSizeFinder()]).fit(sized(ours), loader())
    with pytest.raises(ConfigurationError, match="neither Module nor a data module has 'size'"):
        trainer(ours, tmp_path, callbacks=[ours.callbacks.BatchSizeFinder(batch_arg_name="size")]).fit(sized(ours))
    with pytest.raises(ConfigurationError, match="not even batches of 1"):
        trainer(ours, tmp_path, callbacks=[ours.callbacks.BatchSizeFinder()]).fit(sized(ours, 0))


def test_batch_size_that_fits_on_all_workers(tmp_path: Path) -> None:
    """One worker has less memory than the other: both take the size that fits there, and train with it."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and len(batch[0]) > 11:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    module = sized(ours)
    type(module).training_step = step
    run = trainer(ours, tmp_path, strategy="ddp", devices=2, max_epochs=1)
    assert ours.tuner.Tuner(run).scale_batch_size(module, mode="binsearch", margin=0.0) == 11
    assert module.batch_size == 11


def test_wrong_use_is_named(tmp_path: Path) -> None:
    tuner = ours.tuner.Tuner(trainer(ours, tmp_path, callbacks=[ours.callbacks.LearningRateFinder()]))
    with pytest.raises(ConfigurationError, match="has a LearningRateFinder among its callbacks"):
        tuner.lr_find(module_of(ours), loader())
    tuner = ours.tuner.Tuner(trainer(ours, tmp_path))
    with pytest.raises(ConfigurationError, match="method='tst'"):
        tuner.scale_batch_size(sized(ours), method="tst")
    with pytest.raises(ConfigurationError, match="has no lr or learning_rate"):
        tuner.lr_find(classifier(ours), loader())
    with pytest.raises(ConfigurationError, match="given as train_dataloaders"):
        tuner.lr_find(module_of(ours), dataloaders=loader())
