"""metrics.csv: columns that come later, resumed files, rows cut short, version folders, hparams.yaml."""

from __future__ import annotations

import csv
import multiprocessing
import os
import pickle
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from drivetrain_plugins.loggers.csv import CSVLogger
from drivetrain_plugins.loggers.parameters import flatten, plain
from tests.patience import LIMIT
from tests.runs import loader, train


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_new_columns_rewrite_the_header_and_keep_the_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": torch.tensor(0.5)}, step=1)
    logger.log_metrics({"loss": 0.25, "val/acc, top 1": 0.75}, step=2)
    logger.log_metrics({"loss": 0.125}, step=3)
    assert read(tmp_path / "run" / "version_0" / "metrics.csv") == [
        {"step": "1", "loss": "0.5", "val/acc, top 1": ""},
        {"step": "2", "loss": "0.25", "val/acc, top 1": "0.75"},
        {"step": "3", "loss": "0.125", "val/acc, top 1": ""},
    ]
    assert sorted(os.listdir(logger.log_dir)) == ["metrics.csv"]


def test_rows_wait_until_the_step_has_moved_on(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    logger.log_metrics({"a": 1.0}, step=5)
    assert not (tmp_path / "drivetrain_logs").exists(), "nothing is written before it must be"
    logger.log_metrics({"a": 2.0}, step=10)
    logger.log_metrics({"a": 3.0}, step=12)
    assert [row["a"] for row in read(logger.metrics_file_path)] == ["1.0", "2.0"]
    logger.finalize("completed")
    assert [row["a"] for row in read(logger.metrics_file_path)] == ["1.0", "2.0", "3.0"]


def test_rows_of_one_step_wait_no_longer_than_asked(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    for number in range(3):
        logger.log_metrics({"a": number})  # without a step, which then counts from the last write
        assert [row["a"] for row in read(logger.metrics_file_path)] == [str(n) for n in range(number + 1)]


def test_resumed_file_is_continued_and_a_cut_row_dropped(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=7, prefix="p")
    first.log_metrics({"a": 1.0}, step=1)
    first.save()
    with first.metrics_file_path.open("a") as file:
        file.write("2,0.33")  # what a kill in the middle of a write leaves
    second = CSVLogger(tmp_path, version=7, prefix="p")
    second.log_metrics({"b": 4.0, "a": 3.0}, step=2)
    second.save()
    assert read(second.metrics_file_path) == [
        {"step": "1", "p-a": "1.0", "p-b": ""},
        {"step": "2", "p-a": "3.0", "p-b": "4.0"},
    ]


def test_version_is_the_next_free_number(tmp_path: Path) -> None:
    for name in ("version_0", "version_9", "version_x", "version_11.bak"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert CSVLogger(tmp_path, "run").log_dir == str(tmp_path / "run" / "version_10")
    assert CSVLogger(tmp_path, "new").version == 0
    assert CSVLogger(tmp_path, "", version="").log_dir == f"{tmp_path}/"
    assert CSVLogger(tmp_path, None, version="best").log_dir == str(tmp_path / "best")


def test_properties_that_a_project_overrides_name_the_folder(tmp_path: Path) -> None:
    class Dated(CSVLogger):
        name = property(lambda self: "dated")  # type: ignore[assignment]
        version = property(lambda self: "today")  # type: ignore[assignment]

    assert Dated(tmp_path).log_dir == str(tmp_path / "dated" / "today")


def test_a_project_that_parts_the_prefix_in_another_way(tmp_path: Path) -> None:
    class Slashed(CSVLogger):
        LOGGER_JOIN_CHAR = "/"
        NAME_HPARAMS_FILE = "options.yaml"

    logger = Slashed(tmp_path, version=0, prefix="run", flush_logs_every_n_steps=1)
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"loss": 1})
    assert read(logger.metrics_file_path) == [{"step": "0", "run/loss": "1"}]
    assert sorted(os.listdir(logger.log_dir)) == ["metrics.csv", "options.yaml"]


@dataclass
class Options:
    width: int = 8
    path: Path = Path("data")


PARAMS = {
    "model": OmegaConf.create({"depth": 2, "act": None}),
    "options": Options(),
    "optimizer": Namespace(lr=np.float64(0.1), betas=(0.9, torch.tensor(0.5))),
    "dtype": torch.float16,
    "loss": torch.nn.CrossEntropyLoss,
    "flag": True,
    "empty": {},
}


def test_hyperparameters(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version="v")
    logger.log_hyperparams(PARAMS)  # written at once
    written = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
    assert written == plain(PARAMS)
    assert written["model"] == {"depth": 2, "act": None}
    assert written["optimizer"] == {"lr": 0.1, "betas": [0.9, 0.5]}
    assert flatten(PARAMS) == {
        "model/depth": 2,
        "model/act": "None",
        "options/width": 8,
        "options/path": "data",
        "optimizer/lr": 0.1,
        "optimizer/betas": "(0.9, tensor(0.5000))",
        "dtype": "torch.float16",
        "loss": "<class 'torch.nn.modules.loss.CrossEntropyLoss'>",
        "flag": True,
        "empty": "{}",
    }


def test_holds_no_file_over_a_fork_and_pickles(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0, flush_logs_every_n_steps=1)
    logger.log_metrics({"a": 1.0}, step=1)
    child = multiprocessing.get_context("fork").Process(target=_log_and_close, args=(logger,))
    child.start()
    child.join(LIMIT)
    child.kill()
    child.join()
    assert child.exitcode == 0
    copy = pickle.loads(pickle.dumps(logger))
    copy.log_metrics({"a": 3.0}, step=3)
    assert [row["a"] for row in read(copy.metrics_file_path)] == ["1.0", "2.0", "3.0"]


def _log_and_close(logger: CSVLogger) -> None:
    logger.log_metrics({"a": 2.0}, step=2)
    logger.finalize("completed")


def test_numbers_that_python_has_none_for_are_text() -> None:
    params = {"wide": np.longdouble(0.5), "absent": torch.zeros(1, device="meta"), "half": np.float32(0.5)}
    for found in (flatten(params), plain(params)):
        assert found["wide"] == "0.5" and "meta" in str(found["absent"]) and found["half"] == 0.5


def test_references_to_what_is_not_there_are_as_written() -> None:
    config = OmegaConf.create({"width": 8, "twice": "${width}", "lost": "${oc.env:NOT_SET_ANYWHERE}", "list": ["${a}"]})
    assert flatten(config) == {"width": 8, "twice": 8, "lost": "${oc.env:NOT_SET_ANYWHERE}", "list": "['${a}']"}
    written = OmegaConf.to_container(config)
    assert plain(config) == written and plain({"config": config}) == {"config": written}


def test_rows_are_those_of_one_process_where_the_first_rank_logs_nothing(tmp_path: Path) -> None:
    """A pipeline's last rank logs; an epoch's row has what belongs to the epoch, not the last step's value beside."""
    rows = {}
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        logger = CSVLogger(tmp_path / strategy)
        train(strategy=strategy, devices=devices, logger=logger, log_every_n_steps=3, validation=loader(23, 5, False))
        rows[strategy] = [{k: float(v) for k, v in row.items() if v} for row in read(logger.metrics_file_path)]
    assert [row.keys() for row in rows["pipeline"]] == [row.keys() for row in rows["single"]]
    for one, other in zip(rows["pipeline"], rows["single"], strict=True):
        assert one == pytest.approx(other, abs=1e-10)
    assert any("train/loss_step" in row for row in rows["single"])
