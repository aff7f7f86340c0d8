"""Names from deep within Lightning do what they do there: the same calls of both, side by side."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import warnings
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import drivetrain.lightning as L
from drivetrain.errors import ConfigurationError, Interrupted
from tests.facade.recorder import QUIET
from tests.facade.test_deep_names import here


def both(path: str) -> tuple[Any, Any]:
    """Lightning's and what is here."""
    module, _, name = path.rpartition(".")
    full = f"lightning.{module}" if path.startswith("fabric.") else f"lightning.pytorch.{module}"
    return getattr(importlib.import_module(full), name), here(path)


def demos(library: Any) -> Any:
    return importlib.import_module(f"{library.__name__}.demos.boring_classes")


def outcome(function: Any, *args: Any, **more: Any) -> Any:
    """What a call gives, or the builtin kind of error that it raises, and how many warnings it gives."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = function(*args, **more)
        except Exception as error:
            kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            return kinds[0]
    return found, len(told)


class Tree:
    def __init__(self, height: int, *rest: int, leaves: int = 3, **more: int) -> None:
        self.frame = inspect.currentframe()


class Oak(Tree):
    def __init__(self, age: int, **more: int) -> None:
        super().__init__(age * 2, 5, leaves=4, **more)


def test_arguments_of_constructors() -> None:
    frame = Oak(6, bark=1).frame
    for name in ("get_init_args", "collect_init_args"):
        theirs, ours = both(f"utilities.parsing.{name}")
        for more in [()] if name == "get_init_args" else [([],), ([], False, (Tree,)), ([{"x": 1}], True, (Oak,))]:
            assert ours(frame, *[list(one) if isinstance(one, list) else one for one in more]) == theirs(frame, *more)
    assert both("utilities.parsing.get_init_args")[1](inspect.currentframe()) == {}
    theirs, ours = both("utilities.parsing.parse_class_init_keys")
    assert ours(Tree) == theirs(Tree) == ("self", "rest", "more")
    assert ours(Oak) == theirs(Oak) == ("self", None, "more")


def test_clean_namespace() -> None:
    given: list[dict[str, Any]] = []
    for clean in both("utilities.parsing.clean_namespace"):
        given.append({"lr": 1, "function": lambda: 1, "path": Path("x")})
        with pytest.warns(UserWarning, match="'function'"):
            clean(given[-1])
    assert given[0] == given[1] == {"lr": 1, "path": Path("x")}


def caller() -> Any:
    """The frame of the ``__init__`` that called who calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_back


SAVED: list[Any] = [
    lambda save, module: save(module, frame=caller()),
    lambda save, module: save(module, "lr", frame=caller()),
    lambda save, module: save(module, ignore=["width"], given_hparams={"a": 1, "width": 2}),
    lambda save, module: save(module, "a", given_hparams={"a": 1, "width": 2}),
    lambda save, module: save(module, {"a": 1, "b": 2}, ignore="b"),
    lambda save, module: save(module, given_hparams={}),
]


@pytest.mark.parametrize("how", SAVED)
def test_save_hyperparameters(how: Any) -> None:
    found = []
    theirs, ours = both("utilities.parsing.save_hyperparameters")

    class Their(lightning.pytorch.LightningModule):
        def __init__(self, lr: float, width: int = 2, **options: Any) -> None:
            super().__init__()
            how(theirs, self)

    class Our(L.LightningModule):
        def __init__(self, lr: float, width: int = 2, **options: Any) -> None:
            super().__init__()
            how(ours, self)

    for kind in (Their, Our):
        module = kind(0.1, depth=3)
        found.append((dict(module.hparams), dict(module.hparams_initial)))
    assert found[0] == found[1]
    if how is SAVED[0]:
        assert found[1][0] == {"lr": 0.1, "width": 2, "depth": 3}


