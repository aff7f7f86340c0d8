"""What a command line is asked for, and what can then be seen of it. Each scenario runs in a folder of its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.lightning_parity.command_lines.parts import (
    Ambiguous,
    Bare,
    Callables,
    Counter,
    Data,
    Halved,
    L,
    Line,
    Linked,
    Net,
    OnlyFit,
    Told,
    cli,
    net_of,
    short_trainer,
)

HERE = f"{__package__}.parts"
SCENARIOS: dict[str, Callable[[], Any]] = {}
CONFIG = f"""
seed_everything: 7
trainer:
  accelerator: cpu
  max_epochs: 2
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: PACKAGE.loggers.CSVLogger
    init_args:
      save_dir: logs
  callbacks:
    - class_path: PACKAGE.callbacks.EarlyStopping
      init_args:
        monitor: score
    - class_path: LearningRateMonitor
model:
  middle:
    class_path: {HERE}.Wide
    init_args:
      factor: 3
"""
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
NO_FILES = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
MIDDLE = ["--model.middle=Middle"]


def scenario(run: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[run.__name__] = run
    return run


def config(name: str = "in.yaml", package: str = "lightning.pytorch", text: str = CONFIG) -> str:
    Path(name).write_text(text.replace("PACKAGE", package))
    return name


def seen(line: Any) -> dict[str, Any]:
    """Figures and classes of what a command line made and ran."""
    trainer, model = line.trainer, line.model
    facts = {
        "callbacks": sorted(type(callback).__name__ for callback in trainer.callbacks),
        "loggers": [type(logger).__name__.replace("Silent", "Dummy") for logger in trainer.loggers],
        "model": type(model).__name__,
        "data": type(line.datamodule).__name__,
        "hparams": {name: str(value) for name, value in model.hparams.items()},
        "weights": [float(weight.double().sum()) for weight in model.state_dict().values()],
        "step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "subcommand": line.subcommand,
        "seed": line._get(line.config, "seed_everything"),
    }
    if trainer.optimizers:
        facts["optimizers"] = [
            (type(o).__name__, o.defaults["lr"], o.param_groups[0]["lr"]) for o in trainer.optimizers
        ]
        facts["schedules"] = [type(entry.scheduler).__name__ for entry in trainer.lr_scheduler_configs]
    return facts


@scenario
def a_file_and_options() -> Any:
    arguments = ["fit", "--config", config(), "--trainer.callbacks+=ModelCheckpoint"]
    line = cli.LightningCLI(Net, Data, args=[*arguments, "--trainer.callbacks.monitor=score", "--model.lr=0.05"])
    return seen(line)


@scenario
def several_files() -> Any:
    config("more.yaml", text="trainer: {max_epochs: 1, gradient_clip_val: 0.1}\ndata: {batch_size: 4}\n")
    return seen(Line(Net, Data, args=["fit", "-c", config(), "-c", "more.yaml", "--data.count=8"]))


@scenario
def any_class_by_its_path() -> Any:
    """In files that name what the project called Lightning when it was written."""
    text = CONFIG.replace("model:\n  middle", f"model:\n  class_path: {HERE}.Net\n  init_args:\n   middle")
    text = text.replace("    class_path: tests", "     class_path: tests").replace(
        "    init_args:\n      factor", "     init_args:\n      factor"
    )
    package = "pytorch_lightning" if L.__name__.startswith("drivetrain") else "lightning.pytorch"
    arguments = ["fit", "-c", config(package=package, text=text), "--data", f"{HERE}.Data", "--data.batch_size=6"]
    return seen(cli.LightningCLI(args=arguments))


@scenario
def classes_by_their_names() -> Any:
    options = {"subclass_mode_model": True, "subclass_mode_data": True, "seed_everything_default": 3}
    arguments = ["fit", *QUIET, "--trainer.max_epochs=1", "--model=Net", *MIDDLE, "--model.middle.act=torch.nn.ReLU"]
    arguments += ["--data=Data", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=here"]
    return seen(Line(L.LightningModule, L.LightningDataModule, args=arguments, **options))


@scenario
def stages_with_a_checkpoint() -> Any:
    """The module is made with the checkpoint's hyper-parameters, and what was nested in them."""
    common = [*QUIET, "--trainer.logger=false"]
    fit = ["fit", *common, "--trainer.max_epochs=1", "--model.middle=Wide", "--model.middle.factor=4"]
    first = cli.LightningCLI(Net, Data, save_config_callback=None, args=fit)
    path = first.trainer.checkpoint_callback.best_model_path
    facts = [seen(first)]
    for stage in ("validate", "test", "predict"):
        arguments = [stage, *common, "--model.middle=Middle", f"--ckpt_path={path}"]
        line = cli.LightningCLI(Net, Data, save_config_callback=None, args=arguments)
        facts.append([seen(line), type(line.model.middle).__name__])
    loaded = Net.load_from_checkpoint(path)
    changed = Net.load_from_checkpoint(path, lr=0.5)
    data = Data.load_from_checkpoint(path, batch_size=2)
    facts.append([type(loaded.middle).__name__, loaded.lr, changed.lr, data.batch_size, data.count])
    return facts


