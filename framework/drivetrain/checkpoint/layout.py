"""Lightning's checkpoint dictionary: its loops' counters, optimizer states by position, plain hyper-parameters.

Read and written without Lightning. Under the keys that both sides know lies what both understand; what Lightning has no
place for (random generators of every rank, the position in the data, sums of the epoch) lies under one key of ours,
which Lightning passes over.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch

from drivetrain.checkpoint.convert import from_safe, to_safe
from drivetrain.checkpoint.kept_hyperparameters import write_hyperparameters
from drivetrain.config_containers import is_config
from drivetrain.errors import CheckpointError
from drivetrain.named_optimizer import packed_again, renamed

OURS = "drivetrain"
VERSION_KEY = "pytorch-lightning_version"
VERSION = "2.6.0"  # of the layout: Lightning brings files of older versions up to date by it
SCALER = "MixedPrecision"
HPARAMS, HPARAMS_NAME, HPARAMS_TYPE = "hyper_parameters", "hparams_name", "hparams_type"
DATA_HPARAMS, DATA_HPARAMS_NAME = "datamodule_hyper_parameters", "datamodule_hparams_name"
RUN = ("automatic", "length", "validation", "window")
# What a checkpoint of drivetrain has under these keys is composed anew.
KNOWN = frozenset(
    {
        *("epoch", "global_step", "state_dict", "loops", "run", "callbacks", "optimizer_states", "lr_schedulers"),
        *("precision", "metrics", "datamodule", "drivetrain_version", HPARAMS, HPARAMS_NAME),
        *(DATA_HPARAMS, DATA_HPARAMS_NAME),
    }
)


# -- the whole --------------------------------------------------------------------------------------------------
def compose(shared: Mapping[str, Any], owns: list[torch.Tensor], strategy: str) -> dict[str, Any]:
    """The dictionary for what a checkpoint of drivetrain holds.

    Args:
        shared: the state that all ranks share; its tensors are whole.
        owns: what belongs to each rank, each packed by :func:`pack`.
        strategy: name of the run's strategy.
    """
    content: dict[str, Any] = {
        "epoch": shared["epoch"],
        "global_step": shared.get("loops", {}).get("optimizer_steps", shared["global_step"]),
        VERSION_KEY: VERSION,
        "state_dict": shared["state_dict"],
    }
    ours: dict[str, Any] = {"version": version("drivetrain"), "strategy": strategy}
    if "loops" in shared:
        run = shared["run"]
        content["loops"] = loops(shared["loops"], **{name: run[name] for name in RUN})
        if "optimizer_states" in shared:
            packed = [by_position(named) for named in shared["optimizer_states"]]
            content["callbacks"] = dict(shared["callbacks"])
            content["optimizer_states"] = [state for state, _ in packed]
            content["lr_schedulers"] = list(shared["lr_schedulers"])
            if scaler := shared["precision"].get("scaler"):
                content[SCALER] = scaler
        if "metrics" in shared:  # else nothing was trained, and the file is as Lightning's
            ours |= {
                "world_size": len(owns),
                "own": owns,
                "parameters": [order for _, order in packed],
                "loops": to_safe({name: value for name, value in shared["loops"].items() if name != "loaders"}),
                "metrics": to_safe(shared["metrics"]),
            }
    if (data := shared.get("datamodule")) and "run" in shared:
        content[shared["run"]["datamodule"]] = data
    for key, name_key in ((HPARAMS, HPARAMS_NAME), (DATA_HPARAMS, DATA_HPARAMS_NAME)):
        if shared.get(key):
            if name_key in shared:
                content[name_key] = shared[name_key]
            content[key], rest = write_hyperparameters(shared[key], key)
            if rest:
                ours[key] = rest
    if content.get(HPARAMS_NAME) not in (None, "kwargs"):  # one configuration, whose parts are its attributes
        content[HPARAMS_TYPE] = type(shared[HPARAMS]).__name__ if is_config(shared[HPARAMS]) else "AttributeDict"
    content[OURS] = ours
    return content


def pack(own: Mapping[str, Any]) -> torch.Tensor:
    """One rank's part as bytes in a tensor, which is how they travel and lie in the file."""
    buffer = io.BytesIO()
    torch.save(to_safe(dict(own)), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> dict[str, Any]:
    """The inverse of :func:`pack`.

    Raises:
        CheckpointError: the bytes are none that :func:`pack` gave.
    """
    try:
        own = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"the part of one rank in the checkpoint cannot be read ({error})") from error
    return dict(from_safe(own))


# -- where training stands --------------------------------------------------------------------------------------
def _tracker(done: int, finished: int | None = None, *, short: bool = False, started: bool = True) -> dict[str, int]:
    counts = {"ready": done, "completed": done if finished is None else finished}
    if started:
        counts["started"] = done
    return counts if short else counts | {"processed": done}


