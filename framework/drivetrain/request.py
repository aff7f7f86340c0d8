"""What the user asks of a Trainer, and what of it cannot run: refused before anything starts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden

from drivetrain import resumption, stage_data
from drivetrain.data_hooks import DataHooks
from drivetrain.declaration import refuse
from drivetrain.dependent_options import tell
from drivetrain.errors import ConfigurationError, ConflictError, RemovedHookError, WrongKindError
from drivetrain.folders import refuse_unwritable
from drivetrain.module import TrainModule

if TYPE_CHECKING:
    from drivetrain.data import DataModule
    from drivetrain.trainer import Trainer


@dataclass
class Request:
    """What the user asked of the Trainer.

    Attributes:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        module: the model.
        loaders: by ``"train"``, ``"val"``, ``"test"``, ``"predict"``; given to the call instead of by hooks.
        datamodule: where loaders come from otherwise.
        ckpt_path: ``None``, ``"best"``, ``"last"``, ``"auto"`` or a path.
        weights_only: False: trust a checkpoint file that needs more than plain data.
        verbose: show the table of metrics after an evaluation.
        keep_predictions: whether the caller wants the predictions.
    """

    stage: str
    module: TrainModule
    loaders: dict[str, Any] = field(default_factory=dict)
    datamodule: DataModule | None = None
    ckpt_path: Any = None
    verbose: bool = True
    weights_only: bool | None = None
    keep_predictions: bool = True


_STEP_OF = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_REMOVED = {
    "fit": ("training_epoch_end", "validation_epoch_end"),
    "validate": ("validation_epoch_end",),
    "test": ("test_epoch_end",),
    "predict": (),
}  # of Lightning 1, by the stage that would have called them
LOADER_OF = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


def check(trainer: Trainer, request: Request) -> None:
    """Refuse what cannot run, before anything starts."""
    module, stage = request.module, request.stage
    if not isinstance(module, TrainModule):
        raise WrongKindError(
            f"trainer.{stage} needs a TrainModule, not a {type(module).__name__}: derive the model from"
            " drivetrain.TrainModule."
        )
    name = type(module).__name__
    if stage in _STEP_OF and not is_overridden(_STEP_OF[stage], module, TrainModule):
        raise ConfigurationError(f"{name} has no {_STEP_OF[stage]}: define it to {stage}.")
    for hook in _REMOVED[stage]:
        if callable(getattr(module, hook, None)):
            raise RemovedHookError(
                f"{name} defines {hook}, which nothing calls: keep what the steps give in an attribute and use"
                f" on_{hook.replace('training', 'train')}."
            )
    taken = inspect.signature(module.training_step).parameters if stage == "fit" else {}
    lacking = "optimizer_idx" in taken and taken["optimizer_idx"].default is inspect.Parameter.empty
    if lacking and module.automatic_optimization:
        raise ConflictError(
            f"{name}.training_step takes optimizer_idx, which nothing gives: set automatic_optimization = False and"
            " step the optimizers in it, or configure one."
        )
    if stage == "fit" and not is_overridden("configure_optimizers", module, TrainModule):
        raise ConfigurationError(f"{name} has no configure_optimizers: define it and return an optimizer.")
    if request.datamodule is not None and not isinstance(request.datamodule, DataHooks):
        raise WrongKindError(
            f"datamodule is a {type(request.datamodule).__name__}, not a DataModule: pass loaders as"
            " train_dataloaders, val_dataloaders or dataloaders."
        )
    for which, given in request.loaders.items():
        _refuse_no_loader(f"{which}_dataloaders" if stage == "fit" else "dataloaders", given)
    if stage_data.loader_of(request, LOADER_OF[stage]) is None:
        which = LOADER_OF[stage]
        raise ConfigurationError(
            f"there is no data to {stage} with: pass a loader or a datamodule, or define {which}_dataloader in {name}."
        )
    plan = trainer.plan(stages=(stage,), automatic=module.automatic_optimization)
    refuse(plan, trainer.declaration)
    if trainer.meanings.tells_in_vain and (trainer.job is None or trainer.job.rank == 0):
        tell(trainer.in_vain(plan))
    if stage == "fit":
        trainer.callbacks[:] = [trainer.take_callback(callback) for callback in trainer.callbacks]
        check_needs(trainer)
    trainer.strategy.check_module(module, plan)
    if stage == "fit":
        if request.loaders.get("train") is not None:
            trainer.strategy.check_data(request.loaders["train"])
        _check_folders(trainer)
    if trainer.job is None:  # else there are workers already, of which the first looks
        resumption.before_launch(trainer, request)


def _refuse_no_loader(name: str, given: Any) -> None:
    """Whether what is given as a loader, or as several, gives batches, as far as that shows without reading."""
    several = given.values() if type(given) is dict else given if type(given) in (list, tuple) else ()
    for one in (given, *several):
        if isinstance(one, type):
            raise WrongKindError(f"{name}: {one.__name__} is a class, which gives no batches: make an object of it.")
    gives = not isinstance(given, (str, bytes)) and (hasattr(given, "__iter__") or callable(given))
    if given is not None and not gives:
        raise WrongKindError(
            f"{name}: a loader must be iterable, this one is a {type(given).__name__}: pass a DataLoader or a list of"
            " batches."
        )


def _check_folders(trainer: Trainer) -> None:
    """Where checkpoints will be written while training goes on, as far as that is known."""
    if trainer.fast_dev_run or trainer.node_rank > 0 or (trainer.job is not None and trainer.job.rank > 0):
        return
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_top_k", 0) != 0:
            folder = getattr(callback, "dirpath", None)
            refuse_unwritable(
                Path(folder) if folder else trainer.checkpoint_dir, "the folder of checkpoints", "another"
            )


_NEEDS = {
    "thaws": "freezes or thaws parameters while training runs, which strategy={} does not follow",
    "editable": "replaces weights between steps, of which strategy={} keeps parts or copies elsewhere",
}


def check_needs(trainer: Trainer) -> None:
    """What the callbacks ask of the strategy."""
    for callback in trainer.callbacks:
        for need in callback.needs:
            if not getattr(trainer.declaration.support, need):
                raise ConfigurationError(
                    f"{type(callback).__name__} {_NEEDS[need].format(trainer.strategy_name)}: use strategy=ddp, ring or"
                    " single, or leave the callback out."
                )
