"""What projects read and do from one stage to the next, and what they see of the Trainer's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.lightning_parts.both import classifier, compare, loader, trainer, weights

BOTH = pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])


def numbers(values: Any) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_fit_and_the_test_of_its_best_checkpoint(tmp_path: Path, weights_only: bool) -> None:
    """The checkpointing callback is the module's own, and so made anew for the test."""

    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []
        data_seen: list[Any] = []

        class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
            def __init__(self, size: int = 4) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.fits = 0

            def setup(self, stage: Any) -> None:
                data_seen.append((f"{stage}", stage.value, stage == "fit"))

            def train_dataloader(self) -> Any:
                self.fits += 1
                return loader(16, self.hparams["size"])

            def val_dataloader(self) -> Any:
                return loader(8)

            test_dataloader = val_dataloader

            def state_dict(self) -> dict[str, Any]:
                return {"fits": self.fits}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                data_seen.append(state_dict)

        class Told(L.Callback):  # type: ignore[misc, name-defined]
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                seen.append((str(stage), numbers(trainer.callback_metrics)))

            def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
                seen.append(("loads", numbers(trainer.callback_metrics)))

            def on_test_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append(("tests", numbers(trainer.callback_metrics)))

        def callbacks(self: Any) -> Any:
            folder = tmp_path / L.__name__
            return L.callbacks.ModelCheckpoint(folder, "{epoch}", "val", save_weights_only=weights_only)

        def test_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("test", self(batch[0]).sum())

        module = classifier(L, configure_callbacks=callbacks, test_step=test_step)
        fit = trainer(L, tmp_path, callbacks=[Told()], enable_checkpointing=True, max_epochs=2)
        fit.fit(module, datamodule=Data())
        path = fit.checkpoint_callback.best_model_path
        file = torch.load(path, weights_only=False)
        kept = {key: file.get(key) for key in ("Data", "datamodule_hyper_parameters", "datamodule_hparams_name")}
        kept["Data"] = file.get(Data.__qualname__)
        result = fit.test(module, datamodule=Data(), ckpt_path="best", verbose=False)
        return {
            "seen": seen,
            "data": data_seen,
            "kept": kept,
            "result": result,
            "file": Path(path).name,
            "path": fit.ckpt_path == path,
        }

    found = compare(run)
    assert any(what[0] == "loads" for what in found["seen"] if isinstance(what, tuple)) is not weights_only
    assert found["kept"]["datamodule_hyper_parameters"] == {"size": 4} and found["path"]


