"""The loaders that a stage reads: where they come from, and when they are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden

from drivetrain import worker_seeds
from drivetrain.checkpoint import rng
from drivetrain.combined_source import evaluation_sources, shown, training_source
from drivetrain.data_hooks import DataHooks
from drivetrain.errors import ConfigurationError, PossibleUserWarning
from drivetrain.module import TrainModule
from drivetrain.sharding import BatchSource

if TYPE_CHECKING:
    from drivetrain.loops.evaluate import EvaluateLoop
    from drivetrain.request import Request
    from drivetrain.trainer import Trainer


def empty(which: str, source: BatchSource, loaders: int) -> str:
    """What to say of a loader of ``which`` that has no batch; whoever waits for its metrics waits in vain."""
    number = f"number {source.index} " if loaders > 1 else ""
    return f"the {which} data is empty: its loader {number}gives no batch, so nothing comes of it."


def loader_of(request: Request, which: str) -> Any:
    """The loader or the hook that makes it, or None. Where there is a data module, it makes all of them, or there is no
    such data: the module's hooks are for runs without one."""
    given = request.loaders.get(which)
    if given is not None:
        return given
    owner: Any = request.module if request.datamodule is None else request.datamodule
    name = f"{which}_dataloader"
    if name in vars(owner) or getattr(type(owner), name) is not getattr(DataHooks, name):
        return getattr(owner, name)  # None says that there is no such data
    return None


def seen_here(request: Request, which: str) -> Any:
    """What workers read, as it is made in the caller's process; None where the module makes it of its ``setup``, which
    ran in the workers."""
    made = loader_of(request, which)
    if getattr(made, "__self__", None) is request.module and is_overridden("setup", request.module, TrainModule):
        return None
    with rng.kept():
        return made() if callable(made) and not hasattr(made, "__iter__") else made


def sources(trainer: Trainer, request: Request, which: str) -> list[BatchSource]:
    """The loaders of ``which`` (``"train"``, ``"val"``, ``"test"``, ``"predict"``) as this rank reads them."""
    made = loader_of(request, which)
    loaders = made() if callable(made) and not hasattr(made, "__iter__") else made
    worker_seeds.add_to(loaders, trainer.global_rank)
    found = sources_of(trainer, loaders, which, trainer.limits[which], trainer.use_distributed_sampler)
    if which != "train":
        trainer._given[which] = shown(loaders, found)
    return found


def sources_of(
    trainer: Trainer, loaders: Any, which: str, limit: int | float | None, reshard: bool
) -> list[BatchSource]:
    """These ``loaders`` as this rank reads them, each by a part of it where they are to be split (``reshard``)."""
    seed = trainer.data_seed
    order = trainer.meanings.order
    if order == "torch" and trainer.strategy_name != "single":
        order = "sampler"  # on one device, too: the order of a distributed strategy doesn't change with their number
    make = _training_sources if which == "train" else evaluation_sources
    found = make(
        loaders,
        shard=trainer.strategy.data,
        mode=trainer.batch,
        seed=seed,
        training=which == "train",
        limit=limit,
        reshard=reshard,
        in_order=bool(trainer.overfit_batches) and trainer.stage == "fit",
        order=order,
        numbers=which == "predict",
    )
    if trainer.strategy.trains and (which == "train" or trainer.strategy.data.lockstep):
        gather = trainer.strategy.communicator.all_gather_plain
        for source in found:
            source.agree_on_length(gather([source.full_length, source.length]))
    for source in found:
        if source.full_length == 0:
            if which == "train":
                raise ConfigurationError("the train data is empty: its loader gives no batch.")
            if trainer.is_global_zero:
                warnings.warn(empty(which, source, len(found)), stacklevel=2)
        if which != "train" and source.drawn and trainer.is_global_zero:
            warnings.warn(f"the {which} data is shuffled: leave it in order.", PossibleUserWarning, stacklevel=2)
    if trainer.instruments is not None:
        for source in found:
            trainer.instruments.of_source(source, which)
    return found


def nothing_to_read(trainer: Trainer, sources: list[BatchSource]) -> bool:
    """Whether no loader of any rank has a batch, so that Lightning passes over the stage. Every rank calls it: where
    ranks have loaders of their own, one without a batch goes along with those that have some."""
    nothing = all(source.full_length == 0 for source in sources)
    communicator = trainer.strategy.communicator
    return nothing if communicator.world_size == 1 else all(communicator.all_gather_plain(nothing))


def _training_sources(loaders: Any, **options: Any) -> list[BatchSource]:
    return [training_source(loaders, **options)]


