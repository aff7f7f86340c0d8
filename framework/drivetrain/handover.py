"""Between the caller's process and the workers it starts: what goes in, and what comes back.

Results come back through files, not through shared memory or a queue: rank 0 writes the weights and what came of the
stage (:mod:`drivetrain.outcome`); every rank writes its predictions. The caller reads them with ``weights_only=True``.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.overrides import is_overridden
from torch.nn.parameter import is_lazy

from drivetrain import late_setup, left_state, outcome, seeding
from drivetrain.checkpoint import from_safe, rng, to_safe
from drivetrain.checkpoint.convert import plain_tensor
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
    before = outcome.before(trainer, request)
    result = in_one_chunk(session.run, trainer, request, job)
    if request.stage == "predict":
        if result is not None:  # a rank that serves predicts nothing
            torch.save(to_safe(result), folder / f"predictions_{job.rank}.pt")
        result = None
    hands_on = trainer.strategy.hands_on and job.num_nodes > 1  # else the caller asks the first rank only
    if hands_on:
        result = outcome.to_those_that_served(trainer, request, before, result)
    weights = {}
    changed = request.stage == "fit" or request.ckpt_path is not None  # else they are the caller's own
    if changed and (trainer.strategy.trains or hands_on):
        weights = trainer.full_weights()  # rank 0 hands them over; a strategy that spreads them needs everybody for it
    if job.local_rank == 0:
        state = outcome.told(trainer, request, before, result) | {
            "weights": {name: plain_tensor(tensor).cpu() for name, tensor in weights.items()}
            if trainer.return_weights
            else {},
            "before_setup": None if request.datamodule is None else to_safe({**trainer.before_setup, "cuda": []}),
        }
        torch.save(state, folder / "result.pt")
    if request.stage == "fit":
        left_state.leave(trainer, folder)
    trainer.close()


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
    if request.stage == "fit":
        trainer.left_state = left_state.found(folder, trainer.num_devices)
    result = outcome.take(trainer, request, state)
    if request.stage != "predict":
        return result
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