@scenario
def a_checkpoint_of_a_class_by_its_name() -> Any:
    arguments = ["fit", *QUIET, "--trainer.logger=false", "--trainer.max_epochs=1", "--model=Net", *MIDDLE]
    line = Line(datamodule_class=Data, save_config_callback=None, args=arguments)
    path = line.trainer.checkpoint_callback.best_model_path
    loaded = L.LightningModule.load_from_checkpoint(path)
    return [seen(line), type(loaded).__name__, type(loaded.middle).__name__]


@scenario
def optimizer_and_schedule() -> Any:
    common = ["fit", *QUIET, *NO_FILES, "--trainer.max_epochs=2", "--optimizer=Adam", "--optimizer.lr=0.3"]
    plateau = ["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=score", "--lr_scheduler.patience=0"]
    steps = ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    options = {"save_config_callback": None}
    return [
        seen(Line(Bare, Data, args=[*common, *plateau], **options)),
        seen(Line(Net, Data, args=[*common, *MIDDLE], **options)),
        seen(Halved(Bare, Data, args=[*common, *steps], **options)),
        seen(Line(Net, Data, args=["fit", *QUIET, *NO_FILES, "--trainer.max_epochs=1", *MIDDLE], **options)),
    ]


@scenario
def what_makes_optimizers() -> Any:
    chosen = ["--model.optimizer=SGD", "--model.optimizer.lr=0.2", "--model.scheduler=torch.optim.lr_scheduler.StepLR"]
    arguments = ["fit", *QUIET, "--trainer.max_epochs=1", *chosen, "--model.scheduler.step_size=1"]
    return seen(Line(Callables, Data, args=[*arguments, "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x"]))


@scenario
def a_subclass() -> Any:
    line = Linked(
        Net,
        Data,
        args=[
            "fit",
            *QUIET,
            *MIDDLE,
            "--trainer.max_epochs=1",
            "--tag=x",
            "--trainer.logger=CSVLogger",
            "--trainer.logger.save_dir=x",
        ],
    )
    return [seen(line), line.diary, line.model.note, line.model.lr]


@scenario
def an_own_subcommand() -> Any:
    line = OnlyFit(
        Net, Data, args=["fit", *QUIET, *NO_FILES, *MIDDLE, "--trainer.max_epochs=1"], save_config_callback=None
    )
    return [seen(line), line.given, line.trainer.log_every_n_steps]


@scenario
def nothing_is_run() -> Any:
    defaults = {"max_epochs": 5, "callbacks": Counter(2), "accelerator": "cpu"}
    facts = []
    for options in ({"seed_everything_default": False}, {"seed_everything_default": 5}, {"save_config_callback": None}):
        line = cli.LightningCLI(
            Net,
            Data,
            run=False,
            trainer_defaults=defaults,
            args={"model": {"middle": {"class_path": f"{HERE}.Middle"}}, "trainer": {"logger": False}},
            **options,
        )
        line.model = Net(line.model.middle.__class__(2))
        facts.append([seen(line), line.trainer.max_epochs, line.config.data.as_dict()])
    return facts


@scenario
def functions_in_place_of_classes() -> Any:
    line = Line(net_of, Data, trainer_class=short_trainer, args=["fit", *QUIET, *NO_FILES, "--model.width=2"])
    return seen(line)


@scenario
def environment_and_default_files() -> Any:
    config(text=CONFIG.replace("    - class_path: LearningRateMonitor\n", ""))
    os.environ.update(PL_FIT__MODEL__LR="0.01", PL_FIT__TRAINER__MAX_EPOCHS="1", PL_FIT__TRAINER__LOGGER="false")
    try:
        kwargs = {"default_env": True, "fit": {"default_config_files": ["in.yaml"]}}
        line = cli.LightningCLI(Net, Data, parser_kwargs=kwargs, args=["fit", "--data.batch_size=2"])
        other = {"parser_kwargs": {"default_config_files": ["in.yaml"]}, "run": False}
        made = cli.LightningCLI(Net, Data, args=["--trainer.logger=false"], **other)
    finally:
        for name in [name for name in os.environ if name.startswith("PL_FIT__")]:
            del os.environ[name]
    return [seen(line), line.model.lr, made.trainer.max_epochs]


@scenario
def the_saved_configuration() -> Any:
    """It is not written over, unless that is asked for; a subclass saves it elsewhere as well."""
    arguments = ["fit", *QUIET, *MIDDLE, "--trainer.max_steps=1"]
    logger = {"class_path": f"{L.__name__}.loggers.TensorBoardLogger", "init_args": {"save_dir": "a", "version": 0}}
    facts = []
    for options in (
        {},
        {},
        {"save_config_kwargs": {"overwrite": True}},
        {"save_config_callback": Told, "save_config_kwargs": {"config_filename": "own.json"}},
        {"save_config_callback": Told, "save_config_kwargs": {"save_to_log_dir": False}},
    ):
        try:
            line = Line(Net, Data, trainer_defaults={"logger": logger}, args=arguments, **options)
        except RuntimeError as error:
            facts.append(["raised", type(error).__mro__[-4].__name__, "config.yaml" in str(error)])
        else:
            facts.append(
                [seen(line), sorted(re.sub(r"(tfevents).*", r"\1", name) for name in os.listdir(line.trainer.log_dir))]
            )
    return facts


