"""What every worker does: build the module, the data and the Trainer from plain data, run the task, return numbers."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import dependent_options, record, registry
from drivetrain.cli.hints import in_plain_lines
from drivetrain.cli.joined import meeting
from drivetrain.cli.options import TASKS
from drivetrain.cli.resume import CHECKPOINTS
from drivetrain.cli.schema import check_numbers
from drivetrain.declaration import refuse
from drivetrain.dependent_options import Part
from drivetrain.errors import ConfigurationError, IdleOptionWarning, Interrupted
from drivetrain.folders import make_importable
from drivetrain.launch.job import Job
from drivetrain.named_part import accepts, called, named

if TYPE_CHECKING:
    from drivetrain.callback import Callback
    from drivetrain.declaration import Plan
    from drivetrain.logger import Logger
    from drivetrain.trainer import Trainer


def start(job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    """What our launcher starts: :func:`worker`, in the first node's run folder where there are several nodes."""
    if job.num_nodes == 1:
        return worker(job, payload)
    with meeting(job, payload["config"]["launcher"]["start_timeout"]) as others:
        if job.rank == 0:
            others.tell(Path(payload["run_folder"]))
        return worker(job, {**payload, "run_folder": str(others.hear())})


def worker(job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    """Run ``payload["config"]`` (plain containers) in ``payload["run_folder"]``.

    Returns:
        Plain data for ``run.json``: the Trainer's summary with ``status``; the same on every rank. Beside it, as
        ``"hints"``, what this rank told of.
    """
    with in_plain_lines(payload.get("told", ())) as hints:
        # Of options without effect the command told already, in its own words.
        warnings.simplefilter("ignore", IdleOptionWarning)
        return {**_worker(job, payload), "hints": hints}


def _worker(job: Job, payload: dict[str, Any]) -> dict[str, Any]:
    from drivetrain.seeding import seed_everything

    config, folder = payload["config"], Path(payload["run_folder"])
    make_importable()
    # The module draws its first weights in its constructor: seeded before, alike on every rank.
    seed_everything(config["seed"])
    trainer = _trainer(config, folder)
    try:
        module = _module(config)
        data = _made(config["data"], "data", {}) if config.get("data") else None
        _log_choices(trainer, config)
        summary = _run(trainer, module, data, config, folder, _resume(job, payload))
    except BaseException as error:
        if job.rank == 0:
            _leave_trace(folder, payload["record"], trainer, error)
        raise
    for logger in trainer.loggers if trainer.is_global_zero else []:
        logger.finalize(summary["status"])
    trainer.close()
    return summary


def _run(
    trainer: Trainer, module: Any, data: Any, config: Mapping[str, Any], folder: Path, resume: Any
) -> dict[str, Any]:
    trained: dict[str, Any] = {}
    for stage in TASKS[config["task"]]:
        if stage == "fit":
            trainer.fit(module, datamodule=data, ckpt_path=resume)
            # Noted now: testing loads the best weights, which need not be the last.
            trained = {"status": trainer.status, "weights_digest": trainer.run_summary()["weights_digest"]}
            resume = "best" if getattr(trainer.checkpoint_callback, "best_model_path", "") else None
        elif stage == "predict":
            predictions = trainer.predict(module, datamodule=data, ckpt_path=resume)
            if trainer.is_global_zero:
                _save_predictions(predictions, folder)
        else:
            getattr(trainer, stage)(module, datamodule=data, ckpt_path=resume, verbose=False)
    return {"status": trainer.status, **trainer.run_summary(), **trained}


def _log_choices(trainer: Trainer, config: Mapping[str, Any]) -> None:
    """Give the loggers what was chosen; the Trainer adds the module's own hyper-parameters."""
    if not trainer.is_global_zero:
        return
    chosen = {
        "strategy": config["strategy"]["name"],
        "workers": trainer.world_size,
        "precision": config["precision"]["name"],
        "compression": config["compression"]["name"],
        "seed": config["seed"],
        **{
            f"{group}.{name}": value
            for group in ("model", "data", "optimizer", "scheduler")
            for name, value in (config.get(group) or {}).items()
            if not name.startswith("_")
        },
    }
    for logger in trainer.loggers:
        logger.log_hyperparams(chosen)


def _resume(job: Job, payload: Mapping[str, Any]) -> Any:
    """``resume`` as ``ckpt_path``. Workers that were started again look anew for the last one."""
    from drivetrain.checkpoint import Verified

    resume, path = payload["config"]["resume"], payload.get("resume_from")
    return resume if path is None or (resume == "last" and job.attempt) else Verified(Path(path))


def _save_predictions(predictions: Any, folder: Path) -> None:
    """``predictions.pt``: in the order of the data, batch by batch; readable with ``weights_only=True``."""
    import torch

    from drivetrain.checkpoint import to_safe

    torch.save(to_safe(predictions), folder / "predictions.pt")


def _leave_trace(folder: Path, blank: dict[str, Any], trainer: Trainer, error: BaseException) -> None:
    """What is known without asking another rank, which may be gone."""
    stopped = isinstance(error, Interrupted | KeyboardInterrupt | SystemExit)
    known = {
        "status": "interrupted" if stopped else "failed",
        "error": str(error) or type(error).__name__,
        "epochs": trainer.current_epoch,
        "global_step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "loss_curve": [list(point) for point in trainer.loss_curve],
        "seconds": trainer.timing.summary(),
        "checkpoints": {
            "best": getattr(trainer.checkpoint_callback, "best_model_path", "") or None,
            "last": getattr(trainer.checkpoint_callback, "last_model_path", "") or None,
        },
    }
    record.write_if_possible(folder, {**blank, **known})


def _module(config: Mapping[str, Any]) -> Any:
    partials = {key: _Part.of(build(config[key], key), key) for key in ("optimizer", "scheduler") if config.get(key)}
    return _made(config["model"], "model", partials)


class _Part(partial[Any]):
    """An optimizer or scheduler that the module makes: what its class refuses is a mistake in the config."""

    where = ""

    @classmethod
    def of(cls, made: Any, where: str) -> Any:
        if not isinstance(made, partial):
            return made
        part = cls(made.func, *made.args, **made.keywords)
        part.where = where
        return part

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            _check_kinds(self)
            made = super().__call__(*args, **kwargs)
            if self.where == "scheduler":
                _try_a_step(made)
            else:
                _try_its_closure(self)
        except ConfigurationError:  # it says its own
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            given = ", ".join(f"{name}={value}" for name, value in self.keywords.items())
            raise ConfigurationError(f"{self.where} ({given}) is refused: {error}") from error
        return made


def _check_kinds(part: partial[Any]) -> None:
    """Any text counts as true, where torch does not look; and of numbers it says only that texts do not compare."""
    parameters = inspect.signature(part.func).parameters
    for name, value in part.keywords.items():
        usual = parameters[name].default if name in parameters else None
        if isinstance(usual, bool) and not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false")
        if type(usual) in (int, float) and (value is None or isinstance(value, str)):
            raise TypeError(f"{name} must be a number")
        if isinstance(usual, float) and math.isfinite(usual) and isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite")
        if isinstance(usual, tuple) and (not isinstance(value, Sequence) or len(value) != len(usual)):
            raise TypeError(f"{name} must be a list of {len(usual)}")


def _try_its_closure(part: partial[Any]) -> None:
    """torch's LBFGS looks at some of its arguments when it steps first: here on a parameter of no account."""
    import torch

    if part.func is not torch.optim.LBFGS:
        return
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = part.func([weight], *part.args, **part.keywords)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _try_a_step(scheduler: Any) -> None:
    """torch's schedulers look at their arguments when they step first, an epoch into training. This step is undone."""
    import torch

    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return  # steps with a metric only, and looks at its arguments at once
    groups = scheduler.optimizer.param_groups
    state = copy.deepcopy(scheduler.state_dict())
    before = [{name: copy.deepcopy(group[name]) for name in group.keys() - {"params"}} for group in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not stepped yet
        scheduler.step()
    scheduler.load_state_dict(state)
    for group, values in zip(groups, before, strict=True):
        group.update(values)


def _made(group: Mapping[str, Any], where: str, more: Mapping[str, Any]) -> Any:
    """The object of a ``_target_`` config and ``more``, its arguments checked by name."""
    made = build({**group, "_partial_": True}, where)
    arguments, what = {**made.keywords, **more}, f"{where}._target_={group['_target_']}"
    accepts(made.func, arguments, what)
    check_numbers(made.func, made.keywords, where)
    return called(made.func, arguments, what)


def build(group: Mapping[str, Any], where: str) -> Any:
    """Instantiate a ``_target_`` config; Hydra's wrapping of the error is taken off."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(dict(group), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, ImportError | AttributeError):
            first = next(line for line in str(cause or error).splitlines() if line)
            raise ConfigurationError(f"{where}._target_={group.get('_target_')} cannot be imported: {first}") from error
        if isinstance(cause, TypeError) and "argument" in str(cause):
            raise ConfigurationError(f"{where}: {cause}") from error
        raise cause from None


def _trainer(config: Mapping[str, Any], folder: Path) -> Trainer:
    from drivetrain.trainer import Trainer

    options = dict(config["trainer"])
    bare = options["barebones"]
    if bare:  # the config has a value for everything: what it says of extras is not a wish for them
        options.update(log_every_n_steps=None, num_sanity_val_steps=None)
    return Trainer(
        **options,
        strategy=config["strategy"],
        accelerator=config["accelerator"],
        backend=config["backend"],
        seed=config["seed"],
        precision=_precision(config["precision"]),
        compression=config["compression"],
        callbacks=[] if bare else _callbacks(config, folder),
        logger=False if bare else _loggers(config.get("logger"), folder),
        default_root_dir=folder,
        # Named in the config where they are wanted: the Trainer adds none of its own.
        enable_checkpointing=bool(config.get("checkpoint")) and not bare,
        enable_progress_bar="progress_bar" in (config.get("callbacks") or {}) and not bare,
        enable_model_summary=False,
    )


def _precision(group: Mapping[str, Any]) -> Any:
    name = str(group["name"])
    return registry.load("precisions", name)(name, loss_scale=group.get("loss_scale"))


def _callbacks(config: Mapping[str, Any], folder: Path) -> list[Callback]:
    found = [
        part(arguments, key, "callbacks")
        for key, arguments in (config.get("callbacks") or {}).items()
        if arguments is not None
    ]
    checkpoint = dict(config.get("checkpoint") or {})
    if checkpoint:
        dirpath = checkpoint.pop("dir", None) or folder / CHECKPOINTS
        found.append(part({**checkpoint, "dirpath": str(dirpath)}, "checkpoint", "callbacks"))
    return found


def _loggers(group: Mapping[str, Any] | None, folder: Path) -> list[Logger] | bool:
    if not group:
        return False
    # One folder a run: a logger writes to its own folder in it unless its arguments say otherwise.
    return [
        part(arguments, key, "loggers", save_dir=str(folder), name=key, version="")
        for key, arguments in (group or {}).items()
        if arguments is not None
    ]


def part(arguments: Mapping[str, Any], key: str, group: str, **usual: Any) -> Any:
    """A callback or logger: its ``_target_``, else the plugin registered as ``name``, else as ``key``.

    ``usual``: arguments given where the class takes them and ``arguments`` does not hold them.
    """
    if "_target_" in arguments:
        return build(arguments, f"{group}.{key}")
    rest = dict(arguments)
    return named(group, str(rest.pop("name", key)), rest, usual)


def in_vain(config: Mapping[str, Any], plan: Plan) -> list[str]:
    """A sentence for each argument of a registered callback that was set and has no effect in this run."""
    given = [(f"callbacks.{key}", key, one) for key, one in (config.get("callbacks") or {}).items()]
    given.append(("checkpoint", "checkpoint", config.get("checkpoint")))
    parts = []
    for where, key, arguments in given:
        if arguments and "_target_" not in arguments:
            kind = registry.load("callbacks", str(arguments.get("name", key)))
            defaults = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
            parts.append(Part(getattr(kind, "dependents", ()), {**defaults, **arguments}, defaults, where))
    return dependent_options.in_vain(plan, parts)


def refuse_parts(config: Mapping[str, Any], plan: Plan) -> None:
    """Raise :class:`ConfigurationError` where the classes that are chosen do not go together: known before there are
    workers, who would find it when they make the objects."""
    from drivetrain.optimizer import calls_closures

    _precision(config["precision"])
    made = build(config["optimizer"], "optimizer") if config.get("optimizer") else None
    if "fit" in plan.stages and isinstance(made, partial) and inspect.isclass(made.func):
        declaration = registry.load("strategies", plan.strategy)
        refuse(replace(plan, closures=calls_closures(made.func)), declaration)


PLACES = {"callbacks": "callbacks", "loggers": "logger"}  # groups of the config, by those of the registry


def preload(config: Mapping[str, Any]) -> None:
    """Import, in the parent, what every worker needs, so that a fork has it: no object is made, nothing is computed.

    Raises:
        ConfigurationError: a callback or logger does not take an argument it is given, or takes a number there.
    """
    importlib.import_module("drivetrain.trainer")
    given = dict(config["strategy"])
    declaration = registry.load("strategies", given.pop("name"))
    importlib.import_module(declaration.implementation_for(declaration.options(**given)).partition(":")[0])
    registry.load("precisions", config["precision"]["name"])
    registry.load("compressors", config["compression"]["name"]).preload()
    checkpoint = {key: value for key, value in (config.get("checkpoint") or {}).items() if key != "dir"}
    for group, parts in (
        ("callbacks", {**(config.get("callbacks") or {}), "checkpoint": checkpoint or None}),
        ("loggers", config.get("logger") or {}),
    ):
        for key, arguments in parts.items():
            if arguments is not None and "_target_" not in arguments:
                rest = {name: value for name, value in arguments.items() if name != "name"}
                name = str(arguments.get("name", key))
                kind = registry.load(group, name)
                accepts(kind, rest, f"{group} {name!r}")
                check_numbers(kind, rest, key if key == "checkpoint" else f"{PLACES[group]}.{key}")
