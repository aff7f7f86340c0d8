"""ModelCheckpoint and EarlyStopping in real runs: the same files, best paths, scores and counters as Lightning's."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain.lightning.callbacks.early_stopping import EarlyStoppingReason
from tests.runs import QUIET

VALUES = [0.5, 0.3, 0.4, 0.2, 0.6, 0.1, 0.7, 0.05]
MODULES: dict[str, Any] = {}


class Body:
    """Logs the values it is given, whatever it trains."""

    def __init__(self: Any, values: list[float]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.values, self.validations = values, 0

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", 1.0 / (1 + self.global_step), on_step=True, on_epoch=True)
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        value = self.values[min(self.validations, len(self.values) - 1)]
        self.log("val/loss", value)
        self.log("acc", 1 - value)

    def on_validation_epoch_end(self: Any) -> None:
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


for library in (lightning, ours):
    MODULES[library.__name__] = type("Module", (Body, library.LightningModule), {})


def data(samples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 2)), batch_size=2)


def fit(library: Any, root: Path, callbacks: list[Any], values: Any = None, resume: Any = None, **options: Any) -> Any:
    settings = {**QUIET, "enable_checkpointing": None, "log_every_n_steps": 1, "max_epochs": 3, **options}
    trainer = library.Trainer(default_root_dir=root, callbacks=callbacks, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(MODULES[library.__name__](VALUES if values is None else values), data(8), data(4), ckpt_path=resume)
    return trainer


def files(root: Path) -> list[str]:
    """Every file under ``root``, and where links lead; not what loggers write."""
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            text = f"{path.relative_to(root)}{'@' + os.readlink(path) if path.is_symlink() else ''}"
            found += [] if "tfevents" in name or name == "hparams.yaml" else [text]
    return sorted(found)


def plain(value: Any, root: Path) -> Any:
    """Scores as numbers, paths without their root."""
    if isinstance(value, torch.Tensor):
        return round(float(value), 6)
    if isinstance(value, dict):
        return {plain(key, root): plain(inner, root) for key, inner in value.items()}
    return os.path.relpath(value, root) if isinstance(value, str) and os.path.isabs(value) else value


ATTRIBUTES = (
    "best_model_path",
    "best_model_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "current_score",
    "dirpath",
    "filename",
    "monitor",
    "mode",
    "save_top_k",
    "state_key",
)
STEPS: dict[str, Any] = {"every_n_train_steps": 2, "monitor": "val/loss"}
RANKED: dict[str, Any] = {"monitor": "val/loss", "save_top_k": 2}
CASES: list[tuple[Any, dict[str, Any]]] = [
    ({}, {}),
    ({"save_top_k": -1}, {}),
    ({"save_top_k": 0, "save_last": True}, {}),
    ({"monitor": "val/loss"}, {"max_epochs": 5}),
    ({**RANKED, "save_last": True, "filename": "{epoch:02d}-{val/loss:.3f}"}, {"max_epochs": 6}),
    (
        {
            **RANKED,
            "save_last": "link",
            "filename": "e{epoch}-l{val/loss:.2f}-{absent}",
            "auto_insert_metric_name": False,
        },
        {"max_epochs": 6},
    ),
    ({"monitor": "acc", "mode": "max", "save_top_k": 3, "filename": "best"}, {"max_epochs": 5}),
    ({"filename": "same", "save_top_k": -1}, {}),
    ({"filename": "same", "save_top_k": -1, "enable_version_counter": False, "save_last": True}, {}),
    ({"every_n_train_steps": 3, "save_top_k": -1, "save_last": True}, {}),
    ({**STEPS, "save_top_k": -1}, {}),
    ({**STEPS, "save_top_k": 2, "save_last": True}, {"val_check_interval": 2}),
    ({"every_n_epochs": 2, "save_top_k": -1}, {"max_epochs": 5}),
    ({"save_on_train_epoch_end": False, "monitor": "train_loss", "filename": "{train_loss:.4f}", "save_top_k": -1}, {}),
    ({"monitor": "train_loss_epoch", "filename": "{epoch}-{train_loss_epoch:.4f}-{train_loss_step:.3f}"}, {}),
    ({"train_time_interval": timedelta(0), "save_top_k": -1}, {"max_epochs": 1}),
    ({**RANKED, "save_top_k": -1}, {"val_check_interval": 0.5}),
    ({**RANKED, "save_top_k": -1}, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
    (
        [
            {"monitor": "val/loss"},
            {"every_n_train_steps": 5, "filename": "s{step}", "save_top_k": -1, "save_weights_only": True},
            {"monitor": "acc", "mode": "max", "dirpath": "other"},
        ],
        {"max_epochs": 4},
    ),
    ({"save_last": True}, {"logger": True, "max_epochs": 2}),
    ({"every_n_train_steps": 1, "save_top_k": -1}, {"accumulate_grad_batches": 2, "max_epochs": 2}),
    ({}, {"limit_val_batches": 0}),
    ({"monitor": "val/loss", "dirpath": "x", "save_last": "link"}, {"max_steps": 6, "max_epochs": -1}),
]


@pytest.mark.parametrize(("arguments", "options"), CASES)
def test_the_same_files(arguments: Any, options: dict[str, Any], tmp_path: Path) -> None:
    left = []
    for library in (lightning, ours):
        root = tmp_path / library.__name__
        callbacks = []
        for one in arguments if isinstance(arguments, list) else [arguments]:
            folder = {"dirpath": root / one["dirpath"]} if "dirpath" in one else {}
            callbacks.append(library.callbacks.ModelCheckpoint(**{**one, **folder}))
        trainer = fit(library, root, callbacks, **options)
        assert trainer.checkpoint_callback is callbacks[0]
        attributes = [{name: plain(getattr(c, name), root) for name in ATTRIBUTES} for c in callbacks]
        left.append((files(root), attributes))
    assert left[0] == left[1]
    assert left[0][0]


def test_goes_on_with_what_lightning_kept(tmp_path: Path) -> None:
    """Resumed from Lightning's file in Lightning's folder, the same checkpoints are kept as if it had gone on."""
    left = []
    for first, second in ((lightning, lightning), (lightning, ours), (ours, lightning), (ours, ours)):
        root = tmp_path / f"{first.__name__}-{second.__name__}"

        def callback(library: Any, folder: Path = root) -> Any:
            return library.callbacks.ModelCheckpoint(folder, **RANKED, save_last=True)

        fit(first, root, [callback(first)], max_epochs=3)
        kept = callback(second)
        fit(second, root, [kept], VALUES[3:], resume=root / "last.ckpt", max_epochs=6)
        left.append((files(root), {name: plain(getattr(kept, name), root) for name in ATTRIBUTES}))
    assert left[0] == left[1] == left[2] == left[3]


@pytest.mark.parametrize("library", [lightning, ours])
def test_a_finished_run_that_is_gone_on_from_leaves_its_last_checkpoint(library: Any, tmp_path: Path) -> None:
    """Nothing was trained, so there is nothing to save: the file is of the epoch that it was made in."""

    def callback() -> Any:
        return library.callbacks.ModelCheckpoint(tmp_path / "kept", **RANKED, save_last=True)

    fit(library, tmp_path, [callback()], max_epochs=3)
    path = tmp_path / "kept" / "last.ckpt"
    before, of_epoch = path.read_bytes(), torch.load(path, weights_only=False)["epoch"]
    again = fit(library, tmp_path, [callback()], resume=path, max_epochs=3)
    assert (again.current_epoch, again.global_step, of_epoch) == (3, 12, 2)
    assert path.read_bytes() == before
    sparse = library.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_epochs=9, save_last=True)
    fit(library, tmp_path, [sparse], resume=path, max_epochs=4)
    assert torch.load(tmp_path / "kept" / "last-v1.ckpt", weights_only=False)["epoch"] == 4, "what was trained is saved"


def test_names_and_the_rest_of_its_surface(tmp_path: Path) -> None:
    for library in (lightning, ours):

        class Renamed(library.callbacks.ModelCheckpoint):  # type: ignore[name-defined, misc]
            CHECKPOINT_JOIN_CHAR = "_"
            CHECKPOINT_EQUALS_CHAR = "~"
            CHECKPOINT_NAME_LAST = "{epoch}-newest"

        callback = Renamed(tmp_path / library.__name__, monitor="val/loss", save_last=True)
        assert callback.format_checkpoint_name({"epoch": 1, "step": 2}).endswith("/epoch~1_step~2.ckpt")
        assert callback.format_checkpoint_name({"epoch": 5}, "{epoch:03d}", ver=2).endswith("/epoch~005_v2.ckpt")
        assert callback.format_checkpoint_name({}, "{absent:d}", prefix="p").endswith("/p_absent~0.ckpt")
        fit(library, tmp_path, [callback])
        assert files(Path(callback.dirpath)) == ["epoch~1-newest.ckpt", "epoch~1_step~8.ckpt"]
        callback.to_yaml()
        kept = yaml.safe_load((Path(callback.dirpath) / "best_k_models.yaml").read_text())
        assert list(kept.values()) == [pytest.approx(0.3)]
    for arguments, sentence in (
        ({"mode": "best"}, "use 'min' or 'max'"),
        ({"save_top_k": -2}, "use -1 for all"),
        ({"save_top_k": 2}, "needs a monitor"),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "exclude each other"),
        ({"every_n_epochs": -1}, "use 0 or more"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            ours.callbacks.ModelCheckpoint(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"ModelCheckpoint\(monitor='val_loss'\): .*did you mean 'val/loss'"):
        fit(ours, tmp_path, [ours.callbacks.ModelCheckpoint(tmp_path / "z", monitor="val_loss")])
    with pytest.raises(ConfigurationError, match="is not a format for a number"):
        fit(ours, tmp_path, [ours.callbacks.ModelCheckpoint(tmp_path / "z", filename="{epoch:q}")])


class Parted(MODULES[ours.__name__]):  # type: ignore[misc]
    """Every rank logs a value of its own, without sync_dist."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", [0.5, 0.3, 0.4, 0.2][self.validations % 4] * (-1.0) ** self.global_rank)


