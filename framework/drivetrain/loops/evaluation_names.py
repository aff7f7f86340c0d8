"""What projects read of Lightning's evaluation loops: where they stand, and where their data come from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain import stage_data
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.sharding import BatchSource
    from drivetrain.trainer import Trainer


@dataclass
class Count:
    """How many (batches, epochs) were taken up, begun, worked through and left behind."""

    ready: int = 0
    started: int = 0
    processed: int = 0
    completed: int = 0

    def reset(self) -> None:
        self.ready = self.started = self.processed = self.completed = 0


@dataclass
class Progress:
    """Of batches: ``current`` in the epoch, or pass, at hand, ``total`` over all."""

    current: Count = field(default_factory=Count)
    total: Count = field(default_factory=Count)
    is_last_batch: bool = False

    def begin(self) -> None:
        """A pass begins."""
        self.current.reset()
        self.is_last_batch = False

    def take(self, last: bool) -> None:
        """A batch is taken up."""
        self.come_to("ready")
        self.is_last_batch = last

    def come_to(self, moment: str) -> None:
        """The batch at hand has come to ``moment``, a name of :class:`Count`."""
        for count in (self.current, self.total):
            setattr(count, moment, getattr(count, moment) + 1)

    def reset(self) -> None:
        """Nothing was counted."""
        self.begin()
        self.total.reset()

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.current, self.total = Count(**state["current"]), Count(**state["total"])
        self.is_last_batch = state["is_last_batch"]


class DataSource:
    """Where a loop's data come from, to be asked in a stage's first hooks: as projects count an epoch's batches for a
    schedule.

    Args:
        which: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
    """

    def __init__(self, trainer: Trainer, which: str) -> None:
        self._trainer, self._which = trainer, which
        self.name = f"{which}_dataloader"

    @property
    def instance(self) -> Any:
        """The loaders that the stage was given, or the data module or module that makes them; None before any stage."""
        request = self._trainer.request
        found = None if request is None else stage_data.loader_of(request, self._which)
        if request is None or found is request.loaders.get(self._which) is not None:
            return found
        return request.module if request.datamodule is None else request.datamodule

    def is_module(self) -> bool:
        """Whether a data module or module makes the loaders, if there are any."""
        request, instance = self._trainer.request, self.instance
        return request is not None and any(instance is one for one in (request.datamodule, request.module))

    def is_defined(self) -> bool:
        """Whether there are such data; so it is taken where nothing is known of a stage yet."""
        request = self._trainer.request
        return request is None or stage_data.loader_of(request, self._which) is not None

    def dataloader(self) -> Any:
        """The loaders, made by the hook where they come from one.

        Raises:
            ConfigurationError: no stage has begun, or it has no such data, so that there is nothing to ask.
        """
        request = self._trainer.request
        made = None if request is None else stage_data.loader_of(request, self._which)
        if made is None:
            raise ConfigurationError(f"there is no {self.name} to ask for: ask within a stage that has one, in a hook.")
        return made() if callable(made) and not hasattr(made, "__iter__") else made


class EvaluationNames:
    """Where an evaluation stands, under the names of Lightning's loop.

    Attributes:
        batch_progress: counts of batches, over all loaders: ``current`` in this pass, or the last one; ``total`` over
            those of the Trainer's stage or, within a fit, of the epoch.
    """

    trainer: Trainer
    reads: str  # which data
    sources: list[BatchSource]
    batch_progress: Progress

    @property
    def _data_source(self) -> DataSource:
        return DataSource(self.trainer, self.reads)

    @property
    def max_batches(self) -> list[int | float]:
        """Batches of each loader; of the check before training while that is made."""
        if self.trainer.sanity_checking:
            return self.trainer.num_sanity_val_batches
        return [source.length for source in self.sources]

    @property
    def num_dataloaders(self) -> int:
        return len(self.sources)


class NoEvaluation:
    """Stands for an evaluation, or a prediction, where none is made.

    Args:
        which: data it would read.
        progress: what earlier ones have counted.
    """

    def __init__(self, trainer: Trainer, which: str, progress: Progress | None = None) -> None:
        self._data_source = DataSource(trainer, which)
        self.batch_progress = progress or Progress()
        self.predictions: list[Any] = []

    max_batches: list[int | float] = []
    num_dataloaders = 0