def test_attributes_wherever_they_are() -> None:
    found = []
    for which, library in enumerate((lightning.pytorch, L)):
        has, get, put = (both(f"utilities.parsing.lightning_{what}attr")[which] for what in ("has", "get", "set"))
        module, data = demos(library).BoringModel(), demos(library).BoringDataModule()
        module.save_hyperparameters({"lr": 1, "width": 2})
        data.save_hyperparameters({"lr": 3})
        module.width, module.own = 4, 5
        seen = [get(module, "lr"), get(module, "width"), has(module, "size"), has(module, "lr")]
        library.Trainer(**QUIET, logger=False, fast_dev_run=1).fit(module, datamodule=data)
        seen += [get(module, "lr"), get(module, "own"), has(module, "random_full"), has(module, "size")]
        put(module, "lr", 9)
        put(module, "width", 7)
        seen += [module.hparams.lr, data.hparams.lr, module.width, module.hparams.width]
        for ask, value in ((get, ()), (put, (1,))):
            with pytest.raises(AttributeError, match="nowhere"):
                ask(module, "nowhere", *value)
        found.append(seen)
    assert found[0] == found[1] == [1, 2, False, True, 3, 5, True, False, 9, 9, 7, 7]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class Alone:
    """A strategy of one rank, or of two of which the other has ``others`` batches."""

    root_device = torch.device("cpu")
    others = 0

    def reduce(self, tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return tensor + self.others


@pytest.mark.parametrize("loader", [DataLoader([1, 2]), DataLoader(Stream()), iter([1]), [], DataLoader([])])
def test_lengths(loader: Any) -> None:
    for name in ("has_iterable_dataset", "sized_len", "has_len"):
        theirs, ours = both(f"fabric.utilities.data.{name}")
        assert outcome(ours, loader) == outcome(theirs, loader), name
    theirs, ours = both("utilities.data.has_len_all_ranks")
    for others in (0, 4):
        strategy = Alone()
        strategy.others = others
        for allowed in (False, True):
            assert outcome(ours, loader, strategy, allowed) == outcome(theirs, loader, strategy, allowed)


def test_samplers() -> None:
    for length, ranks, shuffle in [(7, 2, False), (7, 3, True), (4, 4, False), (0, 2, False)]:
        dealt = []
        for path in (
            "overrides.distributed.UnrepeatedDistributedSampler",
            "overrides.distributed.UnrepeatedDistributedSamplerWrapper",
            "fabric.utilities.distributed.DistributedSamplerWrapper",
        ):
            if length == 0 and "Unrepeated" not in path:
                continue
            each = []
            for kind in both(path):
                samplers = [
                    kind(range(length), num_replicas=ranks, rank=rank, shuffle=shuffle) for rank in range(ranks)
                ]
                for sampler in samplers:
                    sampler.set_epoch(3)
                each.append([(list(sampler), len(sampler)) for sampler in samplers])
            assert each[0] == each[1], path
            dealt.append([number for numbers, _ in each[1] for number in numbers])
        assert all(sorted(numbers) == list(range(length)) for numbers in dealt[:2])
    sampler = here("overrides.distributed.UnrepeatedDistributedSampler")
    with pytest.raises(ValueError, match="2 samples cannot be dealt out to 3 ranks"):
        sampler(range(2), num_replicas=3, rank=0)
    for wrapper in both("overrides.distributed.UnrepeatedDistributedSamplerWrapper"):
        with pytest.raises(TypeError):
            wrapper(iter([1, 2]), num_replicas=1, rank=0)


def test_a_wrapped_sampler_is_told_the_epoch_and_drawn_anew() -> None:
    class Drawn:
        epoch = 0

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(range(self.epoch * 4, self.epoch * 4 + 4))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    read = []
    for kind in both("fabric.utilities.distributed.DistributedSamplerWrapper"):
        sampler = kind(Drawn(), num_replicas=2, rank=1, shuffle=False)
        first = list(sampler)
        sampler.set_epoch(2)
        read.append([first, list(sampler)])
    assert read[0] == read[1] == [[1, 3], [9, 11]]


def test_conversions() -> None:
    given = {"a": True, "b": [1, 2.5], "c": np.arange(3), "d": torch.ones(2), "e": "text", "f": (None,)}
    theirs, ours = both("fabric.utilities.apply_func.convert_to_tensors")
    expected, found = theirs(given, "cpu"), ours(given, "cpu")
    assert repr(found) == repr(expected)
    dtypes = lambda made: [made["a"].dtype, made["b"][0].dtype, made["b"][1].dtype, made["c"].dtype]
    assert dtypes(found) == dtypes(expected)
    theirs, ours = both("fabric.utilities.apply_func.convert_tensors_to_scalars")
    numbers = {"a": torch.tensor(2), "b": [torch.tensor([0.5])], "c": torch.tensor(True), "d": "x"}
    assert ours(numbers) == theirs(numbers) == {"a": 2, "b": [0.5], "c": True, "d": "x"}
    assert outcome(ours, torch.ones(2)) is outcome(theirs, torch.ones(2)) is ValueError


def test_hook_signatures() -> None:
    class Hooks:
        def plain(self, batch: Any, batch_idx: int) -> None: ...
        def several(self, *args: Any) -> None: ...
        @torch.no_grad()
        def decorated(self, batch: Any, *, dataloader_idx: int = 0) -> None: ...

    theirs, ours = both("utilities.signature_utils.is_param_in_hook_signature")
    seen = set()
    for hook in (Hooks().plain, Hooks().several, Hooks().decorated):
        for name in ("batch", "batch_idx", "dataloader_idx"):
            for more in ({}, {"explicit": True}, {"min_args": 2}, {"explicit": True, "min_args": 1}):
                found = ours(hook, name, **more)
                assert found == theirs(hook, name, **more), (hook, name, more)
                seen.add(found)
    assert seen == {True, False}


def test_batch_sizes_and_shapes() -> None:
    theirs, ours = both("utilities.data.extract_batch_size")
    tensor = torch.ones(3, 2)
    for batch in (tensor, [tensor, "x"], {"a": {"b": tensor}}, torch.tensor(1), ("text", tensor)):
        assert ours(batch) == theirs(batch), batch
    theirs, ours = both("utilities.model_summary.parse_batch_shape")
    for batch in (tensor, [tensor, (tensor, "x")], {"a": tensor}, 3):
        assert ours(batch) == theirs(batch), batch
    theirs, ours = both("utilities.model_summary.get_formatted_model_size")
    assert ours(1234.5678) == theirs(1234.5678) == "1,234.568"


def test_merge_dicts() -> None:
    theirs, ours = both("loggers.logger.merge_dicts")
    first = {"a": 1.7, "b": 2.0, "c": 1, "d": {"x": 1, "y": 3}}
    second = {"a": 1.1, "e": 2.3, "d": {"y": 4, "z": {"w": 1}}}
    for functions in (None, {"a": max, "d": {"y": sum}}):
        assert ours([first, second, first], functions) == theirs([first, second, first], functions)
        assert ours([first, second], functions, min) == theirs([first, second], functions, min)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is afterwards as it was, and so are the generators."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))


def test_seeds_again(seeded: None) -> None:
    drawn = []
    with L.utilities.isolate_rng():
        for seed, again in zip(
            both("fabric.utilities.seed.seed_everything"), both("fabric.utilities.seed.reset_seed"), strict=True
        ):
            seed(7, workers=True, verbose=False)
            torch.rand(3), random.random(), np.random.rand()
            again()
            drawn.append((torch.rand(2).tolist(), random.random(), np.random.rand(), os.environ["PL_SEED_WORKERS"]))
        for initialise in both("fabric.utilities.seed.pl_worker_init_function"):
            torch.manual_seed(12)
            initialise(2, rank=1)
            drawn.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and drawn[0][0] != drawn[2][0]


def test_filesystems(tmp_path: Path) -> None:
    theirs, ours = both("fabric.utilities.cloud_io.get_filesystem")
    for path in (tmp_path, str(tmp_path), "memory://x"):
        assert type(ours(path)) is type(theirs(path))


def test_messages_are_told_once() -> None:
    for kind, cache in zip(
        both("fabric.utilities.rank_zero.LightningDeprecationWarning"),
        both("utilities.rank_zero.WarningCache"),
        strict=True,
    ):
        told = cache()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                told.warn("once")
                told.deprecation("old")
        assert [str(one.message) for one in seen] == ["once", "old"] and issubclass(kind, DeprecationWarning)
        assert seen[1].category is kind
    with pytest.warns(here("utilities.rank_zero.LightningDeprecationWarning"), match="soon"):
        here("utilities.rank_zero.rank_zero_deprecation")("soon")


def test_losses_that_are_not_finite() -> None:
    theirs, ours = both("loops.utilities.check_finite_loss")
    for loss in (None, torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor([1.0, float("inf")])):
        assert outcome(ours, loss) == outcome(theirs, loss)


def test_compiled_modules() -> None:
    class Named(torch.nn.Linear): ...

    module = L.demos.BoringModel()
    whole = torch.compile(module, backend="eager")
    found = here("utilities.compile.from_compiled")(whole)
    assert found is module
    trainer = L.Trainer(**QUIET, logger=False, fast_dev_run=1)
    trainer.fit(found)
    assert trainer.global_step == 1
    undo = here("utilities.compile.to_uncompiled")
    assert undo(found) is module and undo(whole) is module
    theirs = lightning.pytorch.utilities.compile
    for one, other in ((here("utilities.compile.from_compiled"), theirs.from_compiled), (undo, theirs.to_uncompiled)):
        for given in (3, Named(1, 1)):
            assert outcome(one, given) is outcome(other, given) is ValueError


def test_from_compiled_compiles_what_is_trained() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(len(graph.graph.nodes))
        return graph.forward

    for undone in (False, True):
        module = here("utilities.compile.from_compiled")(torch.compile(L.demos.BoringModel(), backend=backend))
        if undone:
            here("utilities.compile.to_uncompiled")(module)
        calls.clear()
        L.Trainer(**QUIET, logger=False, fast_dev_run=1).fit(module)
        assert bool(calls) is not undone


def test_a_stop_by_sigterm_is_caught_by_its_name() -> None:
    kind = here("utilities.exceptions.SIGTERMException")
    with pytest.raises(kind) as caught:
        raise Interrupted(15)
    assert caught.value.exit_code == 143 and not isinstance(Interrupted(2), kind)


def test_names_to_annotate_with() -> None:
    loops = importlib.import_module("drivetrain.lightning.loops")
    trainer = L.Trainer(**QUIET, logger=False, fast_dev_run=1)
    assert isinstance(trainer.fit_loop, loops._FitLoop)
    trainer.fit(L.demos.BoringModel())
    assert isinstance(trainer.fit_loop, loops._FitLoop) and isinstance(
        trainer.fit_loop.epoch_loop, loops._TrainingEpochLoop
    )
    assert isinstance(trainer.validation, loops._EvaluationLoop)
    trainer.predict(L.demos.BoringModel())
    assert isinstance(trainer.predict_loop, loops._PredictionLoop)


def test_boring_classes() -> None:
    for name, arguments in [("RandomDictDataset", (3, 2)), ("RandomIterableDataset", (3, 2))]:
        read = []
        for kind in both(f"demos.boring_classes.{name}"):
            with torch.random.fork_rng():
                torch.manual_seed(1)
                read.append(repr([one for _, one in zip(range(2), iter(kind(*arguments)), strict=False)]))
        assert read[0] == read[1]
    for library in (lightning.pytorch, L):
        classes = demos(library)
        trainer = library.Trainer(**QUIET, logger=False, limit_train_batches=2, limit_val_batches=1, max_epochs=1)
        trainer.fit(classes.ManualOptimBoringModel(), datamodule=classes.BoringDataModuleNoLen())
        assert trainer.global_step == 2


@pytest.mark.parametrize("name", ["BoringDataModule", "BoringDataModuleNoLen"])
def test_random_data_is_drawn_at_the_same_moments_and_set_up_for_each_stage(name: str) -> None:
    """What is drawn after them after the same seed is the same, and a second stage has the same rows."""

    def run(library: Any) -> list[Any]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            data = getattr(demos(library), name)()
            seen = [str(data), torch.rand(1).item()]
            for stage in ("validate", "fit", "test", "predict"):
                data.setup(stage)
                loaders = [getattr(data, f"{part}_dataloader", None) for part in ("train", "val", "test", "predict")]
                rows = []
                for loader in loaders:
                    try:
                        rows.append(next(iter(loader())).tolist())
                    except AttributeError:
                        rows.append("not set up")
                seen += [str(data), rows, sum(1 for _ in data.val_dataloader())]
            return [*seen, torch.rand(1).item()]

    assert run(L) == run(lightning.pytorch)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("loggers", f"{name}Logger") for name in ("Comet", "Lit", "Neptune")),
        *(("accelerators", f"{name}Accelerator") for name in ("MPS", "XLA")),
        *(("strategies", f"{name}XLAStrategy") for name in ("", "SingleDevice")),
    ],
)
def test_what_is_for_another_machine_can_be_named_and_not_made(module: str, name: str) -> None:
    """A project derives its logger from a service's, and uses another one."""
    kind = vars(vars(L)[module])[name]

    class Own(kind):
        def __init__(self, project: str) -> None:
            super().__init__(project_name=project)

    trainer = L.Trainer(**QUIET, logger=False)
    assert not isinstance(trainer.strategy, kind)
    assert not isinstance(trainer.accelerator, kind)
    if module == "accelerators":
        assert (kind.is_available(), kind.auto_device_count()) == (False, 0)
    for made in (kind, lambda: Own("a project")):
        with pytest.raises(L.utilities.exceptions.MisconfigurationException, match=f"^{name} is not offered: "):
            made()