def training(trainer: Trainer) -> BatchSource:
    """The training data of the fit at hand, asked for at the first call."""
    if trainer.train_source is None:
        assert trainer.request is not None
        trainer.train_source = sources(trainer, trainer.request, "train")[0]
        trainer.strategy.check_data(trainer.train_source.loader)
        trainer.val_check_batch = _validation_interval(trainer)
        _tell_of_rare_logs(trainer)
    return trainer.train_source


def _tell_of_rare_logs(trainer: Trainer) -> None:
    every, batches = trainer.log_every_n_steps, trainer.num_training_batches
    if batches < every and trainer.loggers and not trainer.fast_dev_run and trainer.is_global_zero:
        warnings.warn(
            f"log_every_n_steps={every} is more than the {batches} batches of an epoch: what is logged by step is"
            " written in some epochs only; set it lower to see more.",
            PossibleUserWarning,
            stacklevel=2,
        )


def validates(trainer: Trainer) -> bool:
    """Whether the fit at hand has something to validate with."""
    request = trainer.request
    assert request is not None
    has_step = is_overridden("validation_step", request.module, TrainModule)
    return has_step and trainer.limits["val"] != 0 and loader_of(request, "val") is not None


def tell_of_half_a_validation(trainer: Trainer) -> None:
    """Where a fit has validation data and no step for them, or the reverse, which is not seen otherwise."""
    request = trainer.request
    assert request is not None
    has_step = is_overridden("validation_step", request.module, TrainModule)
    has_data = loader_of(request, "val") is not None
    if has_step != has_data and trainer.limits["val"] != 0 and trainer.is_global_zero:
        module = type(request.module).__name__
        had, missing = ("validation data", "validation_step")[:: -1 if has_step else 1]
        warnings.warn(
            f"there is {had} and no {missing} in {module}: nothing is validated.", PossibleUserWarning, stacklevel=2
        )


def validation(trainer: Trainer) -> EvaluateLoop | None:
    """The validation of the fit at hand, whose loaders are asked for at the first call; None where there is none, or
    where none of them has a batch on any rank: one without goes along with those that have some."""
    loop = trainer.validation
    if loop is not None and not loop.sources:
        loop.use(_validation_sources(trainer))
        nothing, communicator = not any(source.length for source in loop.sources), trainer.strategy.communicator
        if trainer.strategy.trains and communicator.world_size > 1:
            nothing = all(communicator.all_gather_plain(nothing))
        if nothing:
            trainer.validation = None
    return trainer.validation


def _validation_sources(trainer: Trainer) -> list[BatchSource]:
    assert trainer.request is not None
    return sources(trainer, trainer.request, "val") if validates(trainer) else []


def ask_again(trainer: Trainer, which: str) -> list[BatchSource]:
    """Ask the module or data module for its loaders of ``which`` (``"train"``, ``"val"``) again. The processes of the
    former ones end, unless these are the same loaders."""
    former = _read(trainer, which)
    if which == "val":
        found = _validation_sources(trainer)
    else:
        trainer.train_source = None
        found = [training(trainer)]
    for source, before in zip(found, former, strict=False):
        source.go_on_as(before)
    still = {id(one.loader) for source in found for one in source.with_processes()}
    _end_processes(source for source in former if not any(id(one.loader) in still for one in source.with_processes()))
    return found


def end_processes(trainer: Trainer, stage: str) -> None:
    """End the processes of the loaders that ``stage`` read: what it began is over with it."""
    for which in ("train", "val") if stage == "fit" else (stage,):
        _end_processes(_read(trainer, which))


def _read(trainer: Trainer, which: str) -> list[BatchSource]:
    """What is read for ``which``: ``"train"`` and ``"val"`` of a fit, or an evaluation's stage."""
    if which == "train":
        return [] if trainer.train_source is None else [trainer.train_source]
    if which == "predict":
        return trainer.predict_sources
    loop = trainer.validation if which == "val" else trainer.evaluation
    return [] if loop is None else loop.sources


def _end_processes(sources: Iterable[BatchSource]) -> None:
    for source in sources:
        for one in source.with_processes():
            one.end_processes()


def _validation_interval(trainer: Trainer) -> int | float:
    """Batches between validations; infinite for the end of an epoch of unknown length."""
    interval = trainer.val_check_interval
    length = 1 if trainer.strategy.support.rounds else trainer.num_training_batches  # a round is one to the loop
    if isinstance(interval, int):
        if trainer.check_val_every_n_epoch is not None and trainer.validation is not None and interval > length:
            raise ConfigurationError(
                f"val_check_interval={interval} is more than the {length} batches of an epoch: set"
                " check_val_every_n_epoch=None to count over epochs, or a smaller interval."
            )
        return interval
    if interval == 1.0:
        return length
    if length == float("inf"):
        raise ConfigurationError(
            f"val_check_interval={interval} is a fraction of an epoch without a known length: give a number of batches."
        )
    return max(1, int(length * interval))
