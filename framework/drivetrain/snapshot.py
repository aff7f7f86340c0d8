"""What a checkpoint of a run holds, and how a run goes on from it.

``shared`` is the same on all ranks and portable between strategies and world sizes; its keys are those of Lightning's
checkpoint dictionary where there is one. ``own`` belongs to one rank and is used on the same world size only; on
another, the strategy may take from the first rank's what is alike on all.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import checkpoint as store
from drivetrain import metric_states, snapshot_file
from drivetrain.callback import saved_state, state_name
from drivetrain.checkpoint import layout, rng
from drivetrain.checkpoint.io import TorchCheckpointIO, WrappingCheckpointIO
from drivetrain.config_containers import is_config
from drivetrain.errors import CheckpointError, ConfigurationError, MisfitError, TrainingError
from drivetrain.hooks import Hooks
from drivetrain.loops import saved as loop_state
from drivetrain.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


def capture(trainer: Trainer, weights_only: bool = False, alone: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(shared, own)`` of the run as it stands between two steps, before the hooks that may change it.

    Args:
        alone: nothing is exchanged with other ranks: sums of the epoch are this rank's only, and what came after the
            last optimizer step is left out.
    """
    fit, module = trainer.loop, trainer.lightning_module
    if not alone and trainer.status != "idle" and not trainer.handed_over:
        trainer.strategy.come_together("save_checkpoint")
    if fit is not None and not weights_only and not alone:
        if not fit.between_steps and trainer.meanings.checkpoint != "file":
            raise TrainingError(
                f"a checkpoint after batch {fit.batch} of epoch {fit.epoch} would lose the gradients of a window that"
                f" is not complete (accumulate_grad_batches={trainer.accumulate_grad_batches}): save where"
                " trainer.global_step has changed, or with weights_only=True."
            )
        fit.boundary.agree(fit.metrics)  # the losses of the steps since the last boundary belong to the curve
        fit.boundary.keep_log_step()
    optimizers = [] if weights_only or fit is None else fit.optimizers
    if trainer.status == "idle":  # no stage has begun, and a script asks for a checkpoint of the module as it is
        state = {"module": module.state_dict()}
    elif trainer.handed_over:  # the workers had the rest and are gone
        state = {"module": module.state_dict()}
        if not weights_only and trainer.left_state is None and trainer.fitted:
            warnings.warn(
                "the workers have ended and left the weights only: the checkpoint holds the weights and no states of"
                " optimizers, so training cannot go on from it; save within the run"
                " (ModelCheckpoint(save_last=True)) for that.",
                stacklevel=4,
            )
    else:
        state = trainer.strategy.state_dict(optimizers)
        if len(state["optimizers"]) < len(optimizers) and trainer.is_global_zero:
            warnings.warn(
                f"strategy={trainer.strategy_name} has no states of optimizers any more: the checkpoint holds the"
                " weights, so training cannot go on from it; save within the run (ModelCheckpoint(save_last=True)) for"
                " that.",
                stacklevel=4,
            )
    shared: dict[str, Any] = {
        "drivetrain_version": version("drivetrain"),
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": state["module"],
        "hyper_parameters": _as_saved(module.hparams),
    }
    if module.hparams and "hparams_name" in vars(module):  # not where a project fills ``hparams`` by hand
        shared["hparams_name"] = module.hparams_name
    resumable = not weights_only and fit is not None
    by_workers = trainer.left_state if trainer.handed_over and not weights_only else None
    left = None if by_workers is None else by_workers.copy_of_shared()
    if trainer.datamodule is not None and (resumable or trainer.meanings.checkpoint == "file"):
        if left is None or "datamodule" not in left:  # else the workers had the one that was set up
            shared["datamodule"] = trainer.datamodule.state_dict()
        shared["datamodule_hyper_parameters"] = _as_saved(trainer.datamodule.hparams)
        if trainer.datamodule.hparams and "hparams_name" in vars(trainer.datamodule):
            shared["datamodule_hparams_name"] = trainer.datamodule.hparams_name
    own: dict[str, Any] = {}
    if by_workers is not None and left is not None:
        here = {state_name(c): c.state_dict() for c in trainer.callbacks if state_name(c) in left["callbacks"]}
        shared |= left | {"callbacks": left["callbacks"] | here}  # some are of callbacks that only the workers had
        own = layout.unpack(by_workers.owns[0])
    if fit is None and not trainer.fitted and trainer.meanings.checkpoint == "file":
        shared |= {"loops": loop_state.of_none(), "run": snapshot_file.facts(trainer)}
        if not weights_only:
            shared |= {"optimizer_states": [], "precision": {}, "lr_schedulers": []}
            shared["callbacks"] = {state_name(c): s for c in trainer.callbacks if (s := c.state_dict())}
    gather = trainer.strategy.communicator.all_gather_plain
    if resumable:
        assert fit is not None
        shared["optimizer_states"] = state["optimizers"]
        shared["precision"] = state["precision"]
        shared["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        shared["loops"] = _after_step(trainer, loop_state.state_of(fit))
        shared["run"] = snapshot_file.facts(trainer)
        shared["callbacks"] = {state_name(c): s for c in trainer.callbacks if (s := c.state_dict())}
        shown = trainer.published.by_step
        if alone:
            trainer.published.by_step = None  # what the step that failed logged is no metric of the run
        logged = [_place(trainer), fit.metrics.state_dict()]
        by_rank = [logged] if alone else gather(logged)
        shared["metrics"] = {
            "places": [place for place, _ in by_rank],
            "epoch": [sums for _, sums in by_rank],
            "callback": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
            "double": trainer.published.in_double,
            "progress_bar": dict(trainer.progress_bar_metrics),
        }
        trainer.published.by_step = shown
        own = {
            "rng": trainer.random_after_fit or rng.capture(),
            "strategy": trainer.strategy.own_state(),
            "torchmetrics": metric_states.states(module),
            "order": fit.data.order_after(shared["loops"]["batch"], fit.ended),
            "validation": [] if trainer.validation is None else trainer.validation.samples(),
        }
        shared["loops"]["generators"] = own["order"].get("generators", [])
        if "loader" in own["order"] and trainer.meanings.checkpoint == "file":
            shared["loops"]["loaders"] = [own["order"]["loader"]]  # where Lightning looks for it
    return shared, own


def write(trainer: Trainer, path: str | Path, weights_only: bool) -> Path:
    """Save the run at ``path``, a directory or, with Lightning's meanings, a file; every training rank calls it between
    the same two steps."""
    if trainer.hooks is None:  # they ran in the workers
        trainer.hooks = Hooks(trainer, trainer.lightning_module, trainer.callbacks)
    # Validation runs in inference mode, in which a DTensor cannot even be looked at anew.
    tell = partial(snapshot_file.tell, trainer, gradients=torch.is_grad_enabled())
    with torch.inference_mode(False), torch.no_grad(), trainer.consensus():
        shared, own = capture(trainer, weights_only)
        if trainer.meanings.checkpoint == "file":
            return snapshot_file.write(trainer, shared, own, Path(path), weights_only, tell)
        tell(shared)
        return store.save(
            path,
            shared,
            own,
            meta=_meta(trainer, trainer.current_epoch, trainer.global_step),
            communicator=trainer.strategy.communicator,
            weights_only=weights_only,
        )


def contents(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """The dictionary of a file in Lightning's layout, of this rank alone, after the hooks that may change it.

    Raises:
        CheckpointError: no rank alone has the whole state.
    """
    strategy = trainer.strategy
    alone = strategy.communicator.world_size > 1
    if alone and not strategy.support.replicated:
        raise CheckpointError(
            f"under strategy={trainer.strategy_name} no worker has the whole state by itself: call save_checkpoint on"
            " all of them instead."
        )
    if trainer.hooks is None:
        trainer.hooks = Hooks(trainer, trainer.lightning_module, trainer.callbacks)
    tell = partial(snapshot_file.tell, trainer, gradients=torch.is_grad_enabled())
    with torch.inference_mode(False), torch.no_grad():
        shared, own = capture(trainer, weights_only, alone=alone)
        return snapshot_file.contents(trainer, shared, own, weights_only, tell)


def write_alone(trainer: Trainer, path: str | Path) -> Path:
    """Save what this rank has at ``path``, without a word to the others, who may be gone: after an exception.

    The checkpoint is one of a job with one worker: random states of the other ranks start anew when it is resumed.

    Raises:
        CheckpointError: no rank alone has the whole state, training has not begun, or the disk refuses.
    """
    strategy = trainer.strategy
    if strategy.communicator.world_size > 1 and not strategy.support.replicated:
        raise CheckpointError(
            f"no checkpoint was saved at {path}: under strategy={trainer.strategy_name} no worker has the whole state"
            " by itself, and the others cannot be asked after an exception; save every few steps instead"
            " (ModelCheckpoint(every_n_train_steps=...))"
        )
    if trainer.loop is None or not strategy.trains:
        raise CheckpointError(f"no checkpoint was saved at {path}: training had not begun")
    tell = partial(snapshot_file.tell, trainer, gradients=torch.is_grad_enabled())
    with torch.inference_mode(False), torch.no_grad():
        shared, own = capture(trainer, alone=True)
        if trainer.meanings.checkpoint == "file":
            return snapshot_file.write_alone(trainer, shared, own, Path(path), tell)
        tell(shared)
        return store.save(path, shared, own, meta=_meta(trainer, shared["epoch"], shared["global_step"]))


def _meta(trainer: Trainer, epoch: int, global_step: int) -> dict[str, Any]:
    """For the manifest. What the strategy keeps is written down, because its name in a file must import nothing."""
    strategy, fidelity = trainer.strategy_name, trainer.strategy.support.fidelity
    return {"epoch": epoch, "global_step": global_step, "strategy": strategy, "fidelity": fidelity}


def _as_saved(hparams: Mapping[str, Any]) -> Mapping[str, Any]:
    return hparams if is_config(hparams) else dict(hparams)


def _after_step(trainer: Trainer, loops: dict[str, Any]) -> dict[str, Any]:
    """Where training stood after the last optimizer step: a window that is not complete is trained anew."""
    if trainer.between_steps:
        return loops
    late = loops["batch"] % trainer.accumulate_grad_batches
    return {
        **loops,
        "batch": loops["batch"] - late,
        "batches_seen": loops["batches_seen"] - late,
        "validated": True,  # what was due after that step came before the window
    }


def read(trainer: Trainer, path: Path, weights_only: bool | None = None) -> store.Loaded:
    """The checkpoint as it is stored; ``weights_only=False`` trusts a file that needs more than plain data."""
    communicator = trainer.strategy.communicator
    if path.is_file() or reads_itself(trainer):
        source = trainer.checkpoint_io
        return snapshot_file.read(source, path, communicator.rank, communicator.world_size, weights_only)
    return store.load(path, rank=communicator.rank, world_size=communicator.world_size, verify=False)


def reads_itself(trainer: Trainer) -> bool:
    """Whether the project reads checkpoints in a way of its own, so that only that knows what is one."""
    source = trainer.checkpoint_io
    while isinstance(source, WrappingCheckpointIO):
        source = source.checkpoint_io
    return type(source).load_checkpoint is not TorchCheckpointIO.load_checkpoint


def outline(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """What the checkpoint holds, with tensors on the meta device: nothing of their data is read."""
    if path.is_file():
        return snapshot_file.outline(path, weights_only)
    return store.outline(path)


def show(trainer: Trainer, loaded: store.Loaded) -> None:
    """Let the module and the callbacks see and change what is loaded, before anything is taken from it."""
    trainer.lightning_module.on_load_checkpoint(loaded.shared)
    if "callbacks" in loaded.shared or loaded.meta.get("layout") != "file":  # a file of weights only is not for them
        trainer.hooks.of_callbacks("on_load_checkpoint", loaded.shared)


def restore_weights(trainer: Trainer, loaded: store.Loaded) -> None:
    """The weights only, for evaluation."""
    module = trainer.lightning_module
    _check_names(trainer, loaded)
    trainer.strategy.load_state_dict({"module": loaded.shared["state_dict"]}, [], strict=module.strict_loading)


def restore_parts(trainer: Trainer, shared: Mapping[str, Any]) -> None:
    """The states of the data module and of the callbacks, of either layout. Lightning gives them for evaluation too."""
    data = trainer.datamodule
    if data is not None:
        for key in ("datamodule", type(data).__qualname__):
            if key in shared:
                data.load_state_dict(shared[key])
                break
    states = shared.get("callbacks", {})
    for callback in trainer.callbacks:
        state = saved_state(callback, states)
        if state is not None:
            callback.load_state_dict(state)


def restore(trainer: Trainer, loaded: store.Loaded) -> Callable[[], None]:
    """Everything that training goes on from, but for :func:`restore_parts`, which comes before the optimizers are made;
    random states are kept back until the batches begin.

    Returns what is to be called after ``on_fit_start``: optimizers that a hook put in the place of those that the
    module configured get the saved states then, and so does every one where a state is in a form of its own.
    """
    shared, module, fit = loaded.shared, trainer.lightning_module, trainer.loop
    assert fit is not None
    check_trains_on(module, shared)
    epoch, most = shared.get("epoch", 0), trainer.max_epochs
    if trainer.meanings.checkpoint == "file" and most not in (None, -1) and epoch > most:
        raise ConfigurationError(
            f"the checkpoint is of epoch {epoch} and max_epochs={most}: raise max_epochs, or go on from an earlier one."
        )
    _check_names(trainer, loaded)
    trainer.hooks.of_callbacks("before_restore", shared)
    shared = snapshot_file.native(trainer, shared) if loaded.meta.get("layout") == "file" else shared
    state = {"module": shared["state_dict"], "optimizers": shared["optimizer_states"], "precision": shared["precision"]}
    untrained = not state["optimizers"] and shared["loops"]["global_step"] == 0  # saved before any optimizer was made
    if len(state["optimizers"]) != len(fit.optimizers) and not untrained:
        raise CheckpointError(
            f"the checkpoint has {len(state['optimizers'])} optimizers, the module configures {len(fit.optimizers)}:"
            " configure the same or load the weights only."
        )
    saved_states, built = state["optimizers"], list(fit.optimizers)
    alike = type(trainer.strategy).load_state_dict is Strategy.load_state_dict
    late = alike and any("whole" in saved for saved in saved_states)
    trainer.strategy.load_state_dict(
        {**state, "optimizers": [] if late else saved_states}, built, strict=module.strict_loading
    )
    for config, saved in zip(trainer.lr_scheduler_configs, shared["lr_schedulers"], strict=False):
        config.scheduler.load_state_dict(saved)
    loop_state.restore(fit, shared["loops"])
    _reseed(trainer, shared["loops"].get("data_seed", trainer.data_seed))
    _tell_of_another_strategy(trainer, loaded.meta)
    _tell_of_absent_callbacks(trainer, shared.get("callbacks", {}))
    if "metrics" in shared:
        _restore_metrics(trainer, shared["metrics"], loaded, within_epoch=fit.resumed)
    if loaded.first:
        trainer.strategy.load_first_state(loaded.first.get("strategy", {}))
    if loaded.own:
        trainer.strategy.load_own_state(loaded.own["strategy"])
        trainer.random_state = loaded.own["rng"]
        fit.data.go_on_from(loaded.own.get("order", {}))
        if trainer.validation is not None:
            trainer.validation.go_on_with_samples(loaded.own.get("validation", []))
    elif "world_size" not in loaded.meta:
        states = shared["loops"].get("loaders")
        fit.data.go_on_from({"loader": states[0]} if states else {})
    else:
        fit.data.go_on_from({"generators_of_one": shared["loops"].get("generators", []), "samples": None})
    if not loaded.own and "world_size" in loaded.meta and trainer.is_global_zero:
        warnings.warn(
            f"the checkpoint is of {loaded.meta.get('world_size')} workers and this job has {trainer.world_size}: the"
            " random states of the workers start anew, so the run is not bit-equal to an undisturbed one.",
            stacklevel=2,
        )

    def after_start() -> None:
        if late or any(now is not then for now, then in zip(fit.optimizers, built, strict=False)):
            for optimizer, saved in zip(fit.optimizers, saved_states, strict=False):
                trainer.strategy.load_optimizer(optimizer, saved)

    return after_start


def _reseed(trainer: Trainer, seed: int) -> None:
    """The data is shuffled and augmented as in the run that was saved, or samples of an epoch would be trained twice
    and others not at all; also what is still to be asked for, such as the loaders of a validation."""
    if trainer.seed not in (None, seed) and trainer.is_global_zero:
        warnings.warn(
            f"the data keeps the order of the run that goes on, which has seed={seed}: seed={trainer.seed} is not its.",
            stacklevel=2,
        )
    trainer.data_seed = seed
    trainer.fit_loop.data.reseed(seed)
    for source in [] if trainer.validation is None else trainer.validation.sources:
        source.reseed(seed)


def _tell_of_another_strategy(trainer: Trainer, meta: Mapping[str, Any]) -> None:
    """Between exact ones the run stays what it was; an earlier version's checkpoint does not say what its own kept."""
    then, now = meta.get("strategy"), trainer.strategy_name
    exact = meta.get("fidelity", "exact") == trainer.strategy.support.fidelity == "exact"
    if then and then != now and not exact and trainer.is_global_zero:
        warnings.warn(
            f"the checkpoint is of a run with strategy={then}, and strategy={now} does not train as that does: give"
            f" strategy={then} and its options again to go on as it began.",
            stacklevel=2,
        )


def _tell_of_absent_callbacks(trainer: Trainer, saved: Mapping[Any, Any]) -> None:
    """A callback that is missing, or was made with another monitor, would begin anew without a word."""
    here = {key for callback in trainer.callbacks for key in (state_name(callback), callback.state_key, type(callback))}
    absent = sorted(str(key) for key in saved.keys() - here)
    if absent and trainer.is_global_zero:
        warnings.warn(
            f"the checkpoint has states of callbacks that this Trainer does not have: {'; '.join(absent)}: they are"
            " left out, give it the same callbacks to go on with them.",
            stacklevel=2,
        )


def _place(trainer: Trainer) -> list[int]:
    """What part of the data this rank's metrics are of, ``[rank, size]``, and whether there are any and they count."""
    strategy = trainer.strategy
    return [strategy.data.rank, strategy.data.size, int(strategy.counts and strategy.logs)]


def _restore_metrics(trainer: Trainer, saved: dict[str, Any], loaded: store.Loaded, within_epoch: bool) -> None:
    """What was logged, and gathered by metric objects.

    Args:
        within_epoch: whether the epoch that was begun goes on, with what was logged in it.
    """
    communicator, metrics = trainer.strategy.communicator, trainer.fit_loop.metrics
    sums = saved["epoch"] if within_epoch else []
    now = communicator.all_gather_plain(_place(trainer))
    # A checkpoint of an earlier version does not say: what is of another number of ranks counts as a whole.
    then = saved.get("places", now if len(saved["epoch"]) == len(now) else [])
    divided_alike = then == now and len(saved["epoch"]) == len(now)
    if divided_alike:
        metrics.load_state_dict(sums[communicator.rank : communicator.rank + 1])
        metric_states.load(trainer.lightning_module, (loaded.own or {}).get("torchmetrics", {}))
    else:  # the first rank that counts takes what those had
        counted = [one for one, place in itertools.zip_longest(sums, then) if place is None or place[2]]
        first = communicator.rank == next(rank for rank, place in enumerate(now) if place[2])
        if first:
            metrics.load_state_dict([one for one in counted if one is not None])
        _restore_metric_objects(trainer, loaded, then, first)
    shown: dict[str, Any] = {"bar": dict(saved["progress_bar"])}
    for name in ("callback", "logged"):
        shown[name] = trainer.published.again(saved[name], saved.get("double"))
    trainer.published.load_state_dict(shown)


def _restore_metric_objects(trainer: Trainer, loaded: store.Loaded, then: list[list[int]], first: bool) -> None:
    """Metric objects hold what a rank saw, and the ranks see something else now: the ``first`` of those that count goes
    on with what all had, as far as a metric's states can be brought together."""
    module = trainer.lightning_module
    if not metric_states.metrics_of(module):
        return
    parts = [own.get("torchmetrics", {}) for own in loaded.owns()]
    known = len(then) == len(parts)  # else of an earlier version, which does not say whose count
    counted = [part for part, place in zip(parts, then, strict=False) if place[2]] if known else []
    found, lost = metric_states.brought_together(module, counted, first)
    metric_states.load(module, found)
    if not known:
        lost = {name for part in parts for name, one in part.items() if one["updates"]}
    if lost and trainer.is_global_zero:
        warnings.warn(
            f"the checkpoint is of ranks that shared out their data otherwise: what metric objects gathered before it"
            f" ({', '.join(sorted(lost))}) is left out, so their values of this epoch are of the rest of it.",
            stacklevel=2,
        )


def check_trains_on(module: TrainModule, shared: Mapping[str, Any]) -> None:
    """Refuse to go on training from what is kept for evaluation only."""
    if "optimizer_states" not in shared:
        raise CheckpointError(
            "the checkpoint holds weights only, training cannot go on from it: load it with"
            f" {type(module).__name__}.load_from_checkpoint and fit without ckpt_path."
        )


def _check_names(trainer: Trainer, loaded: store.Loaded) -> None:
    if not trainer.strategy.holds_part:
        check_names(trainer.lightning_module, loaded.shared["state_dict"])


def check_names(module: TrainModule, weights: Mapping[str, Any]) -> None:
    """Refuse weights of other names or shapes than the module's; not those of layers that take them in their own way
    (as a buffer that grows to the size that it is given), who refuse what they cannot take."""
    own = module.state_dict()
    left = tuple(_loading_by_themselves(module))
    saved, wanted = ({name for name in names if not name.startswith(left)} for names in (weights, own))
    for name in [name for name in own if name in saved]:
        theirs, ours = getattr(weights[name], "shape", None), getattr(own[name], "shape", None)
        if theirs != ours:
            raise MisfitError(
                f"the checkpoint does not fit {type(module).__name__}: {name} has shape {tuple(theirs or ())} in it and"
                f" {tuple(ours or ())} in the module: build the module as it was saved."
            )
    if module.strict_loading and saved != wanted:
        missing, extra = sorted(wanted - saved), sorted(saved - wanted)
        raise MisfitError(
            f"the checkpoint does not fit {type(module).__name__}: missing {missing[:5] or 'nothing'}, unknown"
            f" {extra[:5] or 'nothing'}: build the module as it was saved, or set strict_loading = False."
        )


def _loading_by_themselves(module: TrainModule) -> Iterator[str]:
    """Beginnings of the names of layers whose class, or a hook on them, has a say in what they load."""
    for name, layer in module.named_modules():
        methods = (getattr(type(layer), method) for method in ("load_state_dict", "_load_from_state_dict"))
        foreign = any(
            (getattr(method, "__module__", None) or "").partition(".")[0] not in ("torch", "drivetrain")
            for method in methods
        )
        if foreign or layer._load_state_dict_pre_hooks or layer._load_state_dict_post_hooks:
            yield f"{name}." if name else ""
