"""Deep module paths of Lightning (``callbacks.early_stopping``) lead to the module here that has their names.

Published projects import from them. Each is another name of the module above it, so that no class exists twice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Below which module here a path is found. Only these: ``from ...callbacks import Unknown`` asks for a module of that
# name too, and must fail.
_BELOW = {
    "callbacks": "batch_size_finder callback checkpoint device_stats_monitor early_stopping finetuning"
    " gradient_accumulation_scheduler lambda_function lr_finder lr_monitor model_checkpoint model_summary"
    " on_exception_checkpoint prediction_writer progress progress.progress_bar progress.rich_progress"
    " progress.tqdm_progress pruning rich_model_summary spike stochastic_weight_avg throughput_monitor timer"
    " weight_averaging progress.base",
    "loggers": "base csv_logs logger mlflow tensorboard utilities wandb",
    "profilers": "advanced base profiler pytorch simple",
    "strategies": "ddp deepspeed fsdp model_parallel parallel single_device strategy",
    "plugins": "environments io io.checkpoint_plugin io.torch_plugin layer_sync precision precision.amp"
    " precision.double precision.half precision.precision",
    "accelerators": "accelerator cpu cuda",
    "demos": "boring_classes lstm mnist_datamodule transformer",
    "tuner": "batch_size_scaling lr_finder tuning",
    "core": "datamodule hooks lightning mixins mixins.hparams_mixin module optimizer",
    "utilities": "apply_func argparse cloud_io combined_loader compile consolidate_checkpoint data deepspeed"
    " distributed enums exceptions grads imports memory migration model_helpers"
    " parameter_tying parsing rank_zero seed signature_utils types upgrade_checkpoint"
    " warnings",
}
_FOUND_IN = {f"{home}.{path}": home for home, paths in _BELOW.items() for path in paths.split()} | {
    "core.saving": "saving",
    "trainer.states": "states",
    "trainer.trainer": "trainer",
    "overrides.distributed": "utilities",
    "utilities.model_summary": "model_summary",
    "utilities.model_summary.model_summary": "model_summary",
}


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
        return None if self.target(fullname) is None else ModuleSpec(fullname, self, is_package=True)

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
    """Let the paths below ``module`` be its attributes as well (``L.utilities.types``): Lightning imports them all. A
    name that leads to another module is one when it is asked for."""
    root, _, short = module.rpartition(".")
    found = sys.modules[module]
    below = {path.removeprefix(f"{short}."): home for path, home in _FOUND_IN.items() if path.startswith(f"{short}.")}
    for path, home in below.items():
        if home == short:
            for name in path.split("."):
                vars(found).setdefault(name, found)
    elsewhere = {path: home for path, home in below.items() if home != short and "." not in path}

    def lead(name: str) -> ModuleType:
        if name not in elsewhere:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return importlib.import_module(f"{root}.{elsewhere[name]}")

    if elsewhere:
        vars(found)["__getattr__"] = lead


def install(root: str) -> None:
    """Answer imports below ``root`` that are other names."""
    if not any(isinstance(finder, _DeepNames) and finder.root == root for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeepNames(root))  # before files are looked for: a second name is no second module