def test_the_way_out_is_said_however_it_is_asked_for() -> None:
    said = "use PyTorchProfiler"
    with pytest.raises(ImportError, match=said):
        exec("from drivetrain.lightning.profilers.xla import XLAProfiler")
    with pytest.raises(AttributeError, match=said):
        _ = L.profilers.xla.XLAProfiler
    with pytest.raises(ImportError, match="CSVLogger writes its file itself"):
        exec("from drivetrain.lightning.pytorch.loggers import ExperimentWriter")
    with pytest.raises(AttributeError, match="CSVLogger writes its file itself"):
        _ = L.loggers.ExperimentWriter
    with pytest.raises(ImportError, match="there is no Fabric here"):
        exec("from drivetrain.lightning import Fabric")
    with pytest.raises(ImportError, match="read the Trainer's own attributes"):
        importlib.import_module("drivetrain.lightning.trainer.connectors.logger_connector.result")
    for path in ("drivetrain.lightning", "drivetrain.lightning.pytorch", "lightning.pytorch"):
        connector = importlib.import_module(f"{path}.trainer.connectors.accelerator_connector")._AcceleratorConnector
        assert connector._choose_auto_accelerator() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert issubclass(here("utilities.exceptions.MisconfigurationException"), ConfigurationError)


def test_what_loggers_of_ones_own_use() -> None:
    @dataclass
    class Config:
        a: int = 1
        b: Any = None

    nested = {
        "x": {"y": Namespace(z=1)},
        5: Config(2, {"c": [1]}),
        "l": [{"m": 1}, {"n": 2}],
        "k": [1, {"o": 1}],
        "e": [],
    }
    params = {
        "a": torch.nn.Linear,
        "b": lambda: 3,
        "c": lambda: print,
        "d": lambda x: x,
        "e": np.float64(1.5),
        "f": [1],
    }
    given: dict[str, list[tuple[Any, ...]]] = {
        "_convert_params": [(None,), (Namespace(a=1),), ({"b": 2},)],
        "_flatten_dict": [(nested,), (nested, "."), (nested, "/", "root")],
        "_sanitize_callable_params": [(params,)],
        "_convert_json_serializable": [({"a": 1, "b": Config, "c": [Config], "d": None, "e": {1}},)],
        "_add_prefix": [({"a": 1}, "", "/"), ({"a": 1}, "train", "-")],
    }
    for name, calls in given.items():
        theirs, ours = both(f"fabric.utilities.logger.{name}")
        for arguments in calls:
            assert ours(*arguments) == theirs(*arguments), name
    changed: list[dict[str, Any]] = []
    for sanitize in both("fabric.utilities.logger._sanitize_params"):
        changed.append(dict(params, g=torch.ones(1), h=np.int64(3), i=True))
        assert sanitize(changed[-1]) is changed[-1]
    assert changed[0] == changed[1] and changed[1]["e"] == 1.5 and changed[1]["f"] == "[1]"


