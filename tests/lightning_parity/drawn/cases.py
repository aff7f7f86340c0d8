"""Draws in which a difference was found once, made as small as they go; under what they are about."""

from __future__ import annotations

from typing import Any

_ON_EPOCH = {"on_step": False, "on_epoch": True}

CASES: dict[str, dict[str, Any]] = {
    "a metric object that is logged in the first epoch only": {
        "train": {},
        "logs": [{"hook": "on_train_start", "name": "m0", "value": "metric_mean"}],
        "trainer": {"max_epochs": 2},
    },
    "a metric object that is logged in one of two loaders": {
        "val": {"parts": [{"n": 2, "batch": 2}, {"n": 8, "batch": 3}]},
        "logs": [{"hook": "validation_step", "name": "m0", "value": "metric_sum", "every": 2}],
        "calls": [{"do": "validate"}, {"do": "validate"}],
    },
    "numbers of batches of loaders that are read at once": {
        "train": {},
        "val": {"parts": [{"n": 5, "batch": 1}, {"n": 4, "batch": 1}], "mode": "min_size"},
        "trainer": {"limit_val_batches": 1},
    },
    "a last checkpoint of another callback than the first": {
        "train": {},
        "test": {},
        "callbacks": [
            {"kind": "ModelCheckpoint", "options": {"dirpath": "a", "every_n_train_steps": 3}},
            {"kind": "ModelCheckpoint", "options": {"dirpath": "b", "save_top_k": 0, "save_last": True}},
        ],
        "calls": [{"do": "fit"}, {"do": "test", "ckpt": "last"}],
    },
    "a prediction of no batch": {
        "predict": {},
        "calls": [{"do": "predict"}],
        "trainer": {"limit_predict_batches": 0},
    },
    "a prediction with drop_last": {
        "predict": {"n": 10, "batch": 3, "drop_last": True, "shuffle": True},
        "calls": [{"do": "predict"}],
    },
    "a prediction of a stream with drop_last": {
        "predict": {"n": 10, "batch": 3, "drop_last": True, "kind": "sized"},
        "calls": [{"do": "predict"}],
    },
    "results of what loggers do not get": {
        "val": {},
        "logs": [
            {"hook": "validation_step", "name": "val"},
            {"hook": "validation_step", "name": "hidden", "options": {"logger": False}},
        ],
        "calls": [{"do": "validate"}],
    },
    "the same options in other words": {
        "train": {},
        "logs": [
            {"hook": "training_step", "name": "loss", "options": {"on_step": True, "on_epoch": False}},
            {"hook": "training_step", "name": "loss", "options": {"reduce_fx": "torch.mean"}},
        ],
    },
    "a value that is refused, under a name that is there": {
        "val": {},
        "logs": [
            {"hook": "validation_step", "name": "val", "options": {"on_epoch": True}},
            {"hook": "on_validation_batch_end", "name": "val", "value": "many", "options": {"on_epoch": True}},
        ],
        "calls": [{"do": "validate"}],
    },
    "one name of a step and of an epoch's end": {
        "train": {},
        "logs": [
            {"hook": "training_step", "name": "loss", "options": {"on_epoch": True}},
            {"hook": "on_train_epoch_end", "name": "loss", "value": "int", "options": _ON_EPOCH},
        ],
    },
    "one name that is hidden from loggers in validation": {
        "train": {},
        "val": {},
        "logs": [
            {"hook": "training_step", "name": "loss"},
            {"hook": "on_validation_start", "name": "loss", "options": {**_ON_EPOCH, "logger": False}},
        ],
    },
    "validation after so many batches, of which one was skipped": {
        "train": {"n": 16, "batch": 5},
        "val": {},
        "acts": [{"do": "skip", "hook": "on_train_batch_start", "at": 2}],
        "trainer": {"max_epochs": 3, "check_val_every_n_epoch": None, "val_check_interval": 3},
    },
    "stopping early by the training loss where not every epoch is validated": {
        "train": {"n": 9, "batch": 3},
        "val": {},
        "callbacks": [{"kind": "EarlyStopping", "options": {"monitor": "loss", "min_delta": 0.2}}],
        "logs": [{"hook": "on_after_backward", "name": "loss"}],
        "trainer": {"max_epochs": 3, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    },
    "a wish to stop where no steps are to be logged": {
        "train": {},
        "logs": [{"hook": "training_step", "name": "loss"}],
        "acts": [{"do": "stop", "hook": "training_step", "at": 1}],
        "trainer": {"log_every_n_steps": 0},
    },
    "what training began with, in the first hooks": {
        "train": {},
        "logs": [{"hook": "on_train_start", "name": "m0"}],
        "acts": [{"do": "look", "hook": "on_train_epoch_start"}, {"do": "look", "hook": "training_step"}],
    },
    "steps of validation whose loaders are asked for again": {
        "train": {},
        "val": {},
        "logs": [{"hook": "validation_step", "name": "val", "options": {"on_step": True}}],
        "trainer": {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
    },
    "the path of a checkpoint of an earlier call": {
        "train": {},
        "test": {},
        "predict": {},
        "calls": [{"do": "fit"}, {"do": "test", "ckpt": "best"}, {"do": "predict"}],
    },
}
