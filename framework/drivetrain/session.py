"""One stage (fit, validate, test, predict) in this process: what is built in which order around the loops."""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from drivetrain import in_parts, metric_states, resumption, seeding, snapshot, stage_data, stage_loggers
from drivetrain.batch_limits import as_slice
from drivetrain.checkpoint import rng
from drivetrain.comm import phase
from drivetrain.compilation import compiled
from drivetrain.data_hooks import DataHooks
from drivetrain.declaration import refuse
from drivetrain.dependent_options import tell
from drivetrain.errors import (
    ConfigurationError,
    ConflictError,
    DrivetrainError,
    EndStage,
    Interrupted,
    InterruptedByKeyboard,
    TrainingError,
    note_place,
)
from drivetrain.hooks import Hooks
from drivetrain.late_import import drawing_nothing
from drivetrain.launch import Job, destroy_process_group, init_group_of_one, signals
from drivetrain.loops.evaluate import Abandoned, EvaluateLoop
from drivetrain.loops.fit import FitLoop
from drivetrain.loops.predict import PredictLoop
from drivetrain.optimizer import needs_closure, parse_configuration
from drivetrain.profiling import ProfiledHooks, profiled
from drivetrain.request import LOADER_OF, Request, check_needs
from drivetrain.states import RunningStage, TrainerFn
from drivetrain.transfer import batch_transfer

if TYPE_CHECKING:
    from drivetrain.checkpoint import Loaded
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


def run(trainer: Trainer, request: Request, job: Job) -> Any:
    """Run ``request`` as worker ``job``. Returns the evaluation's results, the predictions, or None."""
    phase.current.name = phase.SETUP
    with signals.handling(), _deterministic(trainer), _drawing_apart(trainer, request, job):
        try:
            if trainer.meanings.starts == "seed" and trainer.strategy_name != "single":
                seeding.start_anew()
            trainer.connect(job)
            if job.world_size > 1 and job.origin != "local":  # a worker of ours ends with its stage
                in_parts.bring_together(request.module, trainer.strategy)
            with _group_of_one(trainer, job):
                _attach(trainer, request)
                with profiled(trainer):
                    return _stage(trainer, request)
        except BaseException as error:
            if trainer.hooks is not None and trainer.hooks.current:
                note_place(error, f"in {trainer.hooks.current}, step {trainer.global_step}")
                _explain(trainer, error)
            try:
                _fail(trainer, request, error)
            except Exception as other:  # of a hook that was told; the first cause stays the first
                error.add_note(f"and while that was told: {type(other).__name__}: {other}")
            if isinstance(error, SystemExit) and error.code in (None, 0) and trainer.job is not None:
                raise TrainingError(
                    f"rank {job.rank} left {request.stage} by sys.exit(), which the others would wait for: set"
                    " trainer.should_stop = True to end training in order."
                ) from error
            raise
        finally:
            phase.current.name = phase.SETUP
            for callback in trainer.callbacks:
                callback._log_to(None)
            trainer.doing = None


@contextmanager
def _drawing_apart(trainer: Trainer, request: Request, job: Job) -> Iterator[None]:
    """Replicas part in their random numbers; what a script draws after the stage (another module's weights) is again
    the same on all of them, and what it would be if the Trainer had started the workers. A checkpoint that the script
    saves after a fit has what the fit left. (A worker of ours ends with the stage.)"""
    if request.stage == "fit":
        trainer.random_after_fit = None
    if job.world_size == 1 or job.origin == "local":
        yield
        return
    before = rng.capture()
    try:
        yield
    finally:  # a script may catch what was raised, and go on
        if request.stage == "fit":
            trainer.random_after_fit = rng.capture()
        rng.restore(before)


@contextmanager
def _group_of_one(trainer: Trainer, job: Job) -> Iterator[None]:
    """While a stage lasts, the process group of a distributed strategy that has one worker: what a project calls of
    ``torch.distributed`` for several works for one."""
    made = trainer.has_lone_group and init_group_of_one(job, trainer.strategy.device)
    try:
        yield
    finally:
        if made:
            destroy_process_group()


def _explain(trainer: Trainer, error: BaseException) -> None:
    """Add to an error of a project's own code, behind its place, what the strategy knows of its kind."""
    if isinstance(error, Exception) and not isinstance(error, DrivetrainError):
        known = trainer.strategy.support.explains.items()
        for words in [words for pattern, words in known if re.search(pattern, str(error))][:1]:
            place, *others = error.__notes__
            error.__notes__ = [f"{place}: {words.format(strategy=trainer.strategy_name)}", *others]


