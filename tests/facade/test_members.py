"""Members that published projects use, each asked of Lightning and of drivetrain.lightning: the same answers."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from tests.facade.recorder import QUIET, loader, net, ours, plain, theirs

Answers = Callable[[Any, Path], Any]
QUESTIONS: dict[str, Answers] = {}


def question(answers: Answers) -> Answers:
    QUESTIONS[answers.__name__] = answers
    return answers


@pytest.fixture(autouse=True)
def seeds_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with torch.random.fork_rng():
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUESTIONS)
def test_same_answers(name: str, tmp_path: Path) -> None:
    answers = []
    for library in (theirs, ours):
        torch.manual_seed(3)
        answers.append(plain(QUESTIONS[name](library, tmp_path / library.__name__)))
    assert answers[1] == answers[0]


def trainer_of(L: Any, **options: Any) -> Any:
    return L.Trainer(**{**QUIET, "logger": False, "max_epochs": 1, **options})


def module_of(L: Any, **members: Any) -> Any:
    """A classifier whose members may be replaced."""

    class Module(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"v{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)
            self.log("w", float(batch_idx))

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(f"t{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return type("Module", (Module,), members)()


def found(owner: Any, names: str) -> list[Any]:
    """Numbers and words of the members named, at the end of dotted paths."""
    values = []
    for name in names.split():
        value = owner
        for part in name.split("."):
            value = getattr(value, part)
        values.append((name, value))
    return values


@question
def limits_before_a_fit(L: Any, folder: Path) -> Any:
    given: list[dict[str, Any]] = [{}, {"max_epochs": 3}, {"max_steps": 3}, {"max_time": "00:00:01:00"}]
    given += [{"min_epochs": 2}, {"min_steps": 3}, {"max_epochs": -1}, {"fast_dev_run": True}]
    names = "max_epochs min_epochs max_steps min_steps fast_dev_run"
    return [found(L.Trainer(**QUIET, logger=False, **options), names) for options in given]


@question
def names_of_precisions(L: Any, folder: Path) -> Any:
    return [L.Trainer(**QUIET, logger=False, precision=p).precision_plugin.precision for p in (32, "bf16", "64-true")]


@question
def limits_after_a_fit(L: Any, folder: Path) -> Any:
    answers = []
    for options in ({"max_steps": 3}, {"min_steps": 3, "max_epochs": 1}, {"fast_dev_run": True}):
        trainer = L.Trainer(**QUIET, logger=False, **options)
        trainer.fit(module_of(L), loader())
        answers.append(found(trainer, "max_epochs min_epochs max_steps min_steps global_step"))
    return answers


LOOP = (
    "max_epochs min_epochs max_steps min_steps epoch_loop.max_steps epoch_loop.min_steps epoch_loop.batch_idx"
    " epoch_loop.total_batch_idx epoch_loop.global_step epoch_loop._batches_that_stepped batch_idx"
    " total_batch_idx epoch_progress.current.ready epoch_progress.current.completed"
    " epoch_progress.current.processed epoch_loop.batch_progress.current.ready"
    " epoch_loop.batch_progress.total.ready epoch_loop.batch_progress.current.completed restarting done skip"
    " max_batches"
)


@question
def the_loop_before_within_and_after_a_fit(L: Any, folder: Path) -> Any:
    answers = []

    class Asking(L.Callback):  # type: ignore[misc, name-defined]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.fit_loop.setup_data()
            answers.append([trainer.estimated_stepping_batches, trainer.num_training_batches])

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            answers.append(found(trainer.fit_loop.epoch_loop, "batch_idx total_batch_idx batch_progress.total.ready"))
            answers.append(found(trainer.fit_loop, "epoch_progress.current.ready epoch_progress.total.started"))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            answers.append(found(trainer.fit_loop.epoch_loop, "batch_idx total_batch_idx"))

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            answers.append(
                found(trainer.fit_loop, "epoch_loop.batch_idx total_batch_idx epoch_progress.current.completed")
            )

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            answers.append(found(trainer.fit_loop, "total_batch_idx epoch_progress.current.completed"))

    trainer = trainer_of(L, max_epochs=3, max_steps=99, min_epochs=1, callbacks=Asking())
    answers.append(found(trainer.fit_loop, LOOP))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module_of(L), loader(), loader(8))
    answers.append(found(trainer.fit_loop, LOOP))
    return answers


@question
def where_a_module_keeps_its_device(L: Any, folder: Path) -> Any:
    """As PARSeq reads it; other projects have an attribute of that name themselves."""

    class Own(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._device = torch.device("meta")

    module = module_of(L)
    return [str(module._device), str(module._dtype), str(Own()._device)]


@question
def a_checkpoint_that_a_callback_writes_itself(L: Any, folder: Path) -> Any:
    """As MLflow's does, on the first rank only."""
    seen = []

    class Own(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for weights_only in (False, True):
                content = trainer._checkpoint_connector.dump_checkpoint(weights_only)
                trainer.strategy.save_checkpoint(content, folder / "own.ckpt")
                read = torch.load(folder / "own.ckpt", weights_only=False)
                seen.append((sorted(read.keys() - {"drivetrain"}), read["epoch"], read["global_step"]))
                seen.append([float(weight.sum()) for weight in read["state_dict"].values()])
                loaded = trainer.strategy.load_checkpoint(folder / "own.ckpt", weights_only=False)
                seen.append((sorted(loaded.keys() - {"drivetrain"}), loaded["global_step"]))
            weights = trainer.strategy.lightning_module_state_dict()
            seen.append([(name, float(weight.sum())) for name, weight in weights.items()])
            trainer.strategy.remove_checkpoint(folder / "own.ckpt")
            seen.append((folder / "own.ckpt").exists())

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            seen.append(sorted(checkpoint.keys() - {"drivetrain"}))

    trainer_of(L, callbacks=[Own()], max_epochs=2).fit(module_of(L), loader())
    return seen


@question
def whether_there_are_several_workers(L: Any, folder: Path) -> Any:
    """As Optuna's callback asks, before it shares its decisions."""
    return [trainer_of(L, devices=devices)._accelerator_connector.is_distributed for devices in (1, 2)]


@question
def the_devices_of_the_workers(L: Any, folder: Path) -> Any:
    """As PINA asks, to put parameters there that belong to a problem and not to a module."""
    return [trainer_of(L, devices=devices)._accelerator_connector._parallel_devices for devices in (1, 2)]


@question
def what_flags_stand_for(L: Any, folder: Path) -> Any:
    """As scvi-tools asks, before it has a Trainer."""
    connector = importlib.import_module(f"{L.__name__}.trainer.connectors.accelerator_connector")._AcceleratorConnector
    made = [connector(accelerator="cpu", devices=devices, strategy="auto") for devices in ("auto", 1, "2")]
    return [(one._accelerator_flag, one._devices_flag, type(one.accelerator).__name__) for one in made]


@question
def random_numbers_after_an_example_that_draws_when_it_is_asked_for(L: Any, folder: Path) -> Any:
    """As the modules of mlcolvar have it: every look at it moves the random state."""
    answers = []
    for callback in (L.callbacks.ModelSummary(), L.callbacks.RichModelSummary(max_depth=2)):
        example = property(lambda self: torch.randn(2, *loader().dataset[0][0].shape))
        module = module_of(L, example_input_array=example, forward=lambda self, x: self.net(x))
        trainer_of(L, enable_model_summary=True, callbacks=[callback]).fit(module, loader())
        answers.append(float(torch.rand(1)))
    return answers


@question
def whether_a_fit_validates(L: Any, folder: Path) -> Any:
    """As GluonTS asks, to choose what its schedule monitors."""
    answers = []
    for validation in (None, loader(8)):

        def asked(self: Any) -> Any:
            answers.append(self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())
            return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer_of(L).fit(module_of(L, configure_optimizers=asked), loader(), validation)
    return answers


@question
def loaders_that_a_schedule_counts(L: Any, folder: Path) -> Any:
    """Of the fit or of a data module, when optimizers are made: milestones in parts of the run."""
    answers = []

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return loader(8)

    def asked(self: Any) -> Any:
        source = self.trainer.fit_loop._data_source
        answers.append((source.is_defined(), len(source.dataloader())))
        for one in (
            source,
            self.trainer.fit_loop.epoch_loop.val_loop._data_source,
            self.trainer.test_loop._data_source,
        ):
            owners = [self.trainer.datamodule, self, *loaders]
            answers.append((one.name, one.is_module(), [one.instance is owner for owner in owners]))
        return torch.optim.SGD(self.parameters(), lr=0.1)

    loaders = [loader(), loader(8)]
    answers.append((trainer_of(L).fit_loop._data_source.instance, trainer_of(L).fit_loop._data_source.is_module()))
    for given in (loaders[0], Data()):
        for validation in (None, loaders[1]) if given is loaders[0] else (None,):
            trainer_of(L).fit(module_of(L, configure_optimizers=asked), given, validation)
    trainer_of(L).fit(module_of(L, configure_optimizers=asked, train_dataloader=lambda self: loader(8)))
    return answers


@question
def loaders_of_a_module_beside_a_data_module(L: Any, folder: Path) -> Any:
    """They are for runs without one."""

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return loader(8)

    def validated(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("v", self.net(batch[0]).sum())

    answers = []
    for data in (None, Data()):
        module = module_of(
            L,
            train_dataloader=lambda self: loader(),
            val_dataloader=lambda self: loader(),
            test_dataloader=lambda self: loader(),
            validation_step=validated,
        )
        trainer = trainer_of(L)
        trainer.fit(module, datamodule=data)
        answers.append((trainer.num_training_batches, trainer.num_val_batches, sorted(trainer.callback_metrics)))
    return answers


@question
def arguments_of_a_trainer_of_ones_own_from_the_environment(L: Any, folder: Path) -> Any:
    """As a template decorates the ``__init__`` of its Trainer."""
    decorated = importlib.import_module(f"{L.__name__}.utilities.argparse")._defaults_from_env_vars

    class Mine(L.Trainer):  # type: ignore[misc, name-defined]
        @decorated
        def __init__(self, folds: int | None = None, max_epochs: int | None = None, **more: Any) -> None:
            super().__init__(max_epochs=max_epochs, **more)
            self.seen = (folds, max_epochs, sorted(more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_MINE_MAX_EPOCHS", "3")
        patch.setenv("PL_MINE_FOLDS", "")
        return [Mine(accelerator="cpu").seen, Mine(2, accelerator="cpu").seen, Mine(max_epochs=1).seen]


@question
def rates_that_numpy_computed(L: Any, folder: Path) -> Any:
    """They are shown in their own type."""
    answers = []
    for rate in (np.float64(0.1), 0.1, 1):
        optimizers = lambda self, rate=rate: torch.optim.SGD(self.parameters(), lr=rate)
        monitor = L.callbacks.LearningRateMonitor("step")
        trainer = trainer_of(L, logger=L.loggers.CSVLogger(folder), callbacks=[monitor], log_every_n_steps=1)
        trainer.fit(module_of(L, configure_optimizers=optimizers), loader())
        answers.append([(value.item(), str(value.dtype)) for value in trainer.callback_metrics.values()])
    assert all(answers)
    return answers


@question
def stages_that_follow_a_fit(L: Any, folder: Path) -> Any:
    """A template's callback validates and tests at the end of a fit, where there is data for it."""
    answers = []

    class Following(L.Callback):  # type: ignore[misc, name-defined]
        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            answers.append((str(stage), trainer.validate_loop._data_source.is_defined()))
            answers.append(trainer.test_loop._data_source.is_defined())
            data = trainer.datamodule
            if stage == "fit" and data is not None and trainer.validate_loop._data_source.is_defined():
                answers.append(trainer.validate(module, datamodule=data, verbose=False))
            if stage == "fit" and data is not None and trainer.test_loop._data_source.is_defined():
                answers.append(trainer.test(module, datamodule=data, verbose=False))

    class Both(L.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            return loader(8)

    class All(Both):
        def test_dataloader(self) -> Any:
            return loader(8)

    for data in (Both(), All()):
        trainer_of(L, callbacks=[Following()]).fit(module_of(L), datamodule=data)
    trainer_of(L, callbacks=[Following()]).fit(module_of(L), loader())
    trainer_of(L, callbacks=[Following()]).fit(
        module_of(L, test_dataloader=lambda self: loader(8)), loader(), loader(8)
    )
    at_hand = trainer_of(L)
    at_hand.test(module_of(L), loader(8), verbose=False)
    return [*answers, at_hand.test_loop.max_batches, at_hand.test_loop.num_dataloaders]


@question
def loops_of_stages_before_and_after_them(L: Any, folder: Path) -> Any:
    answers = []

    def ask() -> None:
        for name in ("validate_loop", "test_loop", "predict_loop"):
            one = getattr(trainer, name)
            answers.append([one._data_source.is_defined(), one.batch_progress.total.completed])

    trainer, module = trainer_of(L), module_of(L)
    ask()
    trainer.fit(module, loader(), loader(8))
    ask()
    module = module_of(L, predict_step=lambda self, batch, batch_idx: batch[0].sum())
    trainer.predict(module, loader(8))
    answers.append([trainer.predict_loop.max_batches, trainer.predict_loop.num_dataloaders])
    ask()
    return answers


@question
def classes_of_a_module(L: Any, folder: Path) -> Any:
    """As a project's registry collects all callbacks by name."""
    answers = []
    for path, base in (("callbacks", "Callback"), ("loggers", "Logger"), ("profilers", "Profiler")):
        module = import_module(f"{L.__name__}.{path}")
        found = dict(inspect.getmembers(module, inspect.isclass))
        answers.append(sorted(name for name, one in found.items() if issubclass(one, found[base])))
    answers[1] = [name for name in answers[1] if name[:2] in ("CS", "Lo", "ML", "Te", "Wa")]  # of no services
    answers[2] = [name for name in answers[2] if name != "XLAProfiler"]  # of a device that is not offered
    return answers


@question
def a_trainer_that_fits_again_from_nothing(L: Any, folder: Path) -> Any:
    """As in active learning, where a new module is trained for each round."""
    answers: list[Any] = []

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = self.trainer.fit_loop
        answers.append((self.current_epoch, batch_idx, self.global_step, loop.total_batch_idx, float(outputs["loss"])))

    def on_validation_epoch_end(self: Any) -> None:
        answers.append(("validated", self.current_epoch, self.global_step))

    at_hand = trainer_of(L, max_epochs=2, num_sanity_val_steps=0, val_check_interval=5, check_val_every_n_epoch=None)
    for round_ in range(3):
        if round_:
            at_hand.fit_loop.epoch_progress.reset()
            at_hand.fit_loop.epoch_loop.batch_progress.reset()
            at_hand.fit_loop.epoch_loop.scheduler_progress.reset()
            at_hand.fit_loop.epoch_loop.automatic_optimization.optim_progress.reset()
            answers.append((at_hand.current_epoch, at_hand.global_step))
        hooks = {"on_train_batch_end": on_train_batch_end, "on_validation_epoch_end": on_validation_epoch_end}
        at_hand.fit(module_of(L, **hooks), loader(), loader(8))
    return answers


@question
def hooks_of_the_first_lightning(L: Any, folder: Path) -> Any:
    """Each stage refuses those that it would have called; a project trains with a test_epoch_end that nobody ported."""
    answers = []
    for hook in ("training_epoch_end", "validation_epoch_end", "test_epoch_end"):
        for stage in ("fit", "validate", "test", "predict"):
            module = module_of(L, **{hook: lambda self, outputs: None})
            try:
                getattr(trainer_of(L), stage)(module, loader())
                answers.append("goes on")
            except NotImplementedError:
                answers.append("refused")
    return answers


@question
def a_first_epoch_set_by_hand(L: Any, folder: Path) -> Any:
    epochs = []
    trainer = trainer_of(L, max_epochs=4)
    trainer.fit_loop.epoch_progress.current.processed = 2
    trainer.fit_loop.epoch_progress.current.completed = 2
    trainer.fit(module_of(L, on_train_epoch_start=lambda self: epochs.append(self.current_epoch)), loader())
    return epochs, trainer.current_epoch, trainer.global_step


@question
def optimizers_replaced(L: Any, folder: Path) -> Any:
    names = []

    class Replacing(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers = [torch.optim.Adam(pl_module.parameters(), lr=0.01)]
            names.append(type(trainer.optimizers[0]).__name__)

    module = module_of(L)
    trainer_of(L, max_epochs=2, callbacks=Replacing()).fit(module, loader())
    return names, dict(module.state_dict())


@question
def schedulers_and_optimizers(L: Any, folder: Path) -> Any:
    answers = []

    def ask(self: Any) -> None:
        one = self.lr_schedulers()
        answers.append([type(one).__name__, type(self.optimizers(use_pl_optimizer=False)).__name__])
        for config in self.trainer.lr_scheduler_configs:
            answers.append(found(config, "interval frequency monitor name reduce_on_plateau strict"))
        answers.append(isinstance(self.optimizers(), import_module(f"{L.__name__}.core.optimizer").LightningOptimizer))

    trainer_of(L).fit(module_of(L, on_train_start=ask), loader())
    without = module_of(L, on_train_start=ask)
    without.configure_optimizers = lambda: torch.optim.Adam(without.parameters())
    trainer_of(L).fit(without, loader())
    return answers


@question
def an_optimizer_around_another(L: Any, folder: Path) -> Any:
    """As hooks unwrap it, and as tests of a hook make one without a Trainer."""
    kind = import_module(f"{L.__name__}.core.optimizer").LightningOptimizer
    answers = []

    def ask(self: Any) -> None:
        one = self.optimizers()
        answers.append([one._optimizer is one.optimizer, one.state is one._optimizer.state])

    trainer_of(L).fit(module_of(L, on_train_start=ask), loader())
    weight = torch.nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    one = kind(raw)
    answers.append([isinstance(one, torch.optim.SGD), isinstance(one, kind), one.optimizer is raw])
    answers.append([one.param_groups is raw.param_groups, sorted(one.state_dict()), one.defaults["lr"]])
    return answers


@question
def names_over_loaders(L: Any, folder: Path) -> Any:
    trainer, module, two = trainer_of(L), module_of(L), [loader(10), loader(7)]
    answers = [trainer.validate(module, two, verbose=False), trainer.test(module, two, verbose=False)]
    trainer.fit(module, loader(), two)
    return answers, dict(trainer.callback_metrics), dict(trainer.logged_metrics)


@question
def predictions(L: Any, folder: Path) -> Any:
    trainer, module = trainer_of(L), module_of(L)
    answers = [trainer.predict(module, loader(10)), trainer.predict(module, [loader(10), loader(6)])]
    return answers, trainer.predict(module, loader(10), return_predictions=False)


@question
def data_sets_as_a_data_module(L: Any, folder: Path) -> Any:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    def told(made: Any) -> Any:
        if isinstance(made, (list, tuple)):
            return [told(item) for item in made]
        if isinstance(made, dict):
            return {key: told(item) for key, item in made.items()}
        return type(made.sampler).__name__, made.batch_size

    data = TensorDataset(torch.arange(10.0))
    build = L.LightningDataModule.from_datasets
    whole = build(data, [data, data], data, predict_dataset=data, batch_size=3)
    other = build(train_dataset={"a": data, "b": data}), build(train_dataset=Stream())
    stages = [getattr(whole, f"{stage}_dataloader")() for stage in ("train", "val", "test", "predict")]
    return [told(made) for made in stages], [told(module.train_dataloader()) for module in other]


@question
def seeds(L: Any, folder: Path) -> Any:
    def environment() -> Any:
        return [os.environ.pop("PL_GLOBAL_SEED"), os.environ.pop("PL_SEED_WORKERS")]

    answers: list[Any] = [L.seed_everything(7, workers=True, verbose=False), environment(), torch.initial_seed()]
    answers += [L.seed_everything(verbose=False), environment()]
    with pytest.raises(ValueError, match="numpy"):
        L.seed_everything(2**32)
    os.environ["PL_GLOBAL_SEED"] = "13"
    return [*answers, L.seed_everything(verbose=False), environment()]


@question
def gathered(L: Any, folder: Path) -> Any:
    answers = []

    def ask(self: Any) -> None:
        weight = torch.ones(2, requires_grad=True)
        back = self.all_gather(weight, sync_grads=True)
        answers.append([list(back.shape), back.requires_grad, self.all_gather({"a": torch.ones(3), "b": 2})])
        strategy = self.trainer.strategy
        answers.append([strategy.root_device.type, strategy.broadcast(3), strategy.is_global_zero, self.fabric])
        answers.append(list(strategy.all_gather(torch.ones(3)).shape))

    trainer_of(L).fit(module_of(L, on_train_start=ask), loader())
    return answers


@question
def types_of_what_is_logged(L: Any, folder: Path) -> Any:
    answers = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        whole = torch.tensor(batch_idx + 1)
        self.log("both", whole, on_step=True, on_epoch=True)
        self.log("step", whole, on_step=True, prog_bar=True)
        self.log("number", batch_idx)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self: Any, *rest: Any) -> None:
        kinds = (self.trainer.callback_metrics, self.trainer.logged_metrics)
        answers.append([{name: str(value.dtype) for name, value in one.items()} for one in kinds])

    module = module_of(L, training_step=training_step, on_train_batch_end=on_train_batch_end)
    trainer_of(L, log_every_n_steps=1).fit(module, loader())
    return answers


@question
def loggers(L: Any, folder: Path) -> Any:
    answers: list[Any] = []

    def draw(self: Any) -> None:
        self.logger.experiment.add_image("image", torch.rand(3, 4, 4), 0)
        self.logger.experiment.add_text("text", "x")
        answers.append([Path(self.logger.log_dir).relative_to(folder).as_posix(), self.logger.version])

    table = L.loggers.CSVLogger(folder, name="csv")
    trainer_of(L, logger=table, log_every_n_steps=2).fit(module_of(L), loader(), loader(8))
    answers += [table.experiment.metrics, table.version, Path(table.log_dir).relative_to(folder).as_posix()]
    answers.append((Path(table.log_dir) / "metrics.csv").read_text().splitlines()[0])
    board = L.loggers.TensorBoardLogger(folder, name="board", sub_dir="sub")
    trainer_of(L, logger=board).fit(module_of(L, on_train_start=draw), loader())
    return answers


@question
def learning_rates(L: Any, folder: Path) -> Any:
    def by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    def two(self: Any) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.Adam(self.net[3].parameters(), lr=0.2)

    manual = module_of(L, training_step=by_hand, configure_optimizers=two)
    manual.automatic_optimization = False

    class Stopping(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = batch_idx == 1 and trainer.current_epoch == 0

    answers = []
    for number, (module, options) in enumerate(
        [
            (module_of(L), {"accumulate_grad_batches": 2, "log_every_n_steps": 2}),
            (manual, {"log_every_n_steps": 2}),
            (module_of(L), {"callbacks": [Stopping()], "min_epochs": 2}),
        ]
    ):
        monitor = L.callbacks.LearningRateMonitor("step", log_momentum=True)
        table = L.loggers.CSVLogger(folder, name=str(number))
        callbacks = [*options.pop("callbacks", []), monitor]
        trainer_of(L, max_epochs=2, logger=table, callbacks=callbacks, **options).fit(module, loader(16))
        answers.append([monitor.lrs, _numbers(Path(table.log_dir) / "metrics.csv")])
    return answers


def _numbers(path: Path) -> list[list[float | None]]:
    """The cells of a table of metrics, to six digits as values are kept as float32 by one library."""
    rows = path.read_text().splitlines()
    cells = [[float(cell) if cell else None for cell in row.split(",")] for row in rows[1:]]
    return [[None if cell is None else float(f"{cell:.5g}") for cell in row] for row in cells]


@question
def hooks_that_change_checkpoints(L: Any, folder: Path) -> Any:
    answers: list[Any] = []

    def on_save(self: Any, checkpoint: Any) -> None:
        checkpoint["mine"], checkpoint["state_dict"]["extra"] = 3, torch.ones(1)

    def on_load(self: Any, checkpoint: Any) -> None:
        answers.append([checkpoint["mine"], checkpoint["state_dict"].pop("extra")])

    module = module_of(L, on_save_checkpoint=on_save, on_load_checkpoint=on_load)
    trainer = trainer_of(L)
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "a.ckpt")
    type(module).load_from_checkpoint(folder / "a.ckpt")
    resumed = trainer_of(L, max_epochs=2)
    resumed.fit(type(module)(), loader(), ckpt_path=folder / "a.ckpt")
    return answers, resumed.global_step


@question
def a_model_made_late(L: Any, folder: Path) -> Any:
    made = []

    def make(self: Any) -> None:
        made.append(self.late is None)
        if self.late is None:
            self.late = nn.Linear(6, 3)

    members = {"late": None, "configure_model": make}
    module = module_of(L, **members)
    trainer = trainer_of(L)
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "a.ckpt")
    type(module).load_from_checkpoint(folder / "a.ckpt")
    trainer_of(L).test(module_of(L, **members), loader(10), ckpt_path=folder / "a.ckpt", verbose=False)
    return made


@question
def toggled_optimizers_and_zeroed_gradients(L: Any, folder: Path) -> Any:
    answers: list[Any] = []

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            answers.append([p.requires_grad for p in self.parameters()])
        with second.toggle_model(sync_grad=True):
            answers.append([p.requires_grad for p in self.parameters()])
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            second.step()
            second.zero_grad()
        answers.append([p.requires_grad for p in self.parameters()])

    def two(self: Any) -> Any:
        return [torch.optim.SGD(self.net[n].parameters(), lr=0.1) for n in (0, 3)]

    def noted(name: str) -> Any:
        return lambda self, *args: answers.append(name)

    hooks = {name: noted(name) for name in ("on_before_zero_grad", "on_before_optimizer_step", "on_before_backward")}
    module = module_of(L, training_step=step, configure_optimizers=two, **hooks)
    module.automatic_optimization = False
    trainer_of(L, limit_train_batches=2).fit(module, loader())
    return answers


@question
def precision_as_a_plugin(L: Any, folder: Path) -> Any:
    answers = []
    for plugin in (L.plugins.DoublePrecision(), L.plugins.HalfPrecision("bf16-true")):
        trainer, module = trainer_of(L, plugins=plugin, limit_train_batches=1), module_of(L)
        trainer.fit(module, loader())
        answers.append([trainer.precision, str(next(module.parameters()).dtype)])
    return answers


@question
def a_projects_own_progress_bar(L: Any, folder: Path) -> Any:
    shown = []

    class Bar(L.callbacks.ProgressBar):  # type: ignore[misc, name-defined]
        def disable(self) -> None: ...
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            shown.append(found(self, "total_train_batches total_val_batches train_description validation_description"))
            shown.append(sorted(self.get_metrics(trainer, pl_module)))

    options = {"enable_progress_bar": True, "callbacks": Bar(), "limit_train_batches": 2}
    trainer_of(L, **options).fit(module_of(L), loader(), loader(8))
    return shown
