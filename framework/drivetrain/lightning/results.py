"""What projects ask of the collection of results that Lightning's loops keep: ``trainer._results``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.lightning.trainer import Trainer
    from drivetrain.metrics import Metrics


class _ResultCollection:
    """What was logged in the epoch at hand, of training or of the evaluation that is going on. Keys are Lightning's:
    the hook, a dot and the name; of several loaders, a dot and the loader's number.

    Attributes:
        DATALOADER_SUFFIX: how a name says which loader it is of.
    """

    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def __init__(self, trainer: Trainer, metrics: Metrics) -> None:
        self._trainer, self._store = trainer, metrics

    @property
    def training(self) -> bool:
        """Whether they are of training."""
        return not self._trainer.evaluating

    @property
    def dataloader_idx(self) -> int | None:
        """The loader at hand, where there are several."""
        store = self._store
        return store.batch.loader if store.several_loaders and store.batch is not None else None

    def metrics(self, on_step: bool) -> dict[str, dict[str, Any]]:
        """What is known of the step, or else of the epoch: for callbacks (``callback``), loggers (``log``) and the bar
        (``pbar``, numbers)."""
        found: dict[str, dict[str, Any]] = {"callback": {}, "log": {}, "pbar": {}}
        trainer = self._trainer
        for entry, name, value in trainer.published.of(self._store, by_step=on_step):
            if self.training or not on_step:
                found["callback"][entry.title] = found["callback"][name] = value
            if entry.logger:
                found["log"][name] = value
            if entry.prog_bar:
                found["pbar"][name] = float(value)
        return found

    def reset(self) -> None:
        """Forget what was logged in the epoch, and what metric objects have gathered."""
        self._store.torchmetrics({})
        self._store.reset()

    def keys(self) -> list[str]:
        return [
            f"{hook}.{name}" if loader is None else f"{hook}.{name}.{loader}"
            for hook, name, loader in self._store.entries
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._store.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()
