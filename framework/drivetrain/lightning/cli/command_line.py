"""``LightningCLI``: a script's Trainer, module and data module, made of files, options and environment variables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from torch.optim import Optimizer

from drivetrain.checkpoint import single
from drivetrain.data import DataModule
from drivetrain.lightning.cli.configured_optimizers import configured_by, lightnings_form, with_path
from drivetrain.lightning.cli.descriptions import first_sentence
from drivetrain.lightning.cli.instantiation import of_class, remembering
from drivetrain.lightning.cli.package import require
from drivetrain.lightning.cli.save_config import SaveConfigCallback
from drivetrain.lightning.cli.types import ArgsType
from drivetrain.lightning.seed import seed_everything
from drivetrain.lightning.trainer import Trainer
from drivetrain.module import TrainModule
from drivetrain.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from drivetrain.lightning.cli.parser import LightningArgumentParser

_READ_BY_THE_CLASSES = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}


class LightningCLI:
    """Parses, makes the objects, and runs the subcommand: ``python script.py fit --config c.yaml --trainer.devices=2``.

    What does not fit is said by jsonargparse, and the process ends with code 2.

    Args:
        model_class: the module's class, or a function that returns a module. None: any is named by ``--model``.
        datamodule_class: the same of the data. None: ``--data`` may name one.
        save_config_callback: what saves the configuration; None for nothing.
        save_config_kwargs: its arguments.
        trainer_class: the Trainer's class, or a function that returns one.
        trainer_defaults: in place of the Trainer's defaults. Callbacks in it are there besides those asked for.
        seed_everything_default: the seed; True for ``PL_GLOBAL_SEED`` or 0, False to seed nothing.
        parser_kwargs: arguments of the parser, and below the name of a subcommand of its parser.
        parser_class: class of the parsers.
        subclass_mode_model: whether classes derived from ``model_class`` may be named.
        subclass_mode_data: the same of the data.
        args: what is parsed in place of ``sys.argv``: such a list, or a configuration as a dictionary.
        run: False to make the objects and run nothing; then there are no subcommands.
        auto_configure_optimizers: whether there are ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: whether modules save their configuration as hyper-parameters, of which
            ``load_from_checkpoint`` makes what is nested in them.

    Attributes:
        config: what was parsed.
        config_init: the same with objects made of it.
        subcommand: the one that runs; None where ``run`` is False.
        model, datamodule, trainer: the objects.

    Raises:
        MissingPackageError: jsonargparse is not installed.
    """

    def __init__(
        self,
        model_class: type[TrainModule] | Callable[..., TrainModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | None = None,
        parser_class: type[LightningArgumentParser] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        require(type(self).__name__)
        if parser_class is None:
            from drivetrain.lightning.cli.parser import LightningArgumentParser as parser_class
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self._model_class = TrainModule if model_class is None else model_class
        self._datamodule_class = DataModule if datamodule_class is None else datamodule_class
        self.subclass_mode_model = subclass_mode_model or model_class is None
        self.subclass_mode_data = subclass_mode_data or datamodule_class is None

        # Here, not in setup_parser, which a project may write anew and call the rest of.
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        self.setup_parser(run, *self._setup_parser_kwargs(self.parser_kwargs))
        self.parse_arguments(self.parser, args)
        self.subcommand: str | None = self.config.subcommand if run else None
        if load_from_checkpoint_support:
            self._parse_ckpt_path()
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run_subcommand(self.subcommand)

    # The parsers.

    def _setup_parser_kwargs(self, parser_kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the parser, and of those of the subcommands."""
        names = self.subcommands()
        main = {name: value for name, value in parser_kwargs.items() if name not in names}
        return main, {name: value for name, value in parser_kwargs.items() if name in names}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that reads configuration files."""
        from jsonargparse import ActionConfigFile

        import drivetrain.lightning

        kwargs.setdefault("dump_header", [f"lightning.pytorch=={drivetrain.lightning.__version__}"])
        assert self.parser_class is not None
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="Path to a configuration file in json or yaml format."
        )
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Make the parser with its arguments, or with a parser for each subcommand that has them."""
        self.parser = self.init_parser(**main_kwargs)
        if add_subcommands:
            self._add_subcommands(self.parser, **subparser_kwargs)
        else:
            self._add_arguments(self.parser)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        of_parser = parser.add_subcommands()
        kind: Any = self.trainer_class
        if not isinstance(kind, type):
            kind = get_type_hints(kind)["return"]
        for name in self.subcommands():
            one = self._prepare_subcommand_parser(kind, name, **kwargs.get(name, {}))
            self._subcommand_parsers[name] = one
            of_parser.add_subcommand(name, one, help=first_sentence(getattr(kind, name)))

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        kwargs.setdefault("description", first_sentence(getattr(klass, subcommand)))
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        self._subcommand_method_arguments[subcommand] = parser.add_method_arguments(
            klass, subcommand, skip=set(self.subcommands()[subcommand])
        )
        return parser

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Methods of the Trainer that can be run, and which of their arguments are not asked for."""
        return {name: set(_READ_BY_THE_CLASSES) for name in ("fit", "validate", "test", "predict")}

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args()
        self.link_optimizers_and_lr_schedulers(parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what is neither the Trainer's nor the classes': the seed."""
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="The seed, true for PL_GLOBAL_SEED or else 0, false to seed nothing.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what the Trainer, the module and the data module are made with."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self._datamodule_class,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,  # a module may have the loaders
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """For a subclass: add arguments, link them, set defaults."""

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Give what was added with ``link_to`` to that argument, as ``class_path`` and ``init_args``."""
        for key, (kinds, link_to) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if link_to != "AUTOMATIC":
                parser.link_arguments(key, link_to, compute_fn=None if isinstance(kinds, tuple) else with_path(kinds))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and keep the result in ``self.config``."""
        if args is not None and sys.argv[1:]:
            rank_zero_warn(
                f"LightningCLI(args={args!r}) is parsed, and the command line {sys.argv[1:]} is not: leave args out to"
                " parse that.",
                stacklevel=3,
            )
        from jsonargparse import Namespace

        if isinstance(args, (dict, Namespace)):
            self.config = parser.parse_object(args)
        else:
            self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Let the module be made with the hyper-parameters of the checkpoint that the subcommand is given."""
        path = self._get(self.config, "ckpt_path") if self.subcommand is not None else None
        if not path or not Path(path).is_file():
            return
        held = single.read(path, check=False)  # it is checked where the stage begins
        saved = dict(held.get("hyper_parameters") or {})
        if not saved.pop("_instantiator", None) and not saved:
            return
        kind = saved.pop("_class_path", None)
        model = saved if kind is None else of_class(kind, saved)
        try:
            self.config = self.parser.parse_object({self.subcommand: {"model": model}}, self.config)
        except SystemExit:
            sys.stderr.write(f"The hyper-parameters in {path} do not fit the module.\n")
            raise

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        used = seed_everything(None if seed is True else seed, workers=True)
        (self.config if self.subcommand is None else self.config[self.subcommand])["seed_everything"] = used

    # The objects.

    def before_instantiate_classes(self) -> None:
        """For a subclass: called before the objects are made."""

    def instantiate_classes(self) -> None:
        """Make the objects."""
        self._instantiators: list[tuple[Any, type, bool]] = []
        if self.load_from_checkpoint_support:
            self._add_instantiators()
        self.config_init: Namespace = self.parser.instantiate(self.config, instantiators=self._instantiators)
        self.datamodule: Any = self._get(self.config_init, "data")
        self.model: Any = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """For a subclass: called when the objects are there."""

    def _add_instantiators(self) -> None:
        """Let the module and the data module save how they were configured."""
        import yaml

        written = self.parser.dump(self.config, format="yaml", skip_link_targets=False, skip_unset=False)
        self.config_dump = yaml.safe_load(written)
        if self.subcommand is not None:
            self.config_dump = self.config_dump[self.subcommand]
        for key, kind, any_below in [
            ("model", self._model_class, self.subclass_mode_model),
            ("data", self._datamodule_class, self.subclass_mode_data),
        ]:
            if isinstance(kind, type):
                make = remembering(key, lambda key=key: self.config_dump.get(key))  # type: ignore[misc]
                self._instantiators.append((make, kind, any_below))

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make the Trainer; ``kwargs`` take the place of what was configured."""
        forced = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        configured = self._get(self.config_init, "trainer")  # None where the class of the Trainer has no arguments
        config = {**({} if configured is None else vars(configured)), **kwargs}
        return self._instantiate_trainer(config, forced)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        if "callbacks" not in config:
            rank_zero_warn(
                f"{getattr(self.trainer_class, '__qualname__', self.trainer_class)} has no argument callbacks: those of"
                " the command line are left out.",
                stacklevel=3,
            )
            return self.trainer_class(**config)
        always = self.trainer_defaults.get("callbacks")
        several = [*_listed(config["callbacks"]), *callbacks, *_listed(always)]
        if self.save_config_callback is not None and not config.get("fast_dev_run", False):
            parsed = self.config if self.subcommand is None else self.config[self.subcommand]
            several.append(self.save_config_callback(self._parser(self.subcommand), parsed, **self.save_config_kwargs))
        return self.trainer_class(**{**config, "callbacks": several})

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """For a subclass: what the module's ``configure_optimizers`` gives, of what the command line made."""
        return lightnings_form(optimizer, lr_scheduler)

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        configure = configured_by(self, self._parser(subcommand), lambda key: self._get(self.config_init, key))
        if configure is not None:
            configure.bind(self.model)

    def _get(self, config: Any, key: str, default: Any = None) -> Any:
        """An argument, which may be a subcommand's."""
        of_run = config if self.subcommand is None else config.get(self.subcommand, config)
        return of_run.get(key, default)

    # The run.

    def _run_subcommand(self, subcommand: str) -> None:
        """``before_fit``, ``fit``, ``after_fit``: a subclass's methods where it has them, else the Trainer's."""
        getattr(self, f"before_{subcommand}", _nothing)()
        run = getattr(self, subcommand, getattr(self.trainer, subcommand))
        run(**self._prepare_subcommand_kwargs(subcommand))
        getattr(self, f"after_{subcommand}", _nothing)()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        given = vars(self.config_init[subcommand])
        arguments = {name: given[name] for name in self._subcommand_method_arguments[subcommand]}
        arguments["model"] = self.model
        if self.datamodule is not None:
            arguments["datamodule"] = self.datamodule
        return arguments


def _nothing() -> None:
    """In place of a method that a subclass has not."""


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
