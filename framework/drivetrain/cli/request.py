"""From a composed config to a request that can be carried out, or one sentence why not. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drivetrain import registry
from drivetrain.arguments import in_seconds
from drivetrain.cli import objective
from drivetrain.cli.accelerators import gpu_count
from drivetrain.cli.options import TASKS, JobOptions, LauncherOptions, TrainerOptions
from drivetrain.cli.schema import checked, written
from drivetrain.compressor import NONE, compression_of
from drivetrain.declaration import Declaration, Plan, refuse
from drivetrain.dependent_arguments import DEPENDENTS
from drivetrain.dependent_options import Part, in_vain, of_options
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.folders import make_importable, refuse_unwritable
from drivetrain.launch.job import Job

PART_GROUPS = {"callbacks": "callbacks", "logger": "loggers"}


@dataclass(frozen=True)
class Request:
    """What will be run. Plain data but for ``plan.options``.

    Attributes:
        job: the top-level keys.
        launcher: how local workers are started.
        trainer: the Trainer's keyword arguments.
        plan: what the strategy's declaration accepted.
        workers: processes on this node.
        config: the whole config as plain containers, interpolations resolved.
        resume_from: the checkpoint that ``job.resume`` means, once it was found whole.
        in_vain: a sentence for each option that was set and has no effect in this run.
    """

    job: JobOptions
    launcher: LauncherOptions
    trainer: TrainerOptions
    plan: Plan
    workers: int
    config: dict[str, Any]
    resume_from: str | None = None
    in_vain: tuple[str, ...] = ()


def check(config: DictConfig, joined: Job | None = None) -> Request:
    """Refuse everything that can be known to fail before a process starts.

    Args:
        config: the composed config, without Hydra's own node.
        joined: this process's place, when torchrun, srun or mpirun started it.

    Raises:
        ConfigurationError: one sentence (a line for each conflict).
    """
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    values = {str(key): value for key, value in plain.items()}
    top = {key: value for key, value in values.items() if key in JobOptions.__dataclass_fields__}
    job = checked(JobOptions, top)
    objective.names(job.objective)
    if job.node_rank >= job.num_nodes:
        raise ConfigurationError(
            f"node_rank={job.node_rank} must be less than num_nodes={job.num_nodes}: nodes count from 0"
        )
    trainer = checked(TrainerOptions, _group(values, "trainer"), "trainer")
    if trainer.max_time is not None:
        in_seconds("trainer.max_time", trainer.max_time, zero=True)
    launcher = checked(LauncherOptions, _group(values, "launcher"), "launcher")
    declaration, options = _strategy(_group(values, "strategy"))
    precision = _precision(_group(values, "precision"))
    compressor, compression = compression_of(_group(values, "compression") or None)
    for group in PART_GROUPS:
        _parts(values.get(group), group)
    values["checkpoint"] = _checkpoint(values.get("checkpoint"))
    for group in ("model", "data", "optimizer", "scheduler"):
        _target(values.get(group), group, needed=group == "model")
    _resume(job.resume)
    accelerator, workers = _workers(job, declaration, joined)
    plan = Plan(
        strategy=declaration.name,
        options=options,
        world_size=joined.world_size if joined else workers * job.num_nodes,
        num_nodes=joined.num_nodes if joined else job.num_nodes,
        accelerator=accelerator,
        backend=_backend(job, accelerator),
        precision=precision,
        accumulation=trainer.accumulate_grad_batches,
        clip_value=trainer.gradient_clip_val or None,
        clip_algorithm=trainer.gradient_clip_algorithm or "norm",
        compile=bool(trainer.compile),
        batch=trainer.batch,
        val_check_interval=1.0 if trainer.val_check_interval is None else trainer.val_check_interval,
        check_val_every_n_epoch=trainer.check_val_every_n_epoch,
        stages=TASKS[job.task],
        compression=compressor.name,
        compression_options=compression,
        arguments={**_arguments(trainer, launcher, job, compressor.name), "joined": joined is not None},
    )
    refuse(plan, declaration)
    idle = in_vain(
        plan,
        [
            of_options("strategy", options, declaration.dependents),
            of_options("compression", compression, compressor.dependents),
            Part(DEPENDENTS, plan.arguments, _arguments(*_DEFAULTS)),
        ],
        NAMES,
    )
    # The worker reads options with the schema's types and defaults, not what was typed.
    values |= {"trainer": asdict(trainer), "launcher": asdict(launcher), **asdict(job)}
    values |= {"accelerator": plan.accelerator, "backend": plan.backend}
    values["strategy"] = {"name": declaration.name, **asdict(options)}
    values["compression"] = {"name": compressor.name, **asdict(compression)}
    return Request(job, launcher, trainer, plan, workers, values, in_vain=tuple(idle))


_DEFAULTS = (TrainerOptions(), LauncherOptions(), JobOptions())
NAMES = {
    item.name: f"{where}.{item.name}"
    for where, options in (("trainer", TrainerOptions), ("launcher", LauncherOptions))
    for item in fields(options)
}


def _arguments(
    trainer: TrainerOptions, launcher: LauncherOptions, job: JobOptions, compression: str = NONE
) -> dict[str, Any]:
    """What a plan's ``arguments`` are of a command line."""
    return {**asdict(trainer), **asdict(launcher), **asdict(job), "compression": compression}


def check_writable(folder: Path) -> None:
    """Refuse a run folder that cannot be made, without making it."""
    refuse_unwritable(folder, "the run folder", "another with hydra.run.dir=FOLDER")