@BOTH
def test_what_cannot_be_gone_on_from(tmp_path: Path, L: Any) -> None:
    """By the kinds of errors that projects catch."""
    fit = trainer(L, tmp_path, max_epochs=3, enable_checkpointing=True)
    fit.fit(classifier(L), loader(8))
    path = fit.checkpoint_callback.best_model_path
    with pytest.raises(L.utilities.exceptions.MisconfigurationException, match="max_epochs=1"):
        trainer(L, tmp_path, max_epochs=1).fit(classifier(L), loader(8), ckpt_path=path)
    finished = trainer(L, tmp_path, max_epochs=3)
    finished.fit(classifier(L), loader(8), ckpt_path=path)
    assert finished.global_step == 6 and finished.current_epoch == 3
    with pytest.raises(FileNotFoundError):
        finished.fit(classifier(L), loader(8), ckpt_path=str(tmp_path / "none.ckpt"))

    class Wider(type(classifier(L))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(5, 3)

    with pytest.raises(RuntimeError, match=r"head\.weight"):
        Wider.load_from_checkpoint(path)
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        trainer(L, tmp_path).validate(Wider(), loader(8), ckpt_path=path)


@pytest.mark.parametrize(
    "options",
    [
        {"overfit_batches": 2},
        {"overfit_batches": 0.5, "limit_val_batches": 1},
        {"num_sanity_val_steps": -1},
        {"val_check_interval": 0.5},
        {"val_check_interval": 2, "limit_train_batches": 3},
        {"check_val_every_n_epoch": None, "val_check_interval": 3},
    ],
    ids=str,
)
def test_limits_as_they_are_read(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Own(L.loggers.logger.Logger):  # type: ignore[misc, name-defined]
            name, version, save_dir = "own", 0, "somewhere"

            def log_metrics(self, metrics: Any, step: Any) -> None: ...

            def log_hyperparams(self, params: Any) -> None: ...

        fit, module = trainer(L, tmp_path, **{"max_epochs": 2, "logger": Own(), **options}), classifier(L)
        fit.fit(module, loader(16), loader(8, 2))
        names = "limit_train_batches limit_val_batches val_check_batch num_sanity_val_steps num_sanity_val_batches"
        found = {name: getattr(fit, name) for name in names.split()}
        return {**found, "log_dir": fit.log_dir, "losses": module.losses}

    compare(run)


def test_a_schedule_of_accumulation_is_seen_after_the_fit_and_begins_again(tmp_path: Path) -> None:
    schedule = ours.callbacks.GradientAccumulationScheduler({1: 4})
    fit = trainer(ours, tmp_path, max_epochs=2, callbacks=[schedule])
    fit.fit(classifier(ours), loader(16))
    assert fit.accumulate_grad_batches == 4 and fit.global_step == 5
    fit.fit_loop.max_epochs = 3
    fit.fit(classifier(ours), loader(16))
    assert fit.global_step == 6
    with pytest.raises(ConfigurationError, match="goes against"):
        trainer(ours, tmp_path, accumulate_grad_batches=2, callbacks=[schedule]).fit(classifier(ours), loader(16))


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("limit", [0.5, 5])
def test_a_limit_is_of_what_several_loaders_give_together(tmp_path: Path, mode: str, limit: int | float) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            seen.append({name: None if part is None else part[0].flatten().tolist() for name, part in batch.items()})
            return self(torch.ones(1, 3)).sum()

        def loaders() -> Any:
            rows = {"short": range(4), "long": range(10, 21)}
            data = {name: TensorDataset(torch.tensor(list(row))) for name, row in rows.items()}
            return {name: DataLoader(part, batch_size=1, shuffle=name == "long") for name, part in data.items()}

        torch.manual_seed(2)
        combined = L.utilities.combined_loader.CombinedLoader
        module = classifier(L, training_step=training_step)
        fit = trainer(L, tmp_path, limit_train_batches=limit, limit_val_batches=limit, max_epochs=2)
        fit.fit(module, combined(loaders(), mode))
        return {"seen": seen, "batches": fit.num_training_batches, "weights": weights(module)}

    found = compare(run)
    if (mode, limit) == ("max_size_cycle", 0.5):
        assert [batch["short"] for batch in found["seen"][:5]] == [[0], [1], [2], [3], [0]]


def test_a_bar_of_ones_own_knows_the_loader_at_hand(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []

        class Bar(L.callbacks.ProgressBar):  # type: ignore[misc, name-defined]
            is_enabled = True

            def disable(self) -> None: ...

            def enable(self) -> None: ...

            def on_validation_batch_start(
                self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
            ) -> None:
                fresh = self.has_dataloader_changed(dataloader_idx)
                seen.append((fresh, batch_idx, dataloader_idx, self.total_val_batches_current_dataloader))

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                self.reset_dataloader_idx_tracker()

            def on_predict_batch_start(
                self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
            ) -> None:
                self.has_dataloader_changed(dataloader_idx)
                seen.append((batch_idx, self.total_predict_batches_current_dataloader))

        def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        options = {"enable_progress_bar": True, "num_sanity_val_steps": 1, "max_epochs": 2}
        fit, module = trainer(L, tmp_path, callbacks=[Bar()], **options), classifier(L, validation_step=validation_step)
        fit.fit(module, loader(8), [loader(8), loader(12)])
        fit.predict(module, [loader(8), loader(4)])
        return {"seen": seen}

    compare(run)


def test_a_state_that_a_test_never_made_is_not_asked_for_in_vain(tmp_path: Path) -> None:
    """As the averages of schnetpack's callback, which it makes where a fit begins."""

    class Average(ours.Callback):
        average: Any = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.average = torch.optim.swa_utils.AveragedModel(pl_module.net)

        def state_dict(self) -> dict[str, Any]:
            return {"average": self.average.state_dict()}

    run = trainer(ours, tmp_path, strategy="ddp", devices=2, callbacks=[Average()])
    (found,) = run.test(classifier(ours, test_step=lambda self, batch, batch_idx: self.log("seen", 1.0)), loader())
    assert found == {"seen": 1.0}


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_the_last_checkpoint_where_there_is_none_is_the_weights_at_hand(tmp_path: Path, stage: str) -> None:
    """As CAREamics predicts with a module that it read itself."""

    def run(L: Any) -> dict[str, Any]:
        alone = trainer(L, tmp_path / L.__name__)
        with pytest.warns(UserWarning, match="there is no (last )?checkpoint"):
            found = getattr(alone, stage)(classifier(L), loader(8), ckpt_path="last")
        return {"found": [list(one.values()) if isinstance(one, dict) else one.tolist() for one in found]}

    assert compare(run)["found"]


def test_a_checkpointing_callback_that_two_trainers_share(tmp_path: Path) -> None:
    """The second fit does not save the step again at which the first one ended, also where workers trained it."""

    def run(L: Any) -> dict[str, Any]:
        folder, module = tmp_path / L.__name__, classifier(L)
        saver = L.callbacks.ModelCheckpoint(folder, "{step}", "val", save_top_k=-1)
        workers = {"strategy": "ddp", "devices": 2} if L is ours else {}
        for epochs in 1, 2:
            options = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": epochs, **workers}
            trainer(L, tmp_path, **options).fit(module, loader(32 if workers else 16), loader(8))
        return {"files": sorted(path.name for path in folder.iterdir()), "saved": saver._last_global_step_saved}

    assert compare(run) == {"files": ["step=4.ckpt", "step=8.ckpt"], "saved": 8}