@scenario
def several_saved_files() -> Any:
    Path("model.yaml").write_text(f"middle: {HERE}.Wide\nlr: 0.4\n")
    trainer = "{max_steps: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}"
    config("in.yaml", text=f"model: model.yaml\ntrainer: {trainer}\n")
    arguments = ["fit", "-c", "in.yaml", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=x"]
    return seen(Line(Net, Data, args=arguments, save_config_kwargs={"multifile": True}))


@scenario
def an_output_without_a_logger() -> Any:
    arguments = [
        "fit",
        *QUIET,
        *MIDDLE,
        "--trainer.logger=false",
        "--trainer.default_root_dir=root",
        "--trainer.max_steps=1",
    ]
    facts = seen(Line(Net, Data, args=arguments))
    fast = ["fit", *QUIET, *MIDDLE, "--trainer.fast_dev_run=true", "--trainer.default_root_dir=fast"]
    return [facts, seen(Line(Net, Data, args=fast))]


@scenario
def printed_configurations() -> None:
    for options in (["--print_config"], ["--print_config=skip_default"], ["-c", config(), "--print_config"]):
        _ended(lambda options=options: Line(Net, Data, args=["fit", *options, *MIDDLE]))


@scenario
def bad_input() -> None:
    """The message is jsonargparse's, and the code 2; nothing is run."""
    for arguments in ([], ["train"], ["fit", "--model.lr=fast", *MIDDLE], ["fit", *MIDDLE, "--seed_everything=luck"]):
        _ended(lambda arguments=arguments: cli.LightningCLI(Net, Data, args=arguments))
    parser = cli.LightningCLI(Net, Data, run=False, args=[*MIDDLE, "--trainer.logger=false", *QUIET]).parser
    for option in (
        "--trainer.max_epochs=many",
        "--trainer.epochs=1",
        "--model.middle=Data",
        "--trainer.callbacks=NoSuchCallback",
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.deterministic=perhaps",
        "--config=nothing.yaml",
        "--optimizer=NoSuchOptimizer",
    ):
        _ended(lambda option=option: parser.parse_args([*MIDDLE, option]))
    for options in (
        ["--trainer.logger=CSVLogger", "--trainer.logger.folder=x"],
        ["--optimizer=Adam", "--optimizer.x=1"],
    ):
        _ended(lambda options=options: parser.parse_args([*MIDDLE, *options]))


@scenario
def a_strategy_and_its_arguments() -> Any:
    path = "lightning.pytorch.strategies.DDPStrategy"
    given = {"class_path": path, "init_args": {"find_unused_parameters": True}}
    config("a.yaml", text=json.dumps({"trainer": {"strategy": given, "accelerator": "cpu", "precision": 64}}))
    options = ["--config=a.yaml", *MIDDLE, "--trainer.logger=false", "--trainer.strategy.process_group_backend=gloo"]
    found = cli.LightningCLI(Net, Data, run=False, args=options).config.trainer
    chosen = {name: found.strategy.init_args[name] for name in ("find_unused_parameters", "process_group_backend")}
    return [found.strategy.class_path, chosen, found.precision]


@scenario
def several_optimizers_for_one_method() -> Any:
    try:
        Ambiguous(Bare, Data, run=False, args=["--trainer.logger=false", "--second=Adam", "--trainer.accelerator=cpu"])
    except Exception as error:
        return "first" in str(error) and "second" in str(error)
    return None


@scenario
def arguments_of_a_parser() -> Any:
    parser = cli.LightningArgumentParser()
    facts: list[Any] = [parser.add_lightning_class_args(L.Trainer, "trainer")]
    facts.append(parser.add_lightning_class_args(Net, "model"))
    facts.append(parser.add_lightning_class_args(Counter, "counter"))
    parser.add_optimizer_args((torch.optim.SGD, torch.optim.Adam))
    parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR)
    defaults = parser.get_defaults()
    facts += [parser.callback_keys, {name: str(value) for name, value in defaults.items() if "logger" not in name}]
    line = cli.LightningCLI(Net, Data, run=False, args=["--trainer.logger=false", "--trainer.accelerator=cpu", *MIDDLE])
    names = {action.dest for action in line.parser._actions} - {"trainer.precision.help"}  # own classes may be given
    return [*facts, sorted(names)]


def _ended(run: Callable[[], Any]) -> None:
    try:
        run()
    except SystemExit as end:
        print(f"ended with {end.code}")
    else:
        print("did not end")
