"""Between the caller's process and the workers it starts: what goes in, and what comes back.

Results come back through files, not through shared memory or a queue: rank 0 writes the weights, counters, metrics
and callback states, and what module, data module and callbacks noted in attributes; every rank writes its predictions.
The caller reads them with ``weights_only=True``.
"""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden
from torch.nn.parameter import is_lazy

from drivetrain import late_setup, left_state, seeding
from drivetrain.callback import Callback, state_name
from drivetrain.checkpoint import from_safe, rng, to_safe
from drivetrain.checkpoint.convert import plain_tensor
from drivetrain.errors import CheckpointError
from drivetrain.frame_room import in_one_chunk
from drivetrain.launch import Job, launch
from drivetrain.launch.temporary import temporary_folder
from drivetrain.module import TrainModule
from drivetrain.request import LOADER_OF
from drivetrain.states import TrainerFn

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator
    from drivetrain.request import Request
    from drivetrain.trainer import Trainer


def in_workers(trainer: Trainer, request: Request) -> Any:
    """Run ``request`` in ``trainer.num_devices`` new workers of this node and take over what they did."""
    trainer.lightning_module, trainer.datamodule = request.module, request.datamodule  # also where a worker fails
    for logger in trainer.loggers:
        getattr(logger, "log_dir", None)  # a version is chosen once, here, not by every worker
    with temporary_folder("results") as folder:
        launch(
            _work,
            # Python's random starts anew in a fork, and all generators do where a worker is none.
            {
                "trainer": trainer,
                "request": request,
                "folder": str(folder),
                "random": {**rng.capture(), "cuda": []},
                "seed": seeding.told(),
            },
            workers=trainer.num_devices,
            num_nodes=trainer.num_nodes,
            node_rank=trainer.node_rank,
            master_addr=trainer.master_addr,
            master_port=trainer.master_port,
            accelerator=trainer.accelerator_name,
            backend=trainer.backend,
            timeout=trainer.timeout,
            start_timeout=trainer.start_timeout,
        )
        return _take_over(trainer, request, folder)


def _work(job: Job, payload: dict[str, Any]) -> None:
    from drivetrain import session

    trainer, request, folder = payload["trainer"], payload["request"], Path(payload["folder"])
    trainer.job = job = replace(job, gpus=trainer.gpus)
    rng.restore(payload["random"])
    seeding.tell(payload["seed"])
    given = {key: _tensors(owner) for key, owner in _owners(trainer, request).items()}
    flags = _flags(request.module)
    result = in_one_chunk(session.run, trainer, request, job)
    if request.stage == "predict":
        if result is not None:  # a rank that serves predicts nothing
            torch.save(to_safe(result), folder / f"predictions_{job.rank}.pt")
        result = None
    weights = {}
    changed = request.stage == "fit" or request.ckpt_path is not None  # else they are the caller's own
    if changed and trainer.strategy.trains:
        weights = trainer.full_weights()  # rank 0 hands them over; a strategy that spreads them needs everybody for it
    if job.local_rank == 0:
        module, fit = request.module, trainer.loop
        state = {
            "weights": {name: plain_tensor(tensor).cpu() for name, tensor in weights.items()}
            if trainer.return_weights
            else {},
            "flags": {key: value for key, value in _flags(module).items() if flags.get(key) != value},
            "before_setup": None if request.datamodule is None else to_safe({**trainer.before_setup, "cuda": []}),
            "result": to_safe(result),
            "loggers": [logger.version for logger in trainer.loggers],
            "callbacks": _callback_states(trainer),
            "noted": {key: _noted(owner, given.get(key, {})) for key, owner in _owners(trainer, request).items()},
            "trainer": to_safe(
                {
                    "counters": {} if fit is None else fit.counters(),
                    "status": trainer.status,
                    "should_stop": trainer.should_stop,
                    "ckpt_path": trainer.ckpt_path,
                    "data_seed": trainer.data_seed,
                    "published": trainer.published.state_dict(),
                    "loss_curve": trainer.loss_curve,
                    "counted": _batches_of(trainer, request.stage),
                    "progress": trainer.progress_of(request.stage).state_dict(),
                    "fitted": fit is not None,
                    "batches_of_epoch": 0 if fit is None else fit.batch_progress.current.completed,
                    "gathered": _gathered(module),
                }
            ),
            "seconds": trainer.timing.seconds | {"total": trainer.timing.total, "samples": trainer.timing.samples},
        }
        torch.save(state, folder / "result.pt")
    if request.stage == "fit":
        left_state.leave(trainer, folder)
    trainer.close()


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