def _fail(trainer: Trainer, request: Request, error: BaseException) -> None:
    """Tell those who must know; then leave without a word to the other ranks, who may be gone."""
    status = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
    trainer.status = status
    # Lightning's callbacks may look for Python's own.
    plain = trainer.meanings.keyboard == "exit" and isinstance(error, InterruptedByKeyboard)
    told = KeyboardInterrupt() if plain else error
    try:
        try:
            if trainer.hooks is not None:
                trainer.hooks.of_callbacks("on_exception", told)
            if request.datamodule is not None:
                request.datamodule.on_exception(told)
        finally:
            trainer.checkpoint_io.teardown()
        stage_loggers.finalize(trainer)
    finally:
        if request.stage == "fit" and trainer.loop is not None and trainer.loop.in_batch:
            trainer.loop.metrics.leave_out(trainer.loop.batch_idx)  # what fails has no metrics; those before it stay
        trainer.disconnect(error)
        if trainer.world_size == 1:  # a rank of several ends now, and its loaders' processes with it
            stage_data.end_processes(trainer, request.stage)


def _attach(trainer: Trainer, request: Request) -> None:
    """Bring module, data, callbacks and trainer together."""
    module = request.module
    trainer.lightning_module = module
    trainer.datamodule = request.datamodule
    module.trainer = trainer
    if request.datamodule is not None:
        request.datamodule.trainer = trainer
    trainer.stage = request.stage
    trainer._read_elsewhere = {}
    trainer.doing = RunningStage("train" if request.stage == "fit" else request.stage)
    trainer.request = request
    if request.stage == "fit":
        if trainer.loop is not None:  # what is shown until this fit asks for its data
            trainer._counted |= {"train": trainer.num_training_batches, "val": trainer.num_val_batches}
        trainer.loop = trainer.train_source = trainer.validation = None
        for which in ("train", "val"):
            trainer._given.pop(which, None)
    stage_loggers.agree_on_versions(trainer)
    if request.stage != "fit":  # those of configure_callbacks are made anew, and know nothing of the fit
        request.ckpt_path = resumption.named(trainer, request.ckpt_path)
    extra = module.configure_callbacks()
    trainer.use_callbacks(extra if isinstance(extra, (list, tuple)) else [extra])
    for callback in trainer.callbacks:
        callback._log_to(module)
    if request.stage == "fit":
        check_needs(trainer)  # those of configure_callbacks are known only now
    kind = ProfiledHooks if trainer.profiler.measures else Hooks
    trainer.hooks = kind(trainer, module, trainer.callbacks)
    trainer.metrics, trainer.published.by_step = trainer.new_metrics(), None
    trainer.status = "running"


def _stage(trainer: Trainer, request: Request) -> Any:
    module, stage, hooks, strategy = request.module, request.stage, trainer.hooks, trainer.strategy
    told = TrainerFn(stage) if trainer.meanings.stages == "enum" else stage
    _prepare_data(trainer, request)
    stage_loggers.open_experiments(trainer)
    if request.datamodule is not None:
        trainer.before_setup = rng.capture()
        request.datamodule.setup(stage=told)
    hooks.of_callbacks("setup", stage=told)
    module.setup(stage=told)
    hooks.follow()
    looks = resumption.agree(trainer, request)
    device = strategy.device if trainer.meanings.builds == "device" else torch.device("cpu")
    with strategy.init_context(), nullcontext() if device.type == "cpu" else device:
        module.configure_sharded_model()
        module.configure_model()
    if trainer.sync_batchnorm:
        _synchronise_batchnorm(trainer, module)
    loaded = _checkpoint(trainer, request, looks)
    if trainer.meanings.live_metrics:
        trainer.published.forget()
    if strategy.support.divides and getattr(strategy, "module", None) is not module:  # it is still whole
        if stage == "fit":
            hooks.of_callbacks("before_division")
        stage_loggers.log_graph(trainer)
    with compiled(module, trainer.compile):
        strategy.prepare(module, stage)
        metric_states.gather_over(module, strategy)
        trainer.to_device = batch_transfer(trainer)
        result = None
        with suppress(EndStage):
            if stage == "fit":
                _fit(trainer, request, loaded)
            else:
                result = _evaluate(trainer, request, loaded)
    if strategy.trains:
        strategy.finish()
    stage_data.end_processes(trainer, stage)
    if request.datamodule is not None:
        request.datamodule.teardown(stage=told)
    hooks.of_callbacks("teardown", stage=told)
    module.teardown(stage=told)
    trainer.checkpoint_io.teardown()  # loggers may want the files
    trainer.status = "stopped" if trainer.should_stop and stage == "fit" else "completed"
    stage_loggers.finalize(trainer)
    if trainer.job is None:  # the caller's process, and no other rank has a part of the module
        strategy.give_back(trainer.optimizers)
    return result


