"""The command ``python train.py`` (``drivetrain train``): from words to runs.

Order: compose the config, check it (no torch, nothing written), let Hydra make the run folder, import torch and the
engine, start the workers. Hydra's main runs once, also for a sweep: each of its jobs starts workers of its own.

Exit codes: 0; 1 a run failed; 2 the request cannot be carried out; 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict

from drivetrain import record
from drivetrain.cli import objective, resume, search
from drivetrain.cli.compose import CONFIG_NAME, VERSION_BASE, composed, probes, session
from drivetrain.cli.execute import execute
from drivetrain.cli.hints import in_plain_lines
from drivetrain.cli.joined import Meeting, meeting
from drivetrain.cli.mistakes import COMPOSITION_ERRORS, explain
from drivetrain.cli.request import Request, check, check_writable
from drivetrain.cli.table import Outcome, kept, show
from drivetrain.command_line import open_standard_streams, say
from drivetrain.errors import FULL, ConfigurationError, DrivetrainError, Interrupted, MisuseError, nearest
from drivetrain.folders import refuse_in_use
from drivetrain.launch.environment import detect
from drivetrain.launch.job import Job
from drivetrain.launch.temporary import temporary_folder


@dataclass
class Command:
    """One invocation.

    Attributes:
        options: the words after the program's name that are no overrides.
        args: all of them, parsed by Hydra's own parser.
        joined: this process's place, when another launcher started it.
        outcomes: how the jobs ended so far.
        error: what ended the only job.
        told: hints that were shown, which a sweep does not repeat.
        process: where it runs; a launcher of Hydra's may run jobs in others (joblib does).
        elsewhere: where such jobs leave how they ended.
    """

    options: list[str]
    args: argparse.Namespace
    joined: Job | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    error: Exception | None = None
    told: set[str] = field(default_factory=set)
    process: int = field(default_factory=os.getpid)
    elsewhere: Path | None = None

    @property
    def overrides(self) -> list[str]:
        return list(self.args.overrides)

    @property
    def config_name(self) -> str:
        return self.args.config_name or CONFIG_NAME


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the process's own) and return its exit code."""
    open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _flags(words)
    except ConfigurationError as error:
        return _say(error, error.exit_code)
    for override in args.overrides:
        words.remove(override)
    command = Command(words, args)
    try:
        with in_plain_lines():
            return _dispatch(command)
    except MisuseError as error:
        return _say(error, error.exit_code)
    except ConfigurationError as error:
        return _refuse(command, str(error))
    except (DrivetrainError, Interrupted) as error:
        return _say(error, error.exit_code)
    except COMPOSITION_ERRORS as error:
        return _refuse(command, explain(error, command.overrides, args.config_dir))
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = "the run folder" if error.filename is None else error.filename
        return _say(f"{where} cannot be written: {error.strerror}; free space or choose hydra.run.dir=FOLDER", 1)
    except KeyboardInterrupt:
        interrupted = Interrupted(signal.SIGINT)
        return _say(interrupted, interrupted.exit_code)


