"""Run one checked request: start the workers or join those that are there, and leave the run record."""

from __future__ import annotations

import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain import record
from drivetrain.cli.hints import in_plain_lines
from drivetrain.cli.joined import logged
from drivetrain.cli.request import Request
from drivetrain.dependent_options import tell
from drivetrain.errors import DrivetrainError, Interrupted, WorkerError
from drivetrain.folders import held
from drivetrain.launch.failure import in_a_line
from drivetrain.launch.job import Job

LOGS = "logs"


def execute(
    request: Request, folder: Path, recipe: str, joined: Job | None = None, told: set[str] | None = None
) -> dict[str, Any]:
    """Run ``request`` in ``folder`` and return its record, which also lies there as ``run.json`` (rank 0).

    Args:
        request: what :func:`drivetrain.cli.request.check` returned.
        folder: the run folder, which exists.
        recipe: the choice of the group ``recipe``, for the record.
        joined: this process's place, when it is itself a worker.
        told: hints of the sweep's earlier jobs, which are not repeated; this one's are added.

    Raises:
        DrivetrainError: the run failed; the record says so too.
    """
    plan = request.plan
    blank = record.blank(
        strategy=plan.strategy,
        world_size=plan.world_size,
        devices=request.workers,
        num_nodes=plan.num_nodes,
        seed=request.job.seed,
        recipe=recipe,
        compression=plan.compression,
    )
    first = joined.rank == 0 if joined else request.job.node_rank == 0
    with held(folder) if first else nullcontext():
        if first:
            _tell_of_earlier_run(request, folder)
        return _execute(request, folder, blank, joined, first, set() if told is None else told)


def _tell_of_earlier_run(request: Request, folder: Path) -> None:
    """Curves of TensorBoard and checkpoints of two runs in one folder cannot be told apart."""
    left = any(any((folder / name).glob("*")) for name in ("checkpoints", "tensorboard"))
    if left and "fit" in request.plan.stages and request.job.resume is None:
        with in_plain_lines():
            warnings.warn(
                f"{folder} holds an earlier run, whose curves and checkpoints stay there beside this one's: go on from"
                " it with resume=auto, or choose another folder with hydra.run.dir=FOLDER.",
                stacklevel=2,
            )


def _tell_of_idle_options(request: Request, told: set[str]) -> list[str]:
    """Before there are workers, and not again in a sweep; gives what was told."""
    from drivetrain.cli.worker import in_vain

    with in_plain_lines(told) as hints:
        tell([*request.in_vain, *in_vain(request.config, request.plan)])
    return hints


def _execute(
    request: Request, folder: Path, blank: dict[str, Any], joined: Job | None, first: bool, told: set[str]
) -> dict[str, Any]:
    payload: dict[str, Any] = {
        **{"config": request.config, "run_folder": str(folder), "record": blank, "told": sorted(told)},
        "resume_from": request.resume_from,
    }
    began = time.perf_counter()
    try:
        if first:
            told.update(_tell_of_idle_options(request, told))
        summary = _join(joined, request, payload) if joined else _launch(request, payload)
    except (Interrupted, KeyboardInterrupt) as error:
        # Python's own comes while this process imports and looks at the module, before it waits for workers.
        stop = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        if first:
            _close(folder, blank, "interrupted", str(stop), began)
        raise stop from (None if stop is error else error)
    except BaseException as error:
        if first:
            _close(folder, blank, "failed", _sentence(error), began)
        raise
    told.update(summary.get("hints", ()))
    result = {**blank, **{name: value for name, value in summary.items() if name != "hints"}}
    if first:
        record.write(folder, result)
    return result


def _launch(request: Request, payload: dict[str, Any]) -> Mapping[str, Any]:
    from drivetrain.cli.look import refuse_module
    from drivetrain.cli.worker import preload, refuse_parts, start
    from drivetrain.launch import launch

    preload(request.config)
    refuse_parts(request.config, request.plan)
    refuse_module(request, Path(payload["run_folder"]))
    several = request.job.num_nodes > 1
    with _frames_cleared():
        values = launch(
            start,
            payload,
            workers=request.workers,
            num_nodes=request.job.num_nodes,
            node_rank=request.job.node_rank,
            master_addr=request.job.master_addr,
            # One node takes any free port, so that starts in a row never clash.
            master_port=request.job.master_port if several else 0,
            accelerator=request.plan.accelerator,
            backend=request.plan.backend,
            log_dir=Path(payload["run_folder"]) / LOGS,
            timeout=request.launcher.timeout,
            start_timeout=request.launcher.start_timeout,
            max_restarts=request.launcher.max_restarts,
        )
    summary = values[min(values)]
    return summary if isinstance(summary, dict) else {}


@contextmanager
def _frames_cleared() -> Iterator[None]:
    """Hydra keeps the error of a sweep's job. Its frames would keep the launcher's store, a thread and a port, and the
    next job could not be forked."""
    try:
        yield
    except BaseException as error:
        one: BaseException | None = error
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        raise


def _join(joined: Job, request: Request, payload: dict[str, Any]) -> Mapping[str, Any]:
    from drivetrain.cli.worker import worker
    from drivetrain.launch import handling, set_current_job

    job = place(joined, request)
    set_current_job(job)
    try:
        with handling(), logged(Path(payload["run_folder"]) / LOGS, job.rank):
            try:
                return worker(job, payload)
            except DrivetrainError:
                raise
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                raise WorkerError(f"rank {job.rank} failed: {in_a_line(error)}", rank=job.rank) from error
    finally:
        set_current_job(None)


def place(joined: Job, request: Request) -> Job:
    """``joined`` with what the environment of its launcher does not say."""
    return replace(
        joined,
        accelerator=request.plan.accelerator,
        backend=request.plan.backend,
        timeout=request.launcher.timeout,
    )


def _close(folder: Path, blank: dict[str, Any], status: str, error: str, began: float) -> None:
    """Complete what rank 0 left behind, or write the first record of a run that never got so far."""
    known = record.read(folder) if (folder / record.FILE).exists() else blank
    known["seconds"] = {**known["seconds"], "total": time.perf_counter() - began}
    record.write_if_possible(folder, {**known, "status": status, "error": error})


def _sentence(error: BaseException) -> str:
    text = str(error).splitlines()
    if isinstance(error, DrivetrainError) and text:
        return text[0]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