def _checkpoint(trainer: Trainer, request: Request, looks: bool) -> Loaded | None:
    """What ``ckpt_path`` means, shown to the module before its optimizers are made: it may rebuild itself after it."""
    path = resumption.find(trainer, request.ckpt_path, looks)
    if path is None:
        trainer.ckpt_path = None
        at_hand = request.ckpt_path == "last" and trainer.meanings.checkpoint == "file"  # which was told
        if request.ckpt_path is not None and request.stage != "fit" and not at_hand:
            raise ConfigurationError(f"ckpt_path={request.ckpt_path!r}: there is no checkpoint to {request.stage}.")
        return None
    trainer.ckpt_path = str(path)
    loaded = snapshot.read(trainer, path, request.weights_only)
    snapshot.show(trainer, loaded)
    return loaded


def _synchronise_batchnorm(trainer: Trainer, module: TrainModule) -> None:
    """BatchNorm over the batch of all replicas; nothing to do for one, nor for a module that has none."""
    if trainer.strategy.data.size == 1:
        return
    if not any(isinstance(one, _BatchNorm) for one in module.modules()):
        if trainer.meanings.tells_in_vain and trainer.is_global_zero:
            tell([f"sync_batchnorm=True has no effect: {type(module).__name__} has no BatchNorm: leave it out."])
        return
    if trainer.accelerator_name != "cuda":
        raise ConfigurationError(
            "sync_batchnorm=True needs GPUs, torch's SyncBatchNorm has no other implementation: leave it out, running"
            " statistics are averaged over the replicas in any case."
        )
    for name, child in list(module.named_children()):
        setattr(module, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))


def _prepare_data(trainer: Trainer, request: Request) -> None:
    """``prepare_data`` on the first process of each node, or of the first one only where its owner says so, while the
    others wait; nobody waits where there is none."""
    owners = [o for o in (request.datamodule, request.module) if o is not None]
    owners = [o for o in owners if type(o).prepare_data is not DataHooks.prepare_data]
    if not owners:
        return
    for owner in owners:
        if trainer.local_rank == 0 and (owner.prepare_data_per_node or trainer.strategy.node_rank == 0):
            owner.prepare_data()
    trainer.strategy.everyone.barrier()


# -- fit --------------------------------------------------------------------------------------------------------
def _fit(trainer: Trainer, request: Request, loaded: Loaded | None) -> None:
    strategy, hooks = trainer.strategy, trainer.hooks
    progress = trainer.progress_of("fit")
    trainer.validation = EvaluateLoop(trainer, "validation", None, progress) if stage_data.validates(trainer) else None
    stage_data.tell_of_half_a_validation(trainer)
    if trainer.meanings.loaders == "first":
        stage_data.training(trainer)
        stage_data.validation(trainer)
    fit = trainer.loop = FitLoop(trainer, None, **trainer._adopted)
    if trainer.instruments is not None:
        trainer.instruments.of_fit(fit)
    trainer.lr_scheduler_configs = []
    if loaded is not None:  # configure_optimizers may ask the data or a callback for what it was when it was saved
        snapshot.restore_parts(trainer, loaded.shared)
    fit.use(strategy.build_optimizers(lambda: _configure(trainer)))
    trainer.fitted = True
    after_start: Callable[[], None] | None = None
    if loaded is not None:
        after_start = snapshot.restore(trainer, loaded)
        progress.reset()
        if fit.ended:
            fit.schedules.keep()
    elif fit.finished and trainer.is_global_zero:
        warnings.warn(
            f"this Trainer has trained {fit.epoch} epochs and {fit.global_step} steps and is at its limit"
            f" (max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}): fit does nothing; raise the limit or"
            " make a new Trainer.",
            stacklevel=2,
        )
    if not strategy.trains:
        strategy.serve()
        return
    hooks("on_fit_start")
    if after_start is not None:
        after_start()
    stage_loggers.log_hyperparameters(trainer)
    torch.set_grad_enabled(True)
    trainer.lightning_module.zero_grad()  # what was computed before is no part of it
    checks_resumed = trainer.meanings.checks_resumed and (fit.ended or fit.batch == 0)
    if loaded is not None and checks_resumed:
        trainer.published.forget()  # a check begins with nothing known, as it ends, and so does training without one
    if loaded is None or (checks_resumed and trainer.max_steps == -1):
        _sanity_check(trainer)
    fit.run(partial(_part_random_streams, trainer))
    hooks("on_fit_end")