def test_devices_and_groups() -> None:
    for path in ("accelerators.cuda.num_cuda_devices", "accelerators.cuda.is_cuda_available"):
        theirs, ours = both(f"fabric.{path}")
        assert ours() == theirs()
    theirs, ours = both("fabric.utilities.distributed._distributed_is_initialized")
    assert ours() is theirs() is False
    for name in ("ReduceOp", "ProcessGroup"):
        theirs, ours = both(f"fabric.utilities.types.{name}")
        assert ours is theirs


def test_ranks_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = both("fabric.utilities.rank_zero._get_rank")
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert ours() is theirs() is None
    for name, rank in (("SLURM_PROCID", 4), ("LOCAL_RANK", 2), ("RANK", 3)):
        monkeypatch.setenv(name, str(rank))
        assert ours() == theirs() == rank
    for name in ("_RICH_AVAILABLE", "_OMEGACONF_AVAILABLE", "_TORCHVISION_AVAILABLE", "_TORCH_GREATER_EQUAL_2_6"):
        expected, found = both(f"utilities.imports.{name}")
        assert bool(expected) is bool(found), name
    for path in (
        "strategies.deepspeed._DEEPSPEED",
        "core.module._ONNX",
        "loggers.wandb._WANDB",
        "cli._JSONARGPARSE_SIGNATURES",
    ):
        expected, found = both(f"{path}_AVAILABLE")
        assert bool(expected) is found, path
    assert L.utilities._TORCH_GREATER_EQUAL_99 is False and L.utilities._TORCH_LESS_EQUAL_99 is True
    assert L.utilities._NO_SUCH_PACKAGE_AVAILABLE is False