def _group(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    group = values.get(name)
    if group is None:
        return {}
    if not isinstance(group, dict):
        raise ConfigurationError(f"{name}={group} is not a choice of the group {name}: see --help for its choices")
    return {str(key): value for key, value in group.items()}


def _strategy(group: dict[str, Any]) -> tuple[Declaration, Any]:
    name = group.pop("name", None)
    if not isinstance(name, str):
        raise ConfigurationError("strategy.name must be given: choose one with strategy=NAME")
    declaration = registry.load("strategies", name)
    if not isinstance(declaration, Declaration):
        raise ConfigurationError(
            f"strategy {name!r} is registered as a {type(declaration).__name__}:"
            " its package must register a drivetrain.declaration.Declaration"
        )
    return declaration, checked(declaration.options, group, "strategy")


def _precision(group: dict[str, Any]) -> str:
    name = str(group.get("name", "32-true"))
    registry.entry("precisions", name)
    for key in group:
        if key not in {"name", "loss_scale"}:
            raise ConfigurationError(f"there is no option 'precision.{key}': {nearest(key, ['name', 'loss_scale'])}")
    scale = group.get("loss_scale")
    if not (scale in (None, "dynamic") or (isinstance(scale, int | float) and scale > 0)):
        raise ConfigurationError(f"precision.loss_scale={scale} must be a number greater than 0, dynamic or null")
    return name


def _parts(group: Any, where: str) -> None:
    """Callbacks or loggers: ``{key: null | arguments}``, built from ``_target_``, else ``name``, else the key."""
    if group is None:
        return
    if not isinstance(group, dict):
        raise ConfigurationError(f"{where}={group} is not a choice of the group {where}: see --help for its choices")
    for key, arguments in group.items():
        if arguments is None:
            continue
        if not isinstance(arguments, dict):
            raise ConfigurationError(
                f"{where}.{key}={written(arguments)} must be null or the arguments of a registered name or a _target_"
            )
        if "_target_" in arguments:
            _target(arguments, f"{where}.{key}", needed=True)
        else:
            registry.entry(PART_GROUPS[where], str(arguments.get("name", key)))


def _checkpoint(group: Any) -> dict[str, Any] | None:
    """The group, or None where no callback is named: a recipe may have said what to monitor beside checkpoint=none."""
    if group is None:
        return None
    if not isinstance(group, dict):
        raise ConfigurationError(f"checkpoint={group} is not a choice of the group checkpoint: see --help")
    if "_target_" not in group:
        if group.get("name") is None:
            return None
        registry.entry("callbacks", str(group["name"]))
    if group.get("dir") is not None:
        refuse_unwritable(Path(str(group["dir"])), "checkpoint.dir", "another")
    return group


def _target(group: Any, where: str, needed: bool) -> None:
    if group is None and not needed:
        return
    target = group.get("_target_") if isinstance(group, dict) else None
    if group is None or (not group and needed):
        raise ConfigurationError(f"no {where} is chosen: use recipe=NAME or {where}=NAME")
    if not isinstance(target, str) or not target.strip("."):
        if not group and not needed:
            return
        raise ConfigurationError(f"{where} has no _target_: write {where}._target_=package.module.Class")
    make_importable()
    package = target.partition(".")[0]
    # Only the top package is looked for: finding a submodule would import its parents, and they may import torch.
    try:
        found = find_spec(package)
    except ValueError:
        found = None
    if found is None:
        raise ConfigurationError(
            f"{where}._target_={target}: there is no package {package!r} here; install it or start from its folder"
        )


def _resume(resume: str | None) -> None:
    if resume in (None, "auto", "last", "best"):
        return
    place, instead = Path(str(resume)), "give a checkpoint, a run folder, or auto, last or best"
    try:
        there = place.exists()
    except OSError as error:
        raise ConfigurationError(f"resume={resume}: {(error.strerror or str(error)).lower()}: {instead}") from error
    if not there:
        raise ConfigurationError(f"resume={resume} does not exist: {instead}")
    signs = ("manifest.json", "run.json", "checkpoints", "*/manifest.json", "*.ckpt")  # the last two: a folder of them
    if place.is_dir() and not any(any(place.glob(sign)) for sign in signs):
        raise ConfigurationError(f"resume={resume} is neither a checkpoint nor a run folder: {instead}")


def _workers(job: JobOptions, declaration: Declaration, joined: Job | None) -> tuple[str, int]:
    gpus = gpu_count()
    accelerator = job.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if gpus and "cuda" in declaration.support.accelerators else "cpu"
    if accelerator == "cuda" and not gpus:
        raise ConfigurationError("accelerator=cuda but no GPU can be used here: use accelerator=cpu")
    if joined is not None:
        workers = _joined_workers(job, joined)
    elif isinstance(job.devices, int):
        workers = job.devices
    else:
        workers = gpus if accelerator == "cuda" else 2
        most = declaration.support.max_world_size
        if most is not None:
            workers = max(1, min(workers, most // job.num_nodes))
    if accelerator == "cuda" and workers > gpus:
        raise ConfigurationError(
            f"{workers} workers need {workers} GPUs but this machine has {gpus}: use devices={gpus} or accelerator=cpu"
        )
    return accelerator, workers


def _joined_workers(job: JobOptions, joined: Job) -> int:
    for key, asked, present in (
        ("devices", job.devices, joined.local_world_size),
        ("num_nodes", job.num_nodes if job.num_nodes > 1 else None, joined.num_nodes),
    ):
        if asked not in (None, "auto", present):
            raise ConfigurationError(f"{key}={asked} but {joined.origin} started {present}: leave {key} out")
    return joined.local_world_size


def _backend(job: JobOptions, accelerator: str) -> str:
    if job.backend == "nccl" and accelerator == "cpu":
        raise ConfigurationError("backend=nccl needs GPUs: use backend=gloo or accelerator=cuda")
    return job.backend or ("nccl" if accelerator == "cuda" else "gloo")
