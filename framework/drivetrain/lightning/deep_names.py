"""Deep module paths of Lightning (``callbacks.early_stopping``) lead to the module here that has their names.

Published projects import from them. Each is another name of the module above it, so that no class exists twice.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_utilities.core.imports import package_available

from drivetrain.lightning import not_offered
from drivetrain.lightning.refused_classes import of_the_inside

# Below which module here a path is found. Only these: ``from ...callbacks import Unknown`` asks for a module of that
# name too, and must fail.
_BELOW = {
    "callbacks": "batch_size_finder callback checkpoint device_stats_monitor early_stopping finetuning"
    " gradient_accumulation_scheduler lambda_function lr_finder lr_monitor model_checkpoint model_summary"
    " on_exception_checkpoint prediction_writer progress progress.progress_bar progress.rich_progress"
    " progress.tqdm_progress pruning rich_model_summary spike stochastic_weight_avg throughput_monitor timer"
    " weight_averaging progress.base",
    "loggers": "base comet csv_logs litlogger logger mlflow neptune tensorboard utilities wandb",
    "overrides": "distributed",
    "loops": "evaluation_loop fetchers fit_loop loop prediction_loop progress training_epoch_loop utilities",
    "profilers": "advanced base profiler pytorch simple xla",
    "strategies": "ddp deepspeed fsdp model_parallel parallel single_device single_xla strategy xla",
    "plugins": "io io.async_plugin io.checkpoint_plugin io.torch_plugin io.wrapper io.xla_plugin layer_sync precision"
    " precision.amp precision.bitsandbytes precision.deepspeed precision.double precision.fsdp precision.half"
    " precision.precision precision.precision_plugin precision.transformer_engine precision.xla environments",
    "accelerators": "accelerator cpu cuda mps xla",
    "demos": "boring_classes lstm mnist_datamodule transformer",
    "tuner": "batch_size_scaling lr_finder tuning",
    "core": "datamodule hooks lightning mixins mixins.hparams_mixin module optimizer",
    "utilities": "apply_func argparse cloud_io combined_loader compile consolidate_checkpoint data deepspeed"
    " distributed enums exceptions grads imports memory migration migration.migration migration.utils model_helpers"
    " parameter_tying parsing rank_zero seed signature_utils types upgrade_checkpoint"
    " warnings",
}
# Of Fabric's, whose utilities and plugins projects with a Trainer import as well.
_FABRIC = {
    "accelerators": "accelerators accelerators.accelerator accelerators.cpu accelerators.cuda",
    "loggers": "loggers loggers.csv_logs loggers.logger loggers.tensorboard",
    "plugins": "plugins plugins.io plugins.io.checkpoint_io plugins.io.torch_io plugins.precision plugins.environments"
    " plugins.environments.cluster_environment plugins.environments.kubeflow plugins.environments.lightning"
    " plugins.environments.lsf plugins.environments.mpi plugins.environments.slurm"
    " plugins.environments.torchelastic plugins.environments.xla",
    "utilities": "utilities utilities.apply_func utilities.cloud_io utilities.consolidate_checkpoint utilities.data"
    " utilities.device_dtype_mixin utilities.device_parser utilities.distributed utilities.enums"
    " utilities.exceptions utilities.imports utilities.logger utilities.optimizer utilities.rank_zero utilities.seed"
    " utilities.spike utilities.throughput utilities.types utilities.warnings",
}
_FOUND_IN = (
    {f"{home}.{path}": home for home, paths in _BELOW.items() for path in paths.split()}
    | {f"fabric.{path}": home for home, paths in _FABRIC.items() for path in paths.split()}
    | {
        "core.saving": "saving",
        "trainer.connectors": "connectors",
        "trainer.connectors.accelerator_connector": "connectors",
        "trainer.states": "states",
        "trainer.trainer": "trainer",
        "utilities.model_summary": "model_summary",
        "utilities.model_summary.model_summary": "model_summary",
    }
)


# Lightning's modules say by such names whether a package can be imported, each module of those that it needs.
_AVAILABLE = re.compile(r"_([A-Z0-9_]+)_AVAILABLE")
# Names of Lightning's inside; not what shells and test runners ask anything for (``_repr_html_``).
_PRIVATE = re.compile(r"_(?!_)\w*(?<!_)")
_PACKAGES = {
    "COMET": "comet_ml",
    "JSONARGPARSE_SIGNATURES": "jsonargparse",
    "TORCH_TRT": "torch_tensorrt",
    "XLA": "torch_xla",
}


def _why_not(module: str, name: str) -> str | None:
    """Why ``name`` is not in ``module``, by any of whose paths it may have been asked for."""
    paths = [module, *(path for path, home in _FOUND_IN.items() if home == module)]
    whole = (not_offered.of_module(f"{path}.{name}" if path else name) for path in paths)
    return not_offered.of_name(module, name) or next((why for why in whole if why is not None), None)


class _DeepNames(MetaPathFinder, Loader):
    def __init__(self, root: str) -> None:
        self.root = root

    def target(self, fullname: str) -> str | None:
        """The module that ``fullname`` is another name of."""
        if not fullname.startswith(self.root + "."):
            return None
        path = fullname.removeprefix(self.root + ".")
        if path == "pytorch":
            return self.root
        if path.startswith("pytorch."):
            return f"{self.root}.{path.removeprefix('pytorch.')}"
        home = _FOUND_IN.get(path)
        return None if home is None else f"{self.root}.{home}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.target(fullname) is not None:
            return ModuleSpec(fullname, self, is_package=True)
        self.refuse(fullname)
        return None

    def refuse(self, fullname: str) -> None:
        """Say why a module, or a name that ``from`` asks for and its module has not, is not here. (It is imported as a
        module then, and what the module's ``__getattr__`` said is lost.)

        Raises:
            ImportError: it is of Lightning's surface and not offered.
        """
        if not fullname.startswith(self.root + "."):
            return
        path = fullname.removeprefix(self.root + ".").removeprefix("pytorch.")
        module, _, name = path.rpartition(".")
        why = _why_not(module, name)
        if why is not None:
            raise ImportError(f"{self.root}.{path} is not offered: {why}.", name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        target = self.target(spec.name)
        assert target is not None
        module = importlib.import_module(target)
        spec.loader_state = (module.__spec__, getattr(module, "__path__", []))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module is there and stays what it is; the import system has only put its spec on it."""
        assert module.__spec__ is not None
        module.__spec__, module.__path__ = module.__spec__.loader_state


def name_below(module: str) -> None:
    """Called at the end of ``module``: let the paths below it be its attributes as well (``L.utilities.types``), as
    Lightning imports them all, and answer names that are not offered. A name that leads to another module is one when
    it is asked for. What is loaded when it is asked for is among the names that ``dir`` gives, so that a project can
    look for all classes of a module."""
    root, _, short = module.rpartition(".")
    found = sys.modules[module]
    own: Callable[[str], Any] | None = vars(found).get("__getattr__")
    below = {path.removeprefix(f"{short}."): home for path, home in _FOUND_IN.items() if path.startswith(f"{short}.")}
    for path, home in below.items():
        if home == short:
            for name in path.split("."):
                vars(found).setdefault(name, found)
    elsewhere = {path: home for path, home in below.items() if home != short and "." not in path}

    def lead(name: str) -> Any:
        if name in elsewhere:
            return importlib.import_module(f"{root}.{elsewhere[name]}")
        if package := _AVAILABLE.fullmatch(name):
            return package_available(_PACKAGES.get(package[1], package[1].lower()))
        why = _why_not(short, name)
        if why is not None:
            raise AttributeError(f"{module}.{name} is not offered: {why}.")
        try:
            if own is not None:
                return own(name)
        except AttributeError:
            if not _PRIVATE.fullmatch(name):
                raise
        if _PRIVATE.fullmatch(name):
            return of_the_inside(f"{module}.{name}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    vars(found)["__getattr__"] = lead
    vars(found).setdefault("__dir__", lambda: sorted({*vars(found), *vars(found).get("__all__", ())}))


def install(root: str) -> None:
    """Answer imports below ``root`` that are other names."""
    if not any(isinstance(finder, _DeepNames) and finder.root == root for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeepNames(root))  # before files are looked for: a second name is no second module
