"""What came of a stage, for processes that did not train: the caller's, where workers were started for it, and ranks
that served, in a script that each rank runs.

The first rank tells the weights, counters, metrics and callback states, and what module, data module and callbacks
noted in attributes.
"""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

import torch

from drivetrain.callback import Callback, state_name
from drivetrain.checkpoint import from_safe, to_safe
from drivetrain.errors import CheckpointError
from drivetrain.module import TrainModule

if TYPE_CHECKING:
    from drivetrain.request import Request
    from drivetrain.trainer import Trainer


class Before(NamedTuple):
    """What was there before the stage, which need not be told: ``given`` are tensors among attributes."""

    given: dict[str, dict[str, tuple[ReferenceType[torch.Tensor], int]]]
    flags: dict[str, bool]


def before(trainer: Trainer, request: Request) -> Before:
    given = {key: _tensors(owner) for key, owner in _owners(trainer, request).items()}
    return Before(given, _flags(request.module))


def told(trainer: Trainer, request: Request, before: Before, result: Any) -> dict[str, Any]:
    """What this rank, the first, tells, but the weights: plain data that ``torch.load(weights_only=True)`` reads."""
    module, fit = request.module, trainer.loop
    owners = _owners(trainer, request)
    return {
        "flags": {key: value for key, value in _flags(module).items() if before.flags.get(key) != value},
        "result": to_safe(result),
        "loggers": [logger.version for logger in trainer.loggers],
        "callbacks": _callback_states(trainer),
        "noted": {key: _noted(owner, before.given.get(key, {})) for key, owner in owners.items()},
        "trainer": to_safe(
            {
                "counters": trainer._adopted if fit is None else fit.counters(),
                "status": trainer.status,
                "should_stop": trainer.should_stop,
                "ckpt_path": trainer.ckpt_path,
                "data_seed": trainer.data_seed,
                "published": trainer.published.state_dict(),
                "loss_curve": trainer.loss_curve,
                "counted": _batches_of(trainer, request.stage),
                "progress": trainer.progress_of(request.stage).state_dict(),
                "fitted": fit is not None or request.stage == "fit",  # a rank that served has no loop any more
                "batches_of_epoch": trainer.batches_of_epoch if fit is None else fit.batch_progress.current.completed,
                "gathered": _gathered(module),
            }
        ),
        "seconds": trainer.timing.seconds | {"total": trainer.timing.total, "samples": trainer.timing.samples},
    }


def take(trainer: Trainer, request: Request, state: dict[str, Any]) -> Any:
    """Hold what was ``told``, as if this process had trained. Returns the stage's result."""
    module = request.module
    _take_flags(module, state["flags"])
    for key, owner in _owners(trainer, request).items():
        vars(owner).update(from_safe(state["noted"].get(key, {})))
    counters = from_safe(state["trainer"])
    trainer.loop = None  # the loop ran elsewhere; its counters are taken over below
    counted = counters.pop("counters")
    if request.stage == "fit":
        trainer._adopted = counted
    gathered = counters.pop("gathered")
    if gathered:
        warnings.warn(
            f"what the metrics {', '.join(gathered[:5])} of {type(module).__name__} gathered was left with the workers:"
            " log them, or keep what they compute in an attribute, in a hook such as on_train_epoch_end.",
            stacklevel=2,
        )
    fitted = counters.pop("fitted")
    if not fitted:
        del counters["batches_of_epoch"]
    trainer._counted |= counters.pop("counted")
    trainer.progress_of(request.stage).load_state_dict(counters.pop("progress"))
    trainer.published.load_state_dict(counters.pop("published"))
    curve = [tuple(point) for point in counters.pop("loss_curve")]
    if fitted:
        trainer.loss_curve = curve
        trainer.fitted = True
        seconds = dict(state["seconds"])
        trainer.timing.total, trainer.timing.samples = seconds.pop("total"), int(seconds.pop("samples"))
        trainer.timing.seconds = seconds
    for name, value in counters.items():
        setattr(trainer, name, value)
    for logger, version in zip(trainer.loggers, state["loggers"], strict=True):
        if hasattr(logger, "use_version"):
            logger.use_version(version)  # a later stage writes to the same run
    callbacks = from_safe(state["callbacks"])
    for callback in trainer.callbacks:
        if state_name(callback) in callbacks:
            callback.load_state_dict(callbacks[state_name(callback)])
    return from_safe(state["result"])


