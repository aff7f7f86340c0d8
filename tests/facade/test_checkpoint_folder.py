"""Where checkpoints go by default, by the first logger: the same path as under Lightning, relative where that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel as TheirModel

import drivetrain.lightning as L
from drivetrain.lightning.demos.boring_classes import BoringModel as MyModel
from tests.facade.recorder import QUIET

LOGGERS: list[tuple[str, dict[str, Any]]] = [
    ("CSVLogger", {"save_dir": "", "name": "runs"}),  # "" is the folder that the script runs in
    ("TensorBoardLogger", {"save_dir": "", "name": "runs"}),
    ("CSVLogger", {"save_dir": "", "name": ""}),
    ("CSVLogger", {"save_dir": ".", "name": "runs"}),
    ("CSVLogger", {"save_dir": "logs", "name": "runs", "version": "first"}),
]


@pytest.mark.parametrize(("logger", "given"), LOGGERS)
def test_the_default_folder_is_lightnings(
    logger: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for name, library, model in (("theirs", lightning.pytorch, TheirModel()), ("mine", L, MyModel())):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        options = {key: value for key, value in QUIET.items() if key not in ("logger", "enable_checkpointing")}
        trainer = library.Trainer(
            **options, max_steps=2, limit_val_batches=0, logger=getattr(library.loggers, logger)(**given)
        )
        trainer.fit(model)
        kept = trainer.checkpoint_callback
        assert (tmp_path / name / kept.best_model_path).is_file()
        said.append((str(kept.dirpath), kept.best_model_path))
    assert said[1] == said[0]


def test_no_folder_at_all_is_the_one_that_the_script_runs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``os.path.dirname(__file__)`` gives it to a script that lies there."""
    said = []
    for name, library, model in (("theirs", lightning.pytorch, TheirModel()), ("mine", L, MyModel())):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        kept = library.callbacks.ModelCheckpoint(dirpath="", filename="best", save_last=True)
        options = {key: value for key, value in QUIET.items() if key != "enable_checkpointing"}
        library.Trainer(**options, max_epochs=2, limit_train_batches=2, limit_val_batches=0, callbacks=[kept]).fit(
            model
        )
        files = sorted(file.name for file in (tmp_path / name).iterdir())
        said.append((kept.dirpath, kept.best_model_path, kept.last_model_path, files))
    assert said[1] == said[0]
    assert {"best.ckpt", "last.ckpt"} <= set(said[1][-1])