def _configure(trainer: Trainer) -> list[Optimizer]:
    """The module's optimizers; its schedulers go to the trainer. Refuses what the strategy does not do."""
    module = trainer.lightning_module
    configured = module.configure_optimizers()
    if configured is None and trainer.is_global_zero:
        warnings.warn(f"{type(module).__name__}.configure_optimizers gave None: nothing is trained.", stacklevel=2)
    optimizers, trainer.lr_scheduler_configs = parse_configuration(
        configured,
        steps_schedulers=module.automatic_optimization,
        calls_step=module.automatic_optimization and not trainer.hooks.module_has("lr_scheduler_step"),
        warns=trainer.meanings.extra_keys == "warn",
    )
    if module.automatic_optimization and len(optimizers) > 1:
        raise ConflictError(
            f"{type(module).__name__} configures {len(optimizers)} optimizers: set automatic_optimization = False and"
            " step them in training_step, or configure one."
        )
    plan = trainer.plan(
        stages=("fit",),
        automatic=module.automatic_optimization,
        optimizers=len(optimizers),
        closures=any(needs_closure(optimizer) for optimizer in optimizers),
    )
    refuse(plan, trainer.declaration)
    return optimizers


def _part_random_streams(trainer: Trainer) -> None:
    """Give replicas different random numbers from here on (dropout); the first keeps the stream it has. Until training
    has started they draw alike: a hook may make the weights there."""
    replica = trainer.strategy.data.rank
    if replica > 0:
        seed = (torch.initial_seed() + replica) % 2**63
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)


def _sanity_check(trainer: Trainer) -> None:
    """A few validation batches before training, so that a fault in validation shows at once; leaves no trace."""
    steps = trainer.num_sanity_val_steps
    if trainer.validation is None or steps == 0:
        return
    trainer.sanity_checking = True
    with rng.kept():
        trainer.hooks.of_callbacks("on_sanity_check_start")
        validation = stage_data.validation(trainer)
        try:
            if validation is not None:
                validation.run(limit=as_slice(steps))
        except Abandoned as stop:
            raise Interrupted(stop.signal) from None
    with nullcontext() if validation is None else validation.shown():
        trainer.hooks.of_callbacks("on_sanity_check_end")
    trainer.progress_of("fit").reset()
    trainer.training = True
    trainer.published.forget()


# -- evaluation -------------------------------------------------------------------------------------------------
def _evaluate(trainer: Trainer, request: Request, loaded: Loaded | None) -> Any:
    stage, strategy = request.stage, trainer.strategy
    stage_loggers.log_hyperparameters(trainer)
    if loaded is not None:
        with trainer.consensus():
            snapshot.restore_weights(trainer, loaded)
            if trainer.meanings.checkpoint == "file":
                snapshot.restore_parts(trainer, loaded.shared)
    trainer.lightning_module.zero_grad()  # those of a fit before need no memory any more
    which = LOADER_OF[stage]
    by_trainer = trainer.meanings.results == "trainer"
    nothing = trainer.limits[which] == 0 and (by_trainer or stage != "predict")
    found = [] if nothing else stage_data.sources(trainer, request, which)
    if not strategy.trains:
        strategy.serve()
        return None
    if stage == "predict":
        trainer.predict_sources = found
        if by_trainer and stage_data.nothing_to_read(trainer, found):
            return None
        keep = request.keep_predictions or any(callback.reads_predictions for callback in trainer.callbacks)
        trainer.predict_loop = PredictLoop(trainer, found, keep, trainer.progress_of(stage))
        return trainer.predict_loop.run()
    if stage == "test":
        trainer.test_sources = found
    kind = "validation" if stage == "validate" else stage
    loop = EvaluateLoop(trainer, kind, found, trainer.progress_of(stage))
    trainer.evaluation = loop
    if by_trainer and stage_data.nothing_to_read(trainer, found):
        return []
    try:
        results = loop.run()
    except Abandoned as stop:
        raise Interrupted(stop.signal) from None
    if by_trainer and request.verbose and trainer.is_global_zero:
        with drawing_nothing():
            from drivetrain import evaluation_table

        evaluation_table.show(results, stage)
    return results


@contextmanager
def _deterministic(trainer: Trainer) -> Iterator[None]:
    """The trainer's ``deterministic``, ``benchmark`` and ``detect_anomaly`` for as long as the stage runs."""
    cudnn = torch.backends.cudnn
    former = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.benchmark,
        torch.is_anomaly_enabled(),
    )
    if trainer.deterministic is not None:
        torch.use_deterministic_algorithms(bool(trainer.deterministic), warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        cudnn.benchmark = trainer.benchmark
    if trainer.detect_anomaly:
        warnings.warn("detect_anomaly slows training down: use it to find a fault only.", stacklevel=3)
        torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(former[0], warn_only=former[1])
        cudnn.benchmark = former[2]
        torch.autograd.set_detect_anomaly(former[3])
