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

# Below which module here a path is found; one that ends in a dot stands for everything below it.
_FOUND_IN = {
    "callbacks.": "callbacks",
    "loggers.": "loggers",
    "profilers.": "profilers",
    "strategies.": "strategies",
    "plugins.": "plugins",
    "accelerators.": "accelerators",
    "demos.": "demos",
    "tuner.": "tuner",
    "core.": "core",
    "trainer.states": "states",
    "trainer.trainer": "trainer",
    "utilities.": "utilities",
    "overrides.distributed": "utilities",
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
        for prefix, home in _FOUND_IN.items():
            if path == prefix or (prefix.endswith(".") and path.startswith(prefix)):
                return f"{self.root}.{home}"
        return None

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


def install(root: str) -> None:
    """Answer imports below ``root`` that are other names."""
    if not any(isinstance(finder, _DeepNames) and finder.root == root for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeepNames(root))  # before files are looked for: a second name is no second module
