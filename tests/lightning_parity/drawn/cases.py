"""Draws in which a difference was found once, made as small as they go; under what they are about."""

from __future__ import annotations

from typing import Any

from tests.lightning_parity.drawn.resumed import EACH

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
    "what is shown of batches before a further fit asks for its data": {
        "train": {},
        "val": {},
        "predict": {},
        "acts": [{"do": "look", "hook": "on_fit_start", "at": 1}, {"do": "look", "hook": "on_train_start", "at": 1}],
        "calls": [{"do": "fit"}, {"do": "more"}, {"do": "fit"}, {"do": "fit"}, {"do": "predict"}],
    },
    "what was logged in the first hook of a validation": {
        "val": {},
        "logs": [{"hook": "on_validation_start", "name": "m0"}],
        "acts": [{"do": "look", "hook": "on_validation_start"}],
        "calls": [{"do": "validate"}],
    },
    "a metric whose value is no scalar": {
        "train": {},
        "logs": [{"hook": "training_step", "name": "m0", "value": "metric_vector", "options": {"on_epoch": True}}],
    },
    "a metric object that has no value after the check before training": {
        "train": {},
        "val": {},
        "logs": [{"hook": "validation_step", "name": "m0", "value": "metric_vector"}],
        "trainer": {"check_val_every_n_epoch": 2},
    },
    "a name of two hooks of which one logs now and then": {
        "train": {},
        "val": {},
        "logs": [
            {"hook": "validation_step", "name": "val"},
            {"hook": "on_validation_batch_end", "name": "val", "every": 9},
        ],
    },
    "a schedule laid out for the length of a further fit": {
        "train": {"shuffle": True},
        "val": {"shuffle": True},
        "optim": {"schedulers": [{"kind": "planned"}]},
        "calls": [{"do": "fit"}, {"do": "more"}, {"do": "fit"}, {"do": "fit"}],
    },
    "the version after one that wrote nothing": {
        "train": {},
        "logs": [{"hook": "training_step", "name": "loss", "options": {"on_epoch": True}}],
        "calls": [{"do": "fit"}, {"do": "fit", "new": True, "trainer": {"max_epochs": 1}}],
        "trainer": {"max_epochs": 0, "enable_checkpointing": False},
    },
    "a stream among loaders that are read at once": {
        "train": {"parts": [{"kind": "stream"}, {"batch": 1}], "mode": "max_size", "keys": True},
        "val": {"parts": [{"kind": "stream"}, {"batch": 1}], "mode": "min_size"},
        "logs": [{"hook": "training_step", "name": "loss"}],
        "trainer": {"limit_train_batches": 10, "max_epochs": 2},
    },
    "validation in its own order where a fit would read in order": {
        "val": {"shuffle": True},
        "calls": [{"do": "validate"}],
        "trainer": {"overfit_batches": 0.5},
    },
    "zeroed gradients of a batch without a loss": {
        "train": {},
        "step": {"none_every": 2},
        "optim": {"kind": "momentum"},
        "hooks": ["optimizer_zero_grad"],
    },
    "accumulation of a module that steps by hand and is only validated": {
        "val": {},
        "step": {"manual": True},
        "calls": [{"do": "validate"}],
        "trainer": {"accumulate_grad_batches": 2},
    },
    "other ranks than before have a part in a value": {
        "train": {},
        "logs": [
            {"hook": "training_step", "name": "loss", "options": {"rank_zero_only": True}},
            {"hook": "training_step", "name": "loss"},
        ],
    },
    "a metric object under the name of a number": {
        "train": {},
        "logs": [
            {"hook": "training_step", "name": "loss"},
            {"hook": "training_step", "name": "loss", "value": "metric_max"},
        ],
    },
    "a plateau of the steps' losses that reads after a validation": {
        "train": {"n": 3},
        "val": {},
        "optim": {"schedulers": [{"kind": "plateau", "options": {"interval": "step", "monitor": "loss"}}]},
        "logs": [{"hook": "training_step", "name": "loss", "options": {"on_epoch": True}}],
    },
    "an epoch that ended before its first step": {
        "train": {},
        "logs": [{"hook": "training_step", "name": "loss", "options": {"on_epoch": True}}],
        "acts": [{"do": "skip", "hook": "on_train_batch_start", "at": 1}],
        "trainer": {"accumulate_grad_batches": 2},
    },
    "the path of a checkpoint of an earlier call": {
        "train": {},
        "test": {},
        "predict": {},
        "calls": [{"do": "fit"}, {"do": "test", "ckpt": "best"}, {"do": "predict"}],
    },
}