def test_loading_a_file(tmp_path: Path) -> None:
    for save in both("fabric.utilities.cloud_io._atomic_save"):
        save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a.ckpt")
    for load in both("fabric.utilities.cloud_io._load"):
        assert torch.equal(load(tmp_path / "a.ckpt", map_location="cpu")["state_dict"]["w"], torch.ones(2))


class Dealt(L.demos.BoringModel):  # type: ignore[misc]
    """Deals its samples out itself, and notes on which ranks what runs."""

    def __init__(self, samples: int, folder: Path) -> None:
        super().__init__()
        self.samples, self.folder = samples, folder

    def predict_dataloader(self) -> Any:
        kind = here("overrides.distributed.UnrepeatedDistributedSampler")
        rows = torch.arange(self.samples)
        sampler = kind(rows, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(rows, batch_size=2, sampler=sampler)

    def on_predict_start(self) -> None:
        self.note("only")
        loader = self.predict_dataloader()
        if here("utilities.data.has_len_all_ranks")(loader, self.trainer.strategy):
            (self.folder / f"length {self.global_rank}").write_text(str(len(loader)))
        try:
            here("utilities.data.has_len_all_ranks")([1] * self.global_rank, self.trainer.strategy)
        except RuntimeError as error:
            (self.folder / f"none {self.global_rank}").write_text(str(error))

    @here("utilities.rank_zero.rank_zero_only")
    def note(self, name: str) -> None:
        (self.folder / f"{name} {self.global_rank}").touch()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return batch


def test_with_several_workers(tmp_path: Path) -> None:
    """Each sample goes to one rank though they are not equally many; the first rank alone does what it alone is to do;
    ranks know of each other's lengths."""
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer = L.Trainer(**{**QUIET, **options}, logger=False)
    found = trainer.predict(Dealt(9, tmp_path))
    assert sorted(torch.cat(found).tolist()) == list(range(9))
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert written.pop("none 0") == "the list has no batch on this rank, but 1 on others: give it one."
    assert written == {"only 0": "", "length 0": "3", "length 1": "2"}


# -- names of before Lightning 2.1 --------------------------------------------------------------------------------
OLD_PRECISIONS = [
    ("amp", "MixedPrecisionPlugin", "MixedPrecision", ("bf16-mixed", "cpu")),
    ("half", "HalfPrecisionPlugin", "HalfPrecision", ("bf16-true",)),
    ("double", "DoublePrecisionPlugin", "DoublePrecision", ()),
    ("precision", "PrecisionPlugin", "Precision", ()),
]


@pytest.mark.parametrize(("module", "old", "new", "given"), OLD_PRECISIONS)
def test_old_names_of_precisions_are_found_wherever_lightning_finds_them(
    module: str, old: str, new: str, given: tuple[str, ...]
) -> None:
    for path in ("plugins", "plugins.precision", f"plugins.precision.{module}"):
        theirs, mine = both(f"{path}.{old}")
        assert mine is here(f"plugins.{new}")
        if given:
            assert mine(*given).name == theirs(*given).precision
    assert here("plugins.precision.precision_plugin.PrecisionPlugin") is here("plugins.Precision")


@pytest.mark.parametrize(
    "old",
    [
        "BitsandbytesPrecisionPlugin",
        "DeepSpeedPrecisionPlugin",
        "FSDPMixedPrecisionPlugin",
        "FSDPPrecisionPlugin",
        "TPUBf16PrecisionPlugin",
        "TPUPrecisionPlugin",
        "TransformerEnginePrecisionPlugin",
        "XLABf16PrecisionPlugin",
        "XLAPrecisionPlugin",
    ],
)
def test_old_names_of_precisions_not_offered_say_the_way_out(old: str) -> None:
    assert hasattr(lightning.pytorch.plugins, old)
    with pytest.raises(ImportError, match="is not offered: "):
        exec(f"from drivetrain.lightning.plugins.precision import {old}")


@pytest.mark.parametrize(
    "path", ["loops._Loop", "loops.loop._Loop", "loops.fetchers._DataFetcher", "loops.progress._BatchProgress"]
)
def test_private_names_of_loops_can_be_imported_for_annotations(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"drivetrain.lightning.{module}"), name)
    assert isinstance(found, type) and not isinstance(3, found)
    with pytest.raises(ConfigurationError, match=f"{name} is a part of Lightning's inside"):
        found()


def test_a_loop_of_ones_own_is_refused_where_it_is_made_or_given() -> None:
    class Mine(L.loops._FitLoop):  # type: ignore[misc, name-defined]
        """May be defined."""

    trainer = L.Trainer(**QUIET)
    said = "Mine is a loop of the project's own, and those of the Trainer are not replaced here: do it in hooks"
    with pytest.raises(ConfigurationError, match=said):
        Mine(trainer, max_epochs=3)
    with pytest.raises(ConfigurationError, match="_FitLoop is a loop"):
        L.loops._FitLoop(trainer)

    class Other:
        pass

    for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
        with pytest.raises(ConfigurationError, match="Other is a loop"):
            setattr(trainer, name, Other())
    for name in ("epoch_loop", "val_loop"):
        with pytest.raises(ConfigurationError, match="Other is a loop"):
            setattr(trainer.fit_loop, name, Other())
    trainer.fit_loop = trainer.fit_loop
    assert isinstance(trainer.fit_loop, L.loops._FitLoop)
