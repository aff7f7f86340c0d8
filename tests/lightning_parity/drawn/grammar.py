"""The grammar: a project as plain data, drawn by a seed. What is left out has its plainest value."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.lightning_parity.drawn.declared import outside

STEP_HOOKS = ("training_step", "validation_step", "test_step")
HOOKS_IN_TRAINING = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
)
HOOKS_OF_VALIDATION = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
HOOKS_OF_TEST = tuple(hook.replace("validation", "test") for hook in HOOKS_OF_VALIDATION)
NO_LOGGING = ("on_fit_start", "on_train_end", "on_sanity_check_start", "on_predict_start", "on_predict_batch_end")
OF_CALLBACKS = {*HOOKS_IN_TRAINING, *HOOKS_OF_VALIDATION, *HOOKS_OF_TEST, *NO_LOGGING}


class Draw:
    """A project drawn from a source of random numbers."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.spec: dict[str, Any] = {}
        self.trainer: dict[str, Any] = {}

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def put(self, where: dict[str, Any], share: float, name: str, *choices: Any) -> None:
        """With probability ``share``, one of ``choices`` under ``name``."""
        if self.often(share):
            where[name] = self.one(*choices)

    def project(self) -> dict[str, Any]:
        for part in (self.data, self.module, self.length, self.flags, self.callbacks, self.logs, self.acts, self.calls):
            part()
        self.spec["trainer"] = self.trainer
        return self.spec

    # -- data -----------------------------------------------------------------------------------------------------
    def loader(self, least: int = 2, most: int = 20) -> dict[str, Any]:
        spec: dict[str, Any] = {"n": self.random.randint(least, most), "batch": self.random.randint(1, 6)}
        self.put(spec, 0.3, "form", "pair", "dict")
        self.put(spec, 0.15, "kind", "stream", "sized")
        self.put(spec, 0.2, "drop_last", True)
        self.put(spec, 0.3, "shuffle", True)
        self.put(spec, 0.1, "collate", True)
        if spec.get("drop_last"):
            spec["batch"] = min(spec["batch"], spec["n"])
        return spec

    def several(self, stage: str) -> Any:
        spec: dict[str, Any] = {"parts": [self.loader() for _ in range(self.random.randint(2, 3))]}
        if stage == "train":
            spec["keys"] = self.one(True, False)
            self.put(spec, 0.8, "mode", "min_size", "max_size", "max_size_cycle")
        elif self.often(0.4):
            modes = ["sequential"] if stage == "predict" else ["min_size", "max_size", "max_size_cycle", "sequential"]
            spec["mode"] = self.one(*modes)
            spec["keys"] = self.one(True, False)
        return spec

    def data(self) -> None:
        spec = self.spec
        spec["train"] = self.several("train") if self.often(0.1) else self.loader(3, 24)
        if self.often(0.75):
            spec["val"] = self.several("val") if self.often(0.25) else self.loader()
        if self.often(0.3):
            spec["test"] = self.several("test") if self.often(0.3) else self.loader()
        if self.often(0.2):
            spec["predict"] = self.several("predict") if self.often(0.3) else self.loader()
        self.put(spec, 0.4, "give", "module", "datamodule")

    # -- module ---------------------------------------------------------------------------------------------------
    def module(self) -> None:
        spec = self.spec
        self.put(spec, 0.4, "net", "mlp", "norm", "dropout")
        self.put(
            *(spec, 0.25, "hparams", True),
            *("arguments", "ignore", "names", "unlogged", "namespace", "dataclass"),
        )
        step: dict[str, Any] = {}
        optim: dict[str, Any] = {}
        if self.often(0.2):
            step["manual"] = True
            self.put(optim, 0.6, "count", 2, 3)
            self.put(step, 0.3, "toggle", True)
            self.put(step, 0.3, "every", 2, 3)
            self.put(step, 0.2, "clip", True)
            self.put(step, 0.5, "returns", "dict", "tensor")
        else:
            self.put(step, 0.3, "returns", "dict")
            self.put(step, 0.12, "none_every", 1, 2, 3)
        self.put(step, 0.3, "evaluation_returns", True)
        by_hand = step.get("manual") or "none_every" in step  # LBFGS wants a loss at each look
        kinds = ("momentum", "adam", "rprop") if by_hand else ("momentum", "adam", "rprop", "lbfgs")
        self.put(optim, 0.5, "kind", *kinds)
        self.put(optim, 0.6, "form", "list", "dict", "dicts")
        self.put(optim, 0.15 if optim.get("kind") != "lbfgs" else 0, "groups", True)
        if self.often(0.5):
            optim["schedulers"] = [self.scheduler() for _ in range(optim.get("count", 1))]
        if step:
            spec["step"] = step
        if optim:
            spec["optim"] = optim
        hooks = [
            *("lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward"),
            *("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
            *("on_save_checkpoint", "on_load_checkpoint", "on_validation_model_eval", "on_validation_model_train"),
            *("on_validation_model_zero_grad", "configure_model", "prepare_data", "setup", "teardown", "on_fit_start"),
            *("on_fit_end", "on_train_start", "on_train_end", *HOOKS_IN_TRAINING, *HOOKS_OF_VALIDATION),
            *HOOKS_OF_TEST,
        ]
        if self.often(0.4):
            spec["hooks"] = sorted(set(self.random.sample(hooks, self.random.randint(1, 6))))

    def scheduler(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": self.one(
                *("step", "exponential", "cosine", "restarts", "one_cycle", "lambda", "sequential", "plateau"),
                *("plateau", "planned"),
            )
        }
        options: dict[str, Any] = {}
        self.put(options, 0.6, "interval", "step", "epoch")
        self.put(options, 0.25, "frequency", 2, 3)
        self.put(options, 0.2, "name", "rate", "lr")
        if found["kind"] == "plateau":
            options["monitor"] = self.one("loss", "loss", "val", "val", "loss_step", "loss_epoch", "missing")
            self.put(options, 0.3, "strict", False)
        if options:
            found["options"] = options
        return found

    # -- how long, how often ------------------------------------------------------------------------------------
    def length(self) -> None:
        trainer = self.trainer
        trainer["max_epochs"] = self.random.randint(1, 4) if self.often(0.97) else 0
        if self.often(0.25):
            trainer["max_steps"] = self.random.randint(1, 9)
            if self.often(0.5):
                trainer["max_epochs"] = -1
        self.put(trainer, 0.15, "min_epochs", 1, 2, 3)
        self.put(trainer, 0.1, "min_steps", 2, 5)

    def flags(self) -> None:
        trainer = self.trainer
        for stage in ("train", "val", "test", "predict"):
            self.put(trainer, 0.2, f"limit_{stage}_batches", 0, 1, 2, 3, 0.5, 0.34, 1.0, 0.0)
        if trainer.get("limit_train_batches") == 0 and self.often(0.7):
            del trainer["limit_train_batches"]
        if "val" in self.spec:  # Lightning checks its fit to the training data also where nothing is validated
            self.put(trainer, 0.35, "val_check_interval", 1, 2, 3, 4, 0.5, 0.25, 0.34, 1.0)
        self.put(trainer, 0.3, "check_val_every_n_epoch", 1, 2, 3, None)
        if trainer.get("check_val_every_n_epoch", 1) is None:
            trainer["val_check_interval"] = self.one(1, 2, 3, 5, 7)
        self.put(trainer, 0.6, "num_sanity_val_steps", 0, 1, -1)
        self.put(trainer, 0.25, "accumulate_grad_batches", 2, 3, 4)
        self.put(trainer, 0.2, "gradient_clip_val", 0.1, 0.5, 0)
        if self.spec.get("step", {}).get("manual"):  # where Lightning refuses the flag
            trainer.pop("gradient_clip_val", None)
        if trainer.get("gradient_clip_val"):
            self.put(trainer, 0.5, "gradient_clip_algorithm", "norm", "value")
        self.put(trainer, 0.7, "log_every_n_steps", 1, 2, 3, 0)
        self.put(trainer, 0.05, "overfit_batches", 1, 2, 0.5)
        self.put(trainer, 0.05, "fast_dev_run", True, 2)  # saves nothing here, save_last's file there
        self.put(trainer, 0.12, "reload_dataloaders_every_n_epochs", 1, 2)
        self.put(trainer, 0.1, "precision", "bf16-mixed", "64-true", "bf16-true", "32-true", 64, "bf16", "64")
        self.put(trainer, 0.05, "detect_anomaly", True)
        self.put(trainer, 0.1, "inference_mode", False)
        if trainer.get("accumulate_grad_batches", 1) > 1 and not self.spec.get("step", {}).get("manual"):
            self.spec.setdefault("optim", {})["kind"] = "rprop"  # a short last window differs in the gradients' scale

    # -- callbacks and loggers ------------------------------------------------------------------------------------
    def callbacks(self) -> None:
        found: list[dict[str, Any]] = []
        for _ in range(self.one(0, 0, 1, 1, 2)):
            found.append({"kind": "ModelCheckpoint", "options": self.checkpoint(len(found))})
        # Without a validation Lightning's never looks where one was to come at other moments than an epoch's end.
        plain = not {"val_check_interval", "check_val_every_n_epoch"} & {*self.trainer}
        if self.often(0.25) and ("val" in self.spec or plain):
            options: dict[str, Any] = {"monitor": self.one("loss", "val", "val", "loss_epoch", "missing")}
            self.put(options, 0.4, "mode", "max", "min")
            self.put(options, 0.6, "patience", 0, 1, 2)
            self.put(options, 0.3, "min_delta", 0.01, 0.2)
            self.put(options, 0.2, "stopping_threshold", 0.5, 2.0)
            self.put(options, 0.2, "divergence_threshold", 0.5, 2.0)
            self.put(options, 0.3, "check_on_train_epoch_end", True, False)
            self.put(options, 0.3, "strict", False)
            self.put(options, 0.2, "check_finite", False)
            found.append({"kind": "EarlyStopping", "options": options})
        if self.often(0.35):
            self.spec["loggers"] = self.one([], ["memory"], ["csv", "memory"], ["csv", "second"], ["board"])
        if self.often(0.25) and self.spec.get("loggers") != []:  # there Lightning refuses it
            options = {}
            self.put(options, 0.6, "logging_interval", "step", "epoch")
            self.put(options, 0.4, "log_momentum", True)
            if self.spec.get("optim", {}).get("kind") not in ("lbfgs", "rprop"):  # which have none: a KeyError there
                self.put(options, 0.3, "log_weight_decay", True)
            found.append({"kind": "LearningRateMonitor", "options": options})
        if self.often(0.1):
            found.append(
                {
                    "kind": "Writer",
                    "options": {"interval": self.one("batch", "epoch", "batch_and_epoch")},
                }
            )
        if self.often(0.3):
            found.append(self.trained_otherwise())
        if self.often(0.1):
            found.append({"kind": "Stateful"})
        if self.often(0.06):
            found.append({"kind": "OnExceptionCheckpoint", "options": {"dirpath": "broken"}})
        if self.often(0.08):
            more = {"kind": "EarlyStopping", "options": {"monitor": "loss", "patience": 1, "strict": False}}
            self.spec["brings"] = [self.one(more, {"kind": "Stateful"}, {"kind": "ModelCheckpoint"})]
        if found:
            self.random.shuffle(found)
            self.spec["callbacks"] = found
        self.put(self.trainer, 0.1, "enable_checkpointing", False)
        if self.trainer.get("enable_checkpointing") is False:
            self.spec["callbacks"] = [c for c in found if c["kind"] != "ModelCheckpoint"]

    def trained_otherwise(self) -> dict[str, Any]:
        """A callback that has a part in how weights change."""
        kind = self.one(
            *("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "GradientAccumulationScheduler"),
            *("LambdaCallback", "BackboneFinetuning", "ModelPruning"),
        )
        options: dict[str, Any] = {}
        if kind == "StochasticWeightAveraging":
            options = {"swa_lrs": 0.01}
            self.put(options, 0.7, "swa_epoch_start", 1, 2, 0.5)
            self.put(options, 0.3, "annealing_epochs", 1, 2)
        elif kind == "WeightAveraging":
            self.put(options, 0.5, "every", 2, 3)
            self.put(options, 0.3, "by_epoch", True)
        elif kind == "EMAWeightAveraging":
            self.put(options, 0.5, "decay", 0.5, 0.9)
            self.put(options, 0.5, "update_every_n_steps", 2, 3)
            self.put(options, 0.5, "update_starting_at_step", 2)
        elif kind == "GradientAccumulationScheduler":
            options["scheduling"] = {str(self.one(0, 1, 2)): self.one(1, 2, 3)}
            self.trainer.pop("accumulate_grad_batches", None)
            self.spec.setdefault("optim", {})["kind"] = "rprop"
        elif kind == "LambdaCallback":
            options["hooks"] = ["on_train_start", "on_train_batch_end"]
        elif kind == "BackboneFinetuning":
            self.spec["backbone"] = True
            self.spec.setdefault("optim", {})["backbone"] = False
            options = {"unfreeze_backbone_at_epoch": self.one(1, 2), "lambda_func": "double"}
            self.put(options, 0.5, "backbone_initial_lr", 0.01)
            self.put(options, 0.3, "train_bn", False)
        else:
            options = {"pruning_fn": "l1_unstructured", "amount": self.one(0.3, 1)}
            self.put(options, 0.3, "use_global_unstructured", False)
            self.put(options, 0.3, "apply_pruning", False)
            self.put(options, 0.3, "make_pruning_permanent", False)
        return {"kind": kind, "options": options}

    def checkpoint(self, number: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        self.put(options, 0.5, "dirpath", f"checkpoints{number}", "checkpoints")
        self.put(options, 0.6, "monitor", "loss", "val", "loss", "val", "loss_epoch", "epoch", "step", "missing")
        self.put(options, 0.5, "save_top_k", -1, 0, 1, 2, 3)
        if options.get("save_top_k", 1) in (2, 3) and "monitor" not in options:
            options["save_top_k"] = -1
        self.put(options, 0.3, "mode", "max", "min")
        if "fast_dev_run" not in self.trainer:
            self.put(options, 0.4, "save_last", True, "link")
        self.put(options, 0.2, "save_weights_only", True)
        self.put(options, 0.3, "save_on_train_epoch_end", True, False)
        kind = self.one("", "", "steps", "epochs")
        if kind == "steps":
            options["every_n_train_steps"] = self.random.randint(1, 4)
        elif kind == "epochs":
            options["every_n_epochs"] = self.random.randint(0, 3)
        self.put(
            *(options, 0.4, "filename"),
            *("{epoch}", "{step}-{loss:.2f}", "{epoch}-{val:.1f}", "plain", "{loss:.3f}/{epoch}", "{missing}-{step}"),
        )
        self.put(options, 0.2, "auto_insert_metric_name", False)
        self.put(options, 0.2, "enable_version_counter", False)
        return options

    # -- logging --------------------------------------------------------------------------------------------------
    def options_of_log(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for flag in ("on_step", "on_epoch"):
            self.put(options, 0.5, flag, True, False)
        if options.get("on_step") is False:  # Lightning wants to be told the rest
            options.setdefault("on_epoch", True)
        for flag in ("prog_bar", "logger"):
            self.put(options, 0.3, flag, True, False)
        self.put(options, 0.3, "reduce_fx", "mean", "max", "min", "sum", "torch.max", "torch.min", "torch.sum")
        self.put(options, 0.2, "batch_size", 1, 2, 7)
        self.put(options, 0.15, "add_dataloader_idx", False, True)
        self.put(options, 0.1, "enable_graph", True)
        self.put(options, 0.15, "sync_dist", True)
        self.put(options, 0.1, "rank_zero_only", True)
        self.put(options, 0.2, "attribute", True)
        return options

    def logs(self) -> None:
        found: list[dict[str, Any]] = []
        if self.often(0.85):
            log: dict[str, Any] = {"hook": "training_step", "name": "loss"}
            self.put(
                log, 0.7, "options", {"on_epoch": True}, {"on_step": False, "on_epoch": True}, self.options_of_log()
            )
            found.append(log)
        if self.often(0.85):
            log = {"hook": "validation_step", "name": "val"}
            self.put(log, 0.3, "options", {"on_step": True}, self.options_of_log())
            found.append(log)
        hooks = (*STEP_HOOKS, *STEP_HOOKS, *HOOKS_IN_TRAINING, *HOOKS_OF_VALIDATION, *HOOKS_OF_TEST, *NO_LOGGING)
        for number in range(self.one(0, 1, 2, 3, 4)):
            log = {"hook": self.one(*hooks), "name": self.one(f"m{number}", f"m{number}", "m0", "a/b", "loss", "val")}
            self.put(log, 0.5, "value", "float", "int", "double", "one", "many", "nan", *METRIC_VALUES)
            self.put(log, 0.7, "options", self.options_of_log())
            self.put(log, 0.2, "every", 2, 3)
            if "attribute" not in log.get("options", {}):  # which log_dict does not take
                self.put(log, 0.15, "dict", True)
            if log["hook"] in OF_CALLBACKS:
                self.put(log, 0.3, "owner", "callback")
            found.append(log)
        self.spec["logs"] = found

    # -- what happens on the way ------------------------------------------------------------------------------------
    def acts(self) -> None:
        acts: list[dict[str, Any]] = []
        hooks = (*HOOKS_IN_TRAINING, *HOOKS_OF_VALIDATION, "training_step", "validation_step", "on_fit_start")
        if self.often(0.08):
            act = {"do": "raise", "hook": self.one(*hooks), "at": self.random.randint(0, 3)}
            acts.append(act)
        if self.often(0.12):
            acts.append({"do": "stop", "hook": self.one(*hooks), "at": self.random.randint(0, 3)})
        if self.often(0.08):
            acts.append({"do": "skip", "hook": "on_train_batch_start", "at": self.random.randint(0, 4)})
        if self.often(0.03):
            to = self.random.randint(1, 3)
            acts.append({"do": "max_epochs", "hook": self.one(*hooks), "at": self.random.randint(0, 3), "to": to})
        if self.often(0.06):
            acts.append({"do": "save", "hook": self.one(*hooks), "at": self.random.randint(0, 3)})
        if self.often(0.06):
            what = self.one("freeze", "eval", "train")
            acts.append({"do": what, "hook": self.one(*hooks), "at": self.random.randint(0, 3)})
        for _ in range(self.one(0, 0, 1, 2)):
            acts.append({"do": "look", "hook": self.one(*hooks), "at": self.random.randint(0, 3)})
        for act in acts:
            if act["hook"] in OF_CALLBACKS and act["do"] != "skip":
                self.put(act, 0.3, "owner", "callback")
        if acts:
            self.spec["acts"] = acts

    # -- calls ------------------------------------------------------------------------------------------------------
    def calls(self) -> None:
        calls: list[dict[str, Any]] = [{"do": "fit"}]
        if self.often(0.1) and "val" in self.spec:
            calls.insert(0, {"do": "validate"})
        if self.often(0.25):
            calls += [{"do": "more", "epochs": self.random.randint(1, 2)}, {"do": "fit"}]
        elif self.often(0.1):
            calls.append({"do": "fit"})
        elif self.often(0.12):  # another module, or the same in the state of a checkpoint, with the same Trainer
            calls.append(self.one({"do": "load", "ckpt": "path"}, {"do": "more", "new_module": True}))
            calls.append({"do": "fit"})
        if self.often(0.1):
            calls.append({"do": "save"})
        if self.often(0.2):
            calls += [
                {"do": "save"},
                {"do": "fit", "new": True, "ckpt": "saved", "trainer": {"max_epochs": 6}},
            ]
            for name in ("shuffle", "drop_last"):
                self.spec["train"].pop(name, None)
        for stage, call in (("val", "validate"), ("test", "test"), ("predict", "predict")):
            if stage in self.spec and self.often(0.4):
                made: dict[str, Any] = {"do": call}
                kept = [c.get("options", {}) for c in self.spec.get("callbacks", ()) if c["kind"] == "ModelCheckpoint"]
                choices = ["best", "last"] if any("save_last" in options for options in kept) else ["best"]
                if {"do": "save"} in calls:
                    choices.append("saved")
                self.put(made, 0.4, "ckpt", "path", *choices)
                self.put(made, 0.2, "no_module", True)
                if call == "predict":
                    self.put(made, 0.2, "return_predictions", False, True)
                elif self.often(0.1):
                    calls.append({"do": "load", "ckpt": "path"})
                calls.append(made)
        if calls != [{"do": "fit"}]:
            self.spec["calls"] = calls


METRIC_VALUES = ("metric_mean", "metric_sum", "metric_max", "metric_vector", "metric_collection")


def draw(seed: int) -> dict[str, Any]:
    """The first project from ``seed`` on that can be compared."""
    source = random.Random(seed)
    while outside(spec := Draw(source).project()):
        pass
    return spec


Grammar = Callable[[int], dict[str, Any]]