ON_RANKS: dict[str, dict[str, Any]] = {
    "a metric object that is logged in two loaders, before a fit and in it": {
        "train": {},
        "val": {"parts": [{"n": 4}, {"n": 12}]},
        "logs": [{"hook": "validation_step", "name": "m0", "value": "metric_sum"}],
        "calls": [{"do": "validate"}, {"do": "fit"}],
    },
    "a metric object that has no value after the check before training, whose end is looked at": {
        "train": {},
        "val": {},
        "logs": [{"hook": "validation_step", "name": "m0", "value": "metric_vector"}],
        "acts": [{"do": "raise", "hook": "on_train_batch_start"}],
        "hooks": ["on_validation_epoch_end"],
    },
    "a name of training steps and of validation, checkpoints by a step's value, a shuffled test after a fit": {
        "train": {"n": 24, "batch": 3},
        "val": {},
        "test": {"shuffle": True},
        "callbacks": [
            {
                "kind": "ModelCheckpoint",
                "options": {"monitor": "loss", "every_n_train_steps": 2, "filename": "{step}-{loss:.3f}"},
            }
        ],
        "logs": [
            {"hook": "training_step", "name": "loss", "options": {"sync_dist": True}},
            {"hook": "on_train_batch_end", "name": "val", "options": {"sync_dist": True}},
            {"hook": "validation_step", "name": "val"},
        ],
        "calls": [{"do": "fit"}, {"do": "test"}],
        "trainer": {"max_epochs": 2, "log_every_n_steps": 4},
    },
}


RESUMED: dict[str, dict[str, Any]] = {
    "after the last batch of a limit": {
        "train": {"batch": 3, "n": 18},
        "trainer": {"limit_train_batches": 3, "max_epochs": 2},
        "broken_at": 3,
    },
    "between two times of asking for loaders": {
        "train": {"batch": 4, "shuffle": True},
        "val": {"shuffle": True},
        "trainer": {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 2},
        "broken_at": 3,
    },
    "with a save that waits for a validation": {
        "train": {"batch": 5, "n": 13},
        "val": {},
        "callbacks": [
            {
                "kind": "ModelCheckpoint",
                "options": {"monitor": "step", "save_top_k": 3, "every_n_train_steps": 3, "dirpath": "ranked"},
            }
        ],
        "trainer": {"val_check_interval": 2, "max_epochs": 2},
        "broken_at": 3,
    },
    "at an epoch's end that metric objects have to come to": {
        "train": {},
        "logs": [{"hook": "training_step", "name": "m0", "value": "metric_sum", "options": {"on_epoch": True}}],
        "trainer": {"max_epochs": 2},
        "broken_at": 4,
    },
    "among validations whose steps are written": {
        "train": {},
        "val": {},
        "logs": [{"hook": "validation_step", "name": "val", "options": {"on_step": True}}],
        "trainer": {"max_epochs": 2, "val_check_interval": 1},
        "broken_at": 3,
    },
    "in an epoch whose sums somebody looks at when it is entered": {
        "train": {},
        "val": {},
        "callbacks": [
            {"kind": "ModelCheckpoint", "options": {"dirpath": "ranked", "monitor": "loss"}},
            {"kind": "LearningRateMonitor"},
        ],
        "logs": [{"hook": "training_step", "name": "loss", "options": {"on_step": False, "on_epoch": True}}],
        "trainer": {"max_epochs": 3, "check_val_every_n_epoch": 3},
        "broken_at": 10,
    },
}
RESUMED_ON_RANKS: dict[str, dict[str, Any]] = {
    "before the validation's shuffled data is asked for": {
        "train": {"n": 12, "shuffle": True},
        "val": {"n": 12, "shuffle": True},
        "logs": [{"hook": "validation_step", "name": "val"}],
        "trainer": {"max_epochs": 2, "limit_val_batches": 1},
        "broken_at": 2,
    },
}
for _case in [*RESUMED.values(), *RESUMED_ON_RANKS.values()]:
    _case["by_step"] = True
    _case["callbacks"] = [*_case.get("callbacks", ()), EACH]