def to_those_that_served(trainer: Trainer, request: Request, before: Before, result: Any) -> Any:
    """Those that served hold what came of it too, for what each rank runs, a script under torchrun or the task of a
    run, goes on with other stages. Every rank of the job comes here."""
    everyone, strategy = trainer.strategy.everyone, trainer.strategy
    if request.stage == "fit" and trainer.return_weights:
        for tensor in [*request.module.parameters(), *request.module.buffers()]:
            everyone.broadcast(tensor.detach())
    packed = io.BytesIO()
    if everyone.rank == 0:
        torch.save(told(trainer, request, before, result), packed)
    sent = everyone.broadcast_object(torch.frombuffer(packed.getbuffer(), dtype=torch.uint8) if packed.tell() else None)
    if strategy.trains:
        return result
    return take(trainer, request, torch.load(io.BytesIO(sent.numpy().tobytes()), weights_only=True))


def _gathered(module: TrainModule) -> list[str]:
    """Metrics of ``module`` that were updated since they were reset last, and whose states are none of its weights."""
    torchmetrics = sys.modules.get("torchmetrics")
    return [
        name
        for name, one in module.named_modules()
        if torchmetrics is not None and isinstance(one, torchmetrics.Metric)
        if one.update_called and not all(one._persistent.values())
    ]


def _batches_of(trainer: Trainer, stage: str) -> dict[str, Any]:
    """Batches of the data that ``stage`` read."""
    if stage == "fit":
        return {"train": trainer.num_training_batches, "val": trainer.num_val_batches}
    which = "val" if stage == "validate" else stage
    return {which: getattr(trainer, f"num_{which}_batches")}


def _owners(trainer: Trainer, request: Request) -> dict[str, Any]:
    """The project's objects by a name that both processes know; callbacks of one name cannot be told apart."""
    keys = [state_name(callback) for callback in trainer.callbacks]
    callbacks = {
        f"callback {key}": one for key, one in zip(keys, trainer.callbacks, strict=True) if keys.count(key) == 1
    }
    data = {} if request.datamodule is None else {"datamodule": request.datamodule}
    return {"module": request.module, **data, **callbacks}


def _flags(module: TrainModule) -> dict[str, bool]:
    """Which parameters are trained, and which layers are in training mode, which hooks may have changed."""
    trained = {f"trained {name}": parameter.requires_grad for name, parameter in module.named_parameters()}
    return trained | {f"mode {name}": layer.training for name, layer in module.named_modules()}


def _take_flags(module: TrainModule, flags: dict[str, bool]) -> None:
    parameters, layers = dict(module.named_parameters()), dict(module.named_modules())
    for key, value in flags.items():
        kind, _, name = key.partition(" ")
        if kind == "trained" and name in parameters:
            parameters[name].requires_grad_(value)
        elif kind == "mode" and name in layers:
            layers[name].training = value


def _tensors(owner: Any) -> dict[str, tuple[ReferenceType[torch.Tensor], int]]:
    """Tensors among the attributes of ``owner``, which are not kept alive for it (there is one reference to
    each), with the number of changes made to each in place."""
    tensors = {name: value for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}
    return {name: (ref(value), value._version) for name, value in tensors.items() if not value.is_inference()}


def _noted(owner: Any, given: dict[str, tuple[ReferenceType[torch.Tensor], int]]) -> dict[str, Any]:
    """Public attributes of ``owner`` that are plain data, such as lists of losses, and what it has ``handed_back``; not
    the tensors that are as they were ``given``, which may be the data itself."""
    found = {}
    now = _tensors(owner)
    named = owner.handed_back if isinstance(owner, Callback) else ()
    for name, value in vars(owner).items():
        if name == "training" or (name.startswith("_") and name not in named):
            continue
        if name in now and name in given and now[name][0] is given[name][0] and now[name][1] == given[name][1]:
            continue
        with suppress(CheckpointError):  # no plain data: it stays with the worker
            kept = to_safe(value)
            if type(from_safe(kept)) is type(value):
                found[name] = kept
    return found


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    """What the caller's callbacks take over. A state that is no plain data, or that cannot be asked for after this
    stage (a test, for which a project's callback never made what its state is of), stays with the workers: a run that
    is done must not fail of it."""
    states = {}
    for callback in trainer.callbacks:
        try:
            states[state_name(callback)] = to_safe(callback.state_dict())
        except Exception as error:
            said = f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            warnings.warn(f"the caller's {type(callback).__name__} is not brought up to date: {said}", stacklevel=2)
    return states