def _tensors(owner: Any) -> dict[str, tuple[torch.Tensor, int]]:
    """Tensors among the attributes of ``owner``, with the number of changes made to each in place."""
    tensors = {name: value for name, value in vars(owner).items() if isinstance(value, torch.Tensor)}
    return {name: (value, value._version) for name, value in tensors.items() if not value.is_inference()}


def _noted(owner: Any, given: dict[str, tuple[torch.Tensor, int]]) -> dict[str, Any]:
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


def _take_over(trainer: Trainer, request: Request, folder: Path) -> Any:
    state = torch.load(folder / "result.pt", mmap=True, weights_only=True)
    module = request.module
    trainer.lightning_module, trainer.datamodule, trainer.stage = module, request.datamodule, request.stage
    module.trainer = trainer
    for which in ("train", "val") if request.stage == "fit" else (LOADER_OF[request.stage],):
        trainer._given.pop(which, None)
        trainer._read_elsewhere[which] = request
    if request.datamodule is not None:
        late_setup.owe(request.datamodule, _told(trainer, request), from_safe(state["before_setup"]))
    if state["weights"]:
        _take_weights(trainer, request, state["weights"])
    _take_flags(module, state["flags"])
    for key, owner in _owners(trainer, request).items():
        vars(owner).update(from_safe(state["noted"].get(key, {})))
    counters = from_safe(state["trainer"])
    trainer.loop = None  # the loop ran elsewhere; its counters are taken over below
    counted = counters.pop("counters")
    if request.stage == "fit":
        trainer._adopted = counted
        trainer.left_state = left_state.found(folder, trainer.num_devices)
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
    if request.stage != "predict":
        return from_safe(state["result"])
    files = sorted(folder.glob("predictions_*.pt"))
    if not files:
        return None
    parts: list[list[Any]] = []
    for file in files:
        for number, loader in enumerate(from_safe(torch.load(file, weights_only=True))):
            if number == len(parts):
                parts.append([])
            parts[number].extend(tuple(part) for part in loader)
    return parts


def _take_weights(trainer: Trainer, request: Request, weights: dict[str, torch.Tensor]) -> None:
    """Give the caller's module the workers' weights. Where these set it up to be another one, so it is here first."""
    module = request.module
    if _unlike(module, weights):
        with rng.kept():
            if is_overridden("setup", module, TrainModule):
                if request.datamodule is not None:  # which the module may ask
                    late_setup.pay(request.datamodule)
                module.setup(stage=_told(trainer, request))
            module.configure_model()
    trainer.precision_plugin.convert_module(module)  # as training in this process would have left it
    unlike = _unlike(module, weights)
    if unlike and module.strict_loading:
        warnings.warn(
            f"{type(module).__name__} became another module in the workers than it is here: {', '.join(unlike[:5])} did"
            " not come back; load a checkpoint for them.",
            stacklevel=2,
        )
    module.load_state_dict({name: value for name, value in weights.items() if name not in unlike}, strict=False)


def _told(trainer: Trainer, request: Request) -> Any:
    """The stage as hooks are told it."""
    return TrainerFn(request.stage) if trainer.meanings.stages == "enum" else request.stage


def _unlike(module: TrainModule, weights: dict[str, torch.Tensor]) -> list[str]:
    """The names that only one of both has, or whose shapes differ."""
    own = module.state_dict()
    both = [name for name in own.keys() & weights.keys() if not is_lazy(own[name])]
    return sorted((own.keys() ^ weights.keys()) | {name for name in both if own[name].shape != weights[name].shape})


def gather_predictions(communicator: Communicator, own: Any) -> Any:
    """Every rank's predictions on every rank, in a job that was started elsewhere."""
    if communicator.world_size == 1 or own is None:
        return own
    buffer = io.BytesIO()
    torch.save(to_safe(own), buffer)
    mine = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    sizes = communicator.all_gather_plain(len(mine))
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts: list[list[Any]] = []
    for size, data in zip(sizes, communicator.all_gather(padded.to(communicator.device)), strict=True):
        found = from_safe(torch.load(io.BytesIO(data[:size].cpu().numpy().tobytes()), weights_only=True))
        for number, loader in enumerate(found):
            if number == len(parts):
                parts.append([])
            parts[number].extend(tuple(part) for part in loader)
    return parts
