"""The training data of a fit: asked for when it is needed, and again where it is time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain import stage_data
from drivetrain.checkpoint import to_safe
from drivetrain.errors import CheckpointError
from drivetrain.rank_zero import rank_zero_warn
from drivetrain.sharding import BatchSource

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


class TrainingData:
    """What a fit reads its batches from.

    Args:
        source: the data where it is there already.
        epoch: in which training begins.
    """

    def __init__(self, trainer: Trainer, source: BatchSource | None, epoch: int) -> None:
        self.trainer = trainer
        self._source = source
        self._order: dict[str, Any] = {}  # of a source that is not there yet
        self.read_in = epoch  # the epoch in which the loaders were asked for last
        self._next: BatchSource | None = None  # what a project put in its place, for the epochs to come
        self._begun = False  # whether an epoch was
        self.asking = False  # a run resumed at an epoch's end is in that epoch as long as it asks

    @property
    def source(self) -> BatchSource:
        """The training data, asked for where it was not yet."""
        if self._source is None:
            self.asking = True
            self._source = stage_data.training(self.trainer)
            self.asking = False
            self._source.reseed(self.trainer.data_seed)
            self._source.load_state_dict(self._order)
        return self._source

    @source.setter
    def source(self, source: BatchSource) -> None:
        self._source = source

    def order_after(self, batches: int, ended: bool) -> dict[str, Any]:
        """What the order of the epoch's data comes from, and where its loader stands after ``batches``, or when the
        epoch has ``ended``, for a checkpoint."""
        if self._source is None:
            return self._order
        order = self._source.state_dict(0 if ended else batches, ended)
        if "loader" in order:
            try:
                to_safe(order["loader"])
            except CheckpointError as error:
                del order["loader"]
                rank_zero_warn(
                    f"the state of the training loader is not saved: {error}; a run that goes on within the epoch reads"
                    " past the batches that were there."
                )
        return order

    def go_on_from(self, order: dict[str, Any]) -> None:
        """Let the epoch's data be what :meth:`order_after` said."""
        self._order = order
        if self._source is not None:
            self._source.load_state_dict(order)

    def reseed(self, seed: int) -> None:
        """Let the data be in the order of a run of this seed; what is still to be asked for has that anyhow."""
        if self._source is not None:
            self._source.reseed(seed)

    @property
    def given(self) -> Any:
        """The loader, or the combination of several, that is read, or will be in the next epoch."""
        source = self.source if self._next is None else self._next
        return source.loader if source.combined is None else source.combined

    def replace(self, loaders: Any) -> None:
        """Read these in the epochs to come, as they are (a sampler in them deals out what it says), and no more batches
        of them than an epoch has. The fit's first epoch is open before it begins, and is read to its end."""
        length = self.source.length
        limit = self.trainer.limits["train"] if length == float("inf") else int(length)
        self._next = stage_data.sources_of(self.trainer, loaders, "train", limit, reshard=False)[0]

    @property
    def known_empty(self) -> bool:
        """Whether it was asked for and has no batch."""
        if self.trainer.limits["train"] == 0:
            return True
        return self._source is not None and self._source.length == 0

    def begin(self, epoch: int) -> None:
        """Let ``epoch`` be read, from loaders that are asked for again where it is time."""
        every = self.trainer.reload_dataloaders_every_n_epochs
        if every and epoch - self.read_in >= every:
            self._source, self.read_in = stage_data.ask_again(self.trainer, "train")[0], epoch
            self._source.open(keep=False)
            self._next = None
        self.source.set_epoch(epoch)

    def take_up(self, epoch: int) -> None:
        """``epoch`` is opened now: with what was put in the data's place, unless it is the first one."""
        if self._next is not None and self._begun:
            self._source = self.trainer.train_source = self._next
            self._next = None
            self._source.set_epoch(epoch)
        self._begun = True