def _flags(words: list[str]) -> argparse.Namespace:
    """``words`` as Hydra's parser reads them, which would end the process with its usage where it cannot.

    Raises:
        ConfigurationError: a flag that there is not, or one without the value that it takes.
    """
    parser = get_args_parser()
    known = parser._option_string_actions

    def misread(message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        if message.startswith("unrecognized arguments: "):
            message = f"there is no flag {unknown!r}: {nearest(unknown, known)}"
        raise ConfigurationError(f"{message}; --help lists flags and options")

    parser.error = misread  # type: ignore[method-assign]
    return parser.parse_intermixed_args(words)


def _refuse(command: Command, sentence: str) -> int:
    """Ranks that another launcher started all come to the same refusal: the first says it."""
    if command.joined is None or command.joined.rank == 0:
        _say(sentence, ConfigurationError.exit_code)
    return ConfigurationError.exit_code


def _say(error: object, code: int) -> int:
    say(f"error: {error}")
    return code


def _dispatch(command: Command) -> int:
    args = command.args
    if args.help:
        from drivetrain.cli.help import text

        name = Path(sys.argv[0]).name
        script = name.endswith(".py") and name != "__main__.py"
        print(
            text(
                f"python {name}" if script else "drivetrain train",
                name if script else "-m drivetrain train",
                args.config_dir,
            )
        )
        return 0
    if args.config_path:
        instead = f"use --config-dir {args.config_path}"
        raise ConfigurationError(f"--config-path would hide drivetrain's own configs: {instead}")
    if args.cfg or args.info or args.hydra_help or args.shell_completion:
        return _hydra(command, [])
    command.joined = detect()
    if command.joined is not None:
        return _join(command, command.joined)
    if args.multirun:
        return _sweep(command)
    with session(args.config_dir):
        try:
            config = composed(command.overrides, command.config_name)
        except ConfigCompositionException:  # of several values, perhaps, which are well where the mode is a sweep's
            if not _is_sweep(composed(probes(command.overrides)[0], command.config_name)):
                raise
            config = None
    if config is None or _is_sweep(config):
        return _sweep(command)
    request = check(_without_hydra(config))
    folder = Path(config.hydra.run.dir).absolute()
    check_writable(folder)
    if request.job.node_rank == 0:
        refuse_in_use(folder)
        request = resume.found(request, folder)
    more = [_assign("hydra.run.dir", folder)]
    if request.job.node_rank > 0:
        more.append("hydra.output_subdir=null")  # the run folder is the first node's; here are this node's logs
    _hydra(command, more, request)
    if request.job.node_rank == 0:
        show(command.outcomes, sweep=False)
    return 0


def _is_sweep(config: DictConfig) -> bool:
    """Whether a config, or an override of it, asks for a sweep without ``-m``."""
    return OmegaConf.select(config, "hydra.mode") is not None and config.hydra.mode.name == "MULTIRUN"


def _sweep(command: Command) -> int:
    """Refuse what no job could be composed from; then a job that fails is marked and the others run."""
    with session(command.args.config_dir):
        for overrides in probes(command.overrides):
            config = composed(overrides, command.config_name)
    sweeper = str(config.hydra.runtime.choices.get("hydra/sweeper"))
    objective.refuse_aimless(config.get("objective"), sweeper, config.get("task"))
    check_writable(Path(config.hydra.sweep.dir).absolute())
    with temporary_folder("sweep") as command.elsewhere:
        try:
            _hydra(command, [])
        except Exception:
            # Hydra raises the first job's error after the last job; the table holds them all.
            command.outcomes += kept(command.elsewhere)
            if all(one.error is None for one in command.outcomes):
                raise
        else:
            command.outcomes += kept(command.elsewhere)
    show(command.outcomes, sweep=True)
    return int(any(one.error is not None for one in command.outcomes))


def _join(command: Command, joined: Job) -> int:
    """This process is one worker: rank 0 alone goes through Hydra's main, which writes ``.hydra``."""
    if command.args.multirun:
        raise ConfigurationError(
            f"a sweep (-m) starts workers for each of its jobs and cannot run under {joined.origin}:"
            f" run it without {joined.origin}"
        )
    with session(command.args.config_dir):
        config = composed(command.overrides, command.config_name)
    request = check(_without_hydra(config), joined)
    with meeting(joined, request.launcher.start_timeout) as others:
        command.joined = others.job
        if joined.rank > 0:
            execute(request, others.hear(), _recipe(config), others.job)
            return 0
        folder = Path(config.hydra.run.dir).absolute()
        with _told(others):
            check_writable(folder)
            refuse_in_use(folder)
            request = resume.found(request, folder)
            folder.mkdir(parents=True, exist_ok=True)
        others.tell(folder)
        _hydra(command, [_assign("hydra.run.dir", folder)], request)
        show(command.outcomes, sweep=False)
    return 0


@contextmanager
def _told(others: Meeting) -> Iterator[None]:
    """Let the other ranks know why there will be no run."""
    try:
        yield
    except (DrivetrainError, Interrupted, OSError) as error:
        others.tell(None, str(error))
        raise


def _hydra(command: Command, more: list[str], request: Request | None = None) -> int:
    """Hydra's main: run folder, ``.hydra``, job logging, sweeps."""
    search.register(command.args.config_dir)

    def job(config: DictConfig) -> Any:
        folder = Path(HydraConfig.get().runtime.output_dir)
        outcome = Outcome(list(HydraConfig.get().overrides.task), folder)
        command.outcomes.append(outcome)
        try:
            asked = request or resume.found(check(config), folder)
            outcome.record = execute(asked, folder, _recipe_of(HydraConfig.get()), command.joined, command.told)
            return objective.value(asked.config["objective"], outcome.record) if request is None else None
        except Exception as error:
            outcome.error = str(error) or type(error).__name__
            outcome.record = record.left_in(folder)
            if request is not None:
                # A single run: Hydra would say first what the user knows, the overrides.
                command.error = error
                return None
            _say(f"job {HydraConfig.get().job.num} failed: {outcome.error}", 1)
            if not isinstance(error, DrivetrainError):
                say(traceback.format_exc().rstrip())
            raise
        finally:
            if os.getpid() != command.process and command.elsewhere is not None:
                outcome.keep(command.elsewhere, HydraConfig.get().job.num)

    main = hydra.main(config_path=None, config_name=CONFIG_NAME, version_base=VERSION_BASE)(job)
    # Hydra takes overrides that stand together only.
    with _command_line([*command.overrides, *more, *command.options]):
        main()
    if command.error is not None:
        raise command.error
    return 0


@contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    """Hydra's main reads the process's arguments, and ends the process on errors unless told otherwise."""
    argv, variable = sys.argv, "HYDRA_FULL_ERROR"
    before = os.environ.get(variable)
    sys.argv, os.environ[variable] = [argv[0], *words], "1"
    try:
        yield
    finally:
        sys.argv = argv
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def _without_hydra(config: DictConfig) -> DictConfig:
    own = config.copy()
    with open_dict(own):
        del own["hydra"]
    return own


def _recipe(config: DictConfig) -> str:
    return _recipe_of(config.hydra)


def _recipe_of(node: Any) -> str:
    return str(node.runtime.choices.get("recipe"))


def _assign(key: str, value: object) -> str:
    """An override whose value may hold any character."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{text}'"
