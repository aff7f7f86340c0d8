"""Lightning's loggers by class name; each is a plugin registered under ``drivetrain.loggers``."""

from __future__ import annotations

from typing import Any

from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder
from drivetrain.logger import Logger as Logger
from drivetrain.logger import first_worker_experiment

rank_zero_experiment = first_worker_experiment  # what own loggers decorate ``experiment`` with


class DummyExperiment:
    """Does nothing, whatever is asked of it."""

    def nop(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return self.nop

    def __getitem__(self, index: int) -> DummyExperiment:
        return self

    def __setitem__(self, *args: Any, **kwargs: Any) -> None: ...


class DummyLogger(Logger):
    """Writes nothing; its experiment answers every call."""

    name = ""
    version = ""

    def __init__(self) -> None:
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        return self._experiment

    def __getitem__(self, index: int) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Any:
        return DummyExperiment().nop


NAMES = {
    "CSVLogger": "lightning_csv",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "lightning_tensorboard",
    "WandbLogger": "wandb",
}
NOT_OFFERED = {
    "CometLogger": "derive a logger from drivetrain.Logger that writes there, or use WandbLogger or MLFlowLogger.",
    "LitLogger": "it writes to its vendor's platform: use TensorBoardLogger, MLFlowLogger or WandbLogger.",
    "NeptuneLogger": "derive a logger from drivetrain.Logger that writes there, or use WandbLogger or MLFlowLogger.",
}
__all__ = ["Logger", *NAMES]  # noqa: PLE0604  (they are strings)
__path__: list[str] = []

__getattr__ = finder(__name__, "loggers", NAMES, NOT_OFFERED)

deep_names.name_below(__name__)
