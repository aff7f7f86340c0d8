"""What the same words mean where drivetrain and Lightning differ: one declaration, read by the parts that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Meanings:
    """The meanings of a Trainer's words. The defaults are drivetrain's own.

    Attributes:
        batch: what a loader's batch is: ``"global"`` (the step's, of which each replica reads a part) or
            ``"per_process"`` (each replica gets one of that size).
        cpu_workers: what ``devices="auto"`` means where there are no GPUs and the strategy takes several workers.
        log_over_ranks: whether ``self.log`` reduces over ranks by itself; else only with ``sync_dist=True``, and each
            rank knows its own value otherwise.
        pools_loaders: whether one name may be logged over several loaders (``add_dataloader_idx=False``), as one
            metric.
        figures: how exact metrics are that are made known: ``"double"``, or as torch's default type (``"default"``)
            where what was logged was not of double precision.
        steps: what ``global_step`` counts: ``"batch"`` (a batch on which optimizers stepped) or ``"optimizer"`` (every
            step of every optimizer).
        order: where the order of a shuffled loader comes from: ``"seed"`` (a seed of its own and the epoch) or
            ``"torch"`` (under ``single`` the loader draws from torch's generator, as in a loop by hand; else the order
            is that of a ``DistributedSampler`` of the run's seed).
        starts: where the random numbers of a stage begin under a distributed strategy, in which data is split and
            models are built by hooks: ``"script"`` (where the script's were) or ``"seed"`` (anew with that of
            ``seed_everything``, where it was called).
        builds: where ``configure_model`` makes tensors and draws their random numbers: on the ``"host"``, the same for
            every accelerator, or on the ``"device"``.
        loaders: when ``fit`` asks for its loaders: ``"first"`` (before optimizers are configured, so that what is wrong
            with them shows at once) or ``"needed"`` (when they are first read).
        window: what the micro-batches of an optimizer step weigh: ``"samples"`` or, each the same, ``"batches"``.
        moments: what validation, the end of training and monitors of training wait for where they fall due within an
            accumulation window: ``"step"`` (the window's optimizer step) or ``"batch"`` (only the batch).
        frequency: over what the ``frequency`` of a schedule of interval ``"step"`` counts optimizer steps: ``"run"`` or
            ``"epoch"`` (it begins again in each).
        stages: in what words hooks are told the stage: ``"text"`` (``"fit"``) or ``"enum"`` (a
            :class:`drivetrain.states.TrainerFn`, which is equal to that text).
        modes: what ``fit`` does to the module's mode: ``"train"`` (all of it trains) or ``"kept"`` (what was put into
            evaluation mode stays there, as in frozen parts).
        checks_resumed: whether a run resumed at an epoch's end has a sanity check, too, unless steps limit it.
        stays_stopped: whether a run that was asked to stop (by early stopping) remains so when it is resumed from a
            checkpoint made after that; else it goes on to its limits, or until it is asked anew.
        examples: whether the passes with ``example_input_array`` whose results are only shown (the model summary's, the
            logged graph's) leave the random state as it was (``"kept"``) or, in one process, not (``"drawn"``).
        extra_keys: what becomes of keys of ``configure_optimizers`` that mean nothing: ``"raise"`` or ``"warn"``.
        trials: whether the trial of a rate range test is training only (``"train"``) or has its validations, too
            (``"validate"``).
        truths: what True and False are where a number is asked for: ``"refused"`` or ``"numbers"`` (1 and 0).
        nonfinite: the default for a loss that is not finite: ``"raise"`` or ``"warn"``.
        saving: when callbacks that save checkpoints hear of the end of a moment: ``"last"`` (after the module, so that
            what its own hook changed is in the checkpoint) or ``"callbacks"`` (before the module).
        keyboard: what Ctrl-C ends in: ``"raise"`` (:class:`drivetrain.errors.InterruptedByKeyboard`: a script ends with
            status 130) or ``"exit"`` (hooks hear of a ``KeyboardInterrupt``, and the script ends with status 1).
        outcomes: in what words loggers are told how a stage ended, by drivetrain's own.
        live_metrics: whether ``callback_metrics`` and its like show what a rank logged at once; else what the ranks
            learnt of each other at the last boundary.
        checkpoint: what is saved: ``"directory"`` or ``"file"`` (one file with Lightning's dictionary).
        named_parts: whether callbacks and loggers may be given by their registered names.
        model_checkpoint: registered name of the callback that saves where the user gave none.
        model_summary: registered name of the callback that lists layers where the user gave none.
        logger: registered name of the logger that writes where the user gave none.
        log_folder: name of the default logger's folder.
        results: who shows the table of what an evaluation found: ``"bar"`` (the progress bar, if there is one) or
            ``"trainer"``.
        shows_version: whether the progress bar shows the loggers' version.
        tells_in_vain: whether is told of arguments that were given and have no effect in the run at hand.
        opens_loggers: whether each stage begins with the loggers' experiments, whatever is written to them.
        lone_group: whether a distributed strategy has its process group with one worker, too.
        default_hp_metric: whether the default logger writes ``hp_metric`` (-1) beside hyper-parameters.
    """

    batch: str = "global"
    cpu_workers: int = 2
    log_over_ranks: bool = True
    pools_loaders: bool = True
    figures: str = "double"
    steps: str = "batch"
    order: str = "seed"
    starts: str = "script"
    builds: str = "host"
    loaders: str = "first"
    window: str = "samples"
    moments: str = "step"
    frequency: str = "run"
    stages: str = "text"
    modes: str = "train"
    checks_resumed: bool = False
    stays_stopped: bool = True
    examples: str = "kept"
    extra_keys: str = "raise"
    trials: str = "train"
    truths: str = "refused"
    nonfinite: str = "raise"
    saving: str = "last"
    keyboard: str = "raise"
    outcomes: Mapping[str, str] = field(default_factory=dict)
    live_metrics: bool = False
    checkpoint: str = "directory"
    named_parts: bool = True
    model_checkpoint: str = "model_checkpoint"
    model_summary: str = "model_summary"
    logger: str = "tensorboard"
    log_folder: str = "drivetrain_logs"
    opens_loggers: bool = False
    lone_group: bool = False
    default_hp_metric: bool = False
    results: str = "bar"
    shows_version: bool = False
    tells_in_vain: bool = True


OWN = Meanings()
LIGHTNING = Meanings(
    batch="per_process",
    cpu_workers=1,
    log_over_ranks=False,
    pools_loaders=False,
    figures="default",
    steps="optimizer",
    order="torch",
    starts="seed",
    builds="device",
    loaders="needed",
    window="batches",
    moments="batch",
    frequency="epoch",
    stages="enum",
    modes="kept",
    checks_resumed=True,
    stays_stopped=False,
    examples="drawn",
    extra_keys="warn",
    trials="validate",
    truths="numbers",
    nonfinite="warn",
    saving="callbacks",
    keyboard="exit",
    outcomes={"completed": "success", "stopped": "success", "interrupted": "failed"},
    live_metrics=True,
    checkpoint="file",
    named_parts=False,
    model_checkpoint="lightning_model_checkpoint",
    model_summary="rich_model_summary",
    logger="lightning_tensorboard",
    log_folder="lightning_logs",
    opens_loggers=True,
    lone_group=True,
    default_hp_metric=True,
    results="trainer",
    shows_version=True,
    tells_in_vain=False,
)