def test_ranks_that_know_other_values(tmp_path: Path) -> None:
    """The first rank's metrics decide for all, so that all save together; no rank waits for one that does not save."""
    saver = ours.callbacks.ModelCheckpoint(
        tmp_path, monitor="val/loss", filename="{epoch}-{val/loss:.1f}", save_last=True
    )
    settings: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 0, "max_epochs": 4}
    trainer = ours.Trainer(**settings, strategy="ddp", devices=2, callbacks=[saver], timeout=20)
    trainer.fit(Parted(VALUES), data(8), data(8))
    assert files(tmp_path) == ["epoch=3-val/loss=0.2.ckpt", "last.ckpt"]
    assert plain(saver.best_k_models, tmp_path) == {"epoch=3-val/loss=0.2.ckpt": 0.2}


nan, inf = float("nan"), float("inf")
STOPS: list[tuple[list[float], dict[str, Any], dict[str, Any]]] = [
    ([5, 4, 3, 2, 1], {}, {}),
    ([5, 4, 4, 4, 1], {"patience": 2}, {}),
    ([5, 4, 4, 4, 1], {"patience": 0}, {}),
    ([5, 4.95, 4.9, 4.85], {"min_delta": 0.2, "patience": 2}, {}),
    ([0.1, 0.3, 0.2, 0.2], {"mode": "max", "monitor": "acc", "patience": 2}, {}),
    ([5, nan, 3], {}, {}),
    ([5, inf, 3], {"check_finite": False, "patience": 1}, {}),
    ([5, nan, nan, 3], {"check_finite": False, "patience": 3}, {}),
    ([5, 0.5, 0.1, 0], {"stopping_threshold": 0.3}, {}),
    ([5, 6, 11, 1], {"divergence_threshold": 10.0}, {}),
    ([0.9, 0.5, 0.1], {"mode": "max", "monitor": "acc", "stopping_threshold": 0.4}, {}),
    ([0.1, 0.5, 0.99], {"mode": "max", "monitor": "acc", "divergence_threshold": 0.2}, {}),
    ([5, 4, 4, 4, 1], {"check_on_train_epoch_end": True, "patience": 2}, {}),
    ([5, 4, 4, 4, 1], {"check_on_train_epoch_end": False, "patience": 2}, {}),
    ([5, 4, 4, 4, 1], {"patience": 2}, {"val_check_interval": 0.5}),
    ([5, 4, 4, 4, 1], {"patience": 2}, {"check_val_every_n_epoch": 2, "max_epochs": 8}),
    ([5, 4, 4, 4, 1], {"patience": 1}, {"min_epochs": 5, "max_epochs": 6}),
    ([5], {"monitor": "absent", "strict": False}, {}),
    ([5], {"monitor": "train_loss", "stopping_threshold": 0.2}, {}),
    ([5, 4, 4], {"patience": 1, "log_rank_zero_only": True, "verbose": True}, {}),
]


@pytest.mark.parametrize(("values", "arguments", "options"), STOPS)
def test_the_same_stop(values: list[float], arguments: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for library in (lightning, ours):
        stopping = library.callbacks.EarlyStopping(**{"monitor": "val/loss", **arguments})
        settings = {"max_epochs": len(values), "enable_checkpointing": False, **options}
        trainer = fit(library, tmp_path, [stopping], [float(v) for v in values], **settings)
        if library is ours:
            assert isinstance(stopping.stopping_reason, EarlyStoppingReason)
        found.append(
            {
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
                "wait_count": stopping.wait_count,
                "stopped_epoch": stopping.stopped_epoch,
                "best_score": pytest.approx(float(stopping.best_score), rel=1e-6),
                "patience": stopping.patience,
                "reason": stopping.stopping_reason.name,
                "message": bool(stopping.stopping_reason_message),
                "state_key": stopping.state_key,
                "state": sorted(stopping.state_dict()),
            }
        )
    assert found[0] == found[1]