def loops(state: Mapping[str, Any], *, automatic: bool, length: int, validation: int, window: int) -> dict[str, Any]:
    """Lightning's counters for a fit loop's ``state_dict``.

    Args:
        automatic: whether the loop steps the optimizer (else the module does).
        length: batches of an epoch, 0 where unknown.
        validation: batches of a validation, 0 without any.
        window: micro-batches of an optimizer step.
    """
    epoch, batch, windows, seen = (state[key] for key in ("epoch", "batch", "global_step", "batches_seen"))
    steps = state.get("optimizer_steps", windows)
    between = batch == 0 and not state["ended"]  # an epoch is over and the next has not begun
    within = not between and not state["ended"]
    begun, processed = epoch + (not between), epoch + state["ended"]
    current = (length if epoch else 0) if between else batch
    lag = 1 if within and not state["validated"] else 0  # Lightning counts a batch when its last hook has run
    last = bool(state["is_last_batch"]) or (between and epoch > 0)
    validated = validation if state["validated"] or state["ended"] or (between and epoch > 0) else 0
    measured = validation if epoch else validated  # by the validation before
    stepped = (windows if automatic else seen) - (1 if within and seen else 0)
    optimizer, recent = (steps, math.ceil(current / max(1, window))) if automatic else (0, 0)
    by_hand = 0 if automatic else steps
    epochs = {"ready": begun, "completed": epoch, "started": begun, "processed": processed}

    def pair(total: dict[str, int], now: dict[str, int], **more: Any) -> dict[str, Any]:
        return {"total": total, "current": now, **more}

    def idle(**more: Any) -> dict[str, Any]:
        return {"state_dict": {}, "batch_progress": pair(_tracker(0), _tracker(0), **more)}

    return {
        "fit_loop": {
            "state_dict": {"combined_loader": list(state["loaders"])} if state.get("loaders") else {},
            "epoch_loop.state_dict": {"_batches_that_stepped": stepped},
            "epoch_loop.batch_progress": pair(
                _tracker(seen, seen - lag), _tracker(current, current - lag), is_last_batch=last
            ),
            "epoch_loop.scheduler_progress": pair(
                *(_tracker(count, short=True, started=False) for count in state.get("schedules", (0, 0)))
            ),
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": pair(
                        _tracker(optimizer, short=True, started=False), _tracker(recent, short=True, started=False)
                    ),
                    "zero_grad": pair(_tracker(optimizer, short=True), _tracker(recent, short=True)),
                }
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": pair(
                _tracker(by_hand, short=True, started=False), _tracker(by_hand, short=True, started=False)
            ),
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": pair(
                _tracker(validated), _tracker(measured), is_last_batch=measured > 0
            ),
            "epoch_progress": pair(dict(epochs), dict(epochs)),
        },
        "validate_loop": idle(is_last_batch=False),
        "test_loop": idle(is_last_batch=False),
        "predict_loop": idle(),
    }


def position(content: Mapping[str, Any]) -> dict[str, Any]:
    """A fit loop's ``state_dict`` from the counters of a file that Lightning wrote.

    A file of the epoch's last hooks counts as one of the epoch's end: the metrics that were still to be acted upon
    are not in it.
    """
    fit = content["loops"]["fit_loop"]
    epochs, batches = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
    now = batches["current"]
    within = epochs["processed"] < epochs["ready"] and now["processed"] > 0
    # Lightning counts a batch on which optimizers stepped when validation after it is over.
    uncounted = within and now["ready"] == now["processed"]
    schedules = fit.get("epoch_loop.scheduler_progress", {})
    return {
        "epoch": epochs["processed"],
        "batch": now["processed"] if within else 0,
        "global_step": fit["epoch_loop.state_dict"]["_batches_that_stepped"] + uncounted,
        "optimizer_steps": content["global_step"],
        "validated": within and now["completed"] == now["processed"],
        "ended": False,
        "logged": fit["epoch_loop.state_dict"]["_batches_that_stepped"] + uncounted,
        "plateau_due": False,
        "schedules": [schedules.get(which, {}).get("completed", 0) for which in ("total", "current")],
        "stop": False,
        "is_last_batch": bool(batches["is_last_batch"]) if within else False,
        "batches_seen": batches["total"]["processed"],
        "seconds": 0.0,
        "loss_curve": [],
        "loaders": list(fit.get("state_dict", {}).get("combined_loader", [])),
    }


# -- optimizers -------------------------------------------------------------------------------------------------
def by_position(named: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """An optimizer's state by parameter name as torch's own, by position; and the names in that order."""
    order = [name for group in named["param_groups"] for name in group["params"]]
    place = {name: index for index, name in enumerate(order)}
    groups = [{**group, "params": [place[name] for name in group["params"]]} for group in named["param_groups"]]
    state = {place[name]: value for name, value in named["state"].items()}
    return packed_again(named, state, groups), order


def by_name(packed: Mapping[str, Any], order: list[str]) -> dict[str, Any]:
    """The inverse of :func:`by_position`.

    Raises:
        CheckpointError: the optimizer had another number of parameters.
    """
    if "param_groups" not in packed:  # in a form of its own, which only the optimizer can count
        return renamed(packed, dict(enumerate(order)))
    indices = [index for group in packed["param_groups"] for index in group["params"]]
    if len(indices) != len(order):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(indices)} parameters, this one has {len(order)}: configure the same"
            " or load the weights only."
        )
    return renamed(packed, dict(zip(indices, order, strict=True)))


# -- tensors --------------------------------------------------------------------------------------------------------
def replace_tensors(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in its dictionaries and lists replaced by ``convert`` of it."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if type(value) in (dict, OrderedDict):
        copy = type(value)((key, replace_tensors(inner, convert)) for key, inner in value.items())
        if hasattr(value, "_metadata"):  # versions of the modules whose weights these are
            copy._metadata = value._metadata
        return copy
    if type(value) in (list, tuple):
        return type(value)(replace_tensors(inner, convert) for inner in value)
    return value
