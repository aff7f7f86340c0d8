"""Which samples a rank reads. A global batch is split among the replicas; nothing is repeated or dropped.

Global batch ``i`` of ``n`` samples goes to ``size`` replicas in contiguous parts whose sizes differ by at most one.
A batch of fewer samples than replicas goes *whole* to every replica in training (and wherever the strategy needs
every rank in every forward pass), each copy weighing ``1/size``; in evaluation otherwise one sample goes to each of
the first ``n`` replicas and the others sit the batch out.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from drivetrain.batch_limits import as_slice, limited
from drivetrain.batch_parts import MicroBatch, batch_size, is_even, part, take
from drivetrain.collated_part import collates_a_stream, parted
from drivetrain.errors import ConfigurationError, TrainingError, WrongKindError
from drivetrain.grad_mode import in_its_own_mode
from drivetrain.loader_processes import Watched, watched
from drivetrain.loaders import (
    dealt_by_itself,
    dealt_to,
    dealt_to_one,
    has_sampler_of_its_own,
    is_dealt,
    read_by,
    reading_options,
    with_last_batch,
)
from drivetrain.loaders import in_order as read_in_order
from drivetrain.natural_draws import NaturalDraws
from drivetrain.own_generators import OwnGenerators
from drivetrain.private_random import PrivateRandom, mix
from drivetrain.rank_batches import Cut, Numbered, as_told, one_ahead, rank_part, sized
from drivetrain.resharded import Resharded, can_be_resharded, resharded
from drivetrain.sample_draws import SampleDraws
from drivetrain.sample_orders import Dealt, EpochOrder, Noted, OfRun, ShardedBatches
from drivetrain.seeded_dataset import go_on_as
from drivetrain.stateful_loader import Places, Stateful
from drivetrain.strategy import Shard

__all__ = ["BatchSource", "MicroBatch", "batch_size", "part", "take"]


class BatchSource:
    """One loader as this rank reads it.

    Args:
        loader: a torch DataLoader, or any iterable of collated global batches.
        shard: this rank's part.
        mode: ``"global"`` (the loader's batch is split) or ``"per_process"`` (every replica gets a batch of that
            size; a stream is read by each rank as its own).
        seed: of the shuffle; combined with the epoch.
        training: training shuffles anew every epoch and gives whole tails to every replica.
        limit: batches to read: a number, a fraction, or None for all.
        in_order: read a shuffled loader in the order of its data set (overfitting).
        order: where a shuffle comes from, see :class:`drivetrain.meanings.Meanings`; ``"sampler"`` is ``"torch"`` with
            the order of a ``DistributedSampler`` in one process, too.
        natural: whether reading may draw from the global generators, where ``order`` does not say it.
        own: whether what ``loader`` gives is this rank's already.
        numbers: whether the samples' numbers in the data set are asked for (prediction).
    """

    def __init__(
        self,
        loader: Any,
        shard: Shard,
        *,
        mode: str,
        seed: int,
        training: bool,
        limit: int | float | None = None,
        index: int = 0,
        reshard: bool = True,
        in_order: bool = False,
        order: str = "seed",
        natural: bool | None = None,
        own: bool = False,
        numbers: bool = False,
    ) -> None:
        self.in_order = in_order
        self.generators = OwnGenerators(loader)
        self.samples = SampleDraws(lambda: [one.loader for one in (self, *self.at_once)])
        # Lightning tells samplers only: a batch sampler's order stays what it was unless the project tells it itself.
        self._tells_all = order == "seed"
        self.drawn = isinstance(getattr(loader, "sampler", None), RandomSampler)
        if numbers:
            loader = with_last_batch(loader)
        # As in a loop by hand: the loader draws from the global generators, at the moments at which it is read.
        self.natural = order != "seed" and shard.size == 1 if natural is None else natural
        if self.natural and in_order:
            shuffled, loader = loader, read_in_order(loader)
            if training and loader is not shuffled:
                warnings.warn("overfit_batches reads the training data in order, not shuffled.", stacklevel=2)
        self._dealer: DistributedSampler[Any] | None = None
        if self.natural and not in_order and reshard and order == "sampler":
            # As on several ranks: what a loader's batch is to each of them is what Lightning shuffles.
            dealt = dealt_to_one(loader, seed, training and mode == "per_process")
            self._dealer = None if dealt is loader else dealt.sampler
            loader = dealt
        elif order == "sampler" and shard.size > 1 and mode == "per_process" and reshard and not (in_order or numbers):
            dealt = dealt_by_itself(loader, seed, training, shard.size, shard.rank)
            self._dealer = dealt.sampler if dealt is not loader and training else None
            own = own or dealt is not loader
            loader = dealt
        self._noted: Noted | None = None
        numbered = numbers and type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
        if self.natural and numbered and loader.batch_sampler is not None:
            self._noted = Noted(loader.batch_sampler)
            loader = DataLoader(
                loader.dataset, batch_sampler=self._noted, generator=loader.generator, **reading_options(loader)
            )
        self._as_sampler = order != "seed" and shard.size > 1
        self._opened: Iterator[Any] | None = None
        self._looked = False
        self.opened = False  # whether that was ever done
        self._draws = NaturalDraws()
        self.loader, self.shard, self.mode, self.training, self.index = loader, shard, mode, training, index
        self.seed = seed
        self.whole_tail = training or shard.lockstep
        self.epoch = 0
        self._resharded: Resharded | None = None
        self._sampler: ShardedBatches | None = None
        self._order: EpochOrder | None = None
        self._shown: DataLoader[Any] | None = None
        self.reader: Any = loader
        self.stream = True
        self._batches: Any = loader
        if not hasattr(loader, "__iter__"):
            raise WrongKindError(
                f"a loader must be iterable, this one is a {type(loader).__name__}: return a DataLoader or a list"
                " of batches."
            )
        if reshard and not self.natural and can_be_resharded(loader, shard, mode):
            self._resharded = cut = resharded(
                loader,
                shard,
                seed,
                mode=mode,
                training=training,
                whole_tail=self.whole_tail,
                in_order=in_order,
                as_sampler=self._as_sampler,
            )
            self.reader, self._sampler, self._batches, self._order = cut.reader, cut.sampler, cut.batches, cut.order
            self.stream = False
        # What reads its samples by a sampler of ours stands where that does.
        readable = self._sampler is None and isinstance(loader, Stateful)
        self._places = Places(loader) if readable else None
        self.own_stream = not self._sampler and (own or mode == "per_process" or not reshard) and shard.size > 1
        self._of_run: OfRun | None = None
        if self._sampler is None and not self.natural and has_sampler_of_its_own(loader):
            sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
            self._of_run = OfRun(sampler, mix(seed, 2 * index + training))
            self.reader = read_by(loader, self._of_run)
        if reshard and not self.natural and collates_a_stream(loader):
            self.reader = parted(loader, Shard(0, 1) if self.own_stream else shard, self.whole_tail)
        self.reader = watched(self.reader)
        self.at_once: list[BatchSource] = []  # what it reads at once, whose batches need not be of one size
        self.limit_at_once: int | float | None = None  # of the batches of each of these
        self.combined: Any = None  # what these were given as
        self.inner = False  # whether it is one of several that are read at once, whose collections are a source
        self.compared = False  # whether ranks looked if they read the same
        self.mark = 0.0  # fingerprint of the first batch that an evaluation read whole, of a stream that is split here
        # Lightning takes what a loader says of its length for a guess. Ranks of which each reads its own agree on the
        # end of an epoch's training (drivetrain.loops.windows), and wait for no other's batch in an evaluation, but for
        # that of sharded parameters.
        together = shard.lockstep and not training
        self._may_end_early = order != "seed" and (self.natural or (self.own_stream and not together))
        self._told_early_end = False
        self.full_length = self._length()
        self.length = limited(self.full_length, limit)
        self.uncounted = self.full_length == float("inf")  # on any rank

    def _length(self) -> int | float:
        counted = self._batches if self._sampler is not None else self.loader
        try:
            return len(counted)
        except (TypeError, NotImplementedError):
            return float("inf")

    def agree_on_length(self, lengths: list[list[int | float]]) -> None:
        """Learn ``[full_length, length]`` of every rank: all read as many batches as the shortest has.

        Streams without a length end together too: see :mod:`drivetrain.loops.windows`.

        Raises:
            ConfigurationError: ranks that share their batches have different numbers of them.
        """
        if self.own_stream:
            self.uncounted = any(full == float("inf") for full, _ in lengths)
            self.length = self.length if self.uncounted else min(length for _, length in lengths)
        elif any(one != lengths[0] for one in lengths):
            raise ConfigurationError(
                f"the ranks' loaders have {', '.join(str(n) for _, n in lengths)} batches: with batch=global every rank"
                " must get the same data and keeps its part; use batch=per_process and use_distributed_sampler=False"
                " for data that is split by rank."
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is read; also tells the user's own samplers."""
        self.epoch = epoch
        if self._order is not None:
            self._order.epoch = epoch
        for sampler in (self._sampler, self._of_run):
            if sampler is not None:
                sampler.epoch = epoch
        if self._shown is not None:
            self._shown.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for source in self.at_once:
            source.set_epoch(epoch)
        batches = getattr(self.loader, "batch_sampler", None)
        owners: list[Any] = [getattr(self.loader, "sampler", None), getattr(batches, "sampler", None)]
        if self._tells_all:
            owners += [self.loader, batches]
        for owner in {id(owner): owner for owner in owners}.values():
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)

    def sizes(self) -> list[int] | None:
        """Samples of each global batch of the epoch where they are known without reading (our own order)."""
        if self._order is None:
            return None
        batches = self._batches.batches if isinstance(self._batches, Dealt) else self._batches
        size, drop = batches.batch_size, batches.drop_last
        whole, rest = divmod(len(self._order), size)
        return ([size] * whole + ([rest] if rest and not drop else []))[: as_slice(self.length)]

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.read()

    def read(self, start: int = 0) -> Iterator[MicroBatch]:
        """The epoch's batches from number ``start`` on.

        A stream is read again from its beginning, with the random numbers that it had the first time.
        """
        if self.length == 0:
            return iter(())
        if not self.natural:
            self.generators.opening(self.epoch)
        self.samples.begin(start)
        if (start == 0 or self._sampler is not None) and not self.inner:
            self.samples.resume()
        if self._sampler is not None:
            return self._read_sampled(start)
        if self.natural:
            return self._read_natural(start)
        numbered = self._numbered(self._repeatable(), start)
        if self.full_length != float("inf"):
            return self._read_sized(numbered, start)
        return self._read_unsized(numbered)

    # -- in the natural order -----------------------------------------------------------------------------------
    def open(self, keep: bool = True, anew: bool = False) -> None:
        """Make the iterator of the epoch that is read next, which draws from the generators now. Nothing to do where
        the order is our own. Lightning does not ``keep`` that of a loader that it asked for anew. ``anew``: also where
        there is one already."""
        if self.natural and (anew or self._opened is None) and self.length != 0:
            self.look()
            self._draws.count(anew)
            self.generators.opening(self.epoch)
            self._draws.opening()
            self.opened = True
            opened = iter(self.reader)
            if opened is self.reader or opened is self.loader:
                opened = _going_on(opened)
            opened = in_its_own_mode(opened)
            if self._looks_ahead:
                opened = chain(list(islice(opened, 1)), opened)
            self._opened = opened if keep else None

    def look(self) -> None:
        """Once ask a loader that is none of torch's for an iterator and leave that, as Lightning does to see whether
        there is one: a loader may draw its order then."""
        for source in self.at_once:
            source.look()
        own = not self.at_once and not isinstance(self.loader, DataLoader)
        if own and self.natural and self.length != 0 and not self._looked:
            iter(self.loader)
            self._looked = True

    def _read_natural(self, start: int) -> Iterator[MicroBatch]:
        placed = self._places is not None and self._places.resume(start)
        if placed:
            self._opened = None
        if start and self._draws.resumed:  # as the epoch was opened and begun before
            self._draws.as_opened()
            self._opened = None
            self.open()
            self._draws.as_begun()
        self.open()
        opened, self._opened = self._opened, None
        assert opened is not None
        self._draws.beginning()
        numbered = self._numbered(opened, start, placed)
        if self.full_length != float("inf"):
            read = self._read_sized(numbered, start)
            asked = self.inner and self.counted and self.length == self.full_length
            return _to_the_end(read, numbered) if asked else read
        if self._looks_ahead:
            if start:
                self._draws.as_read_ahead()
            elsewhere = getattr(self.reader, "num_workers", 0) > 0  # drawn in processes that have their own generators
            return self._read_unsized(numbered if elsewhere else self._draws.noting(numbered))
        return as_told(numbered, self._cut(), self.length - 1, start - 1)

    def _numbered(self, opened: Iterable[Any], start: int, placed: bool | None = None) -> Numbered:
        """The batches from number ``start`` on, with their numbers: past those before it, unless the loader was
        ``placed`` there by its own state."""
        places = self._places
        if placed is None:
            placed = places is not None and places.resume(start)
        numbered: Numbered = enumerate(opened, start if placed else 0)
        if not placed:
            for _ in range(start):
                next(numbered, None)
        if not self.inner:
            self.samples.resume()
        if self._looks_ahead:
            self.samples.kept = max(self.samples.kept, 2)
        numbered = self.samples.following(numbered, start)
        if places is None:
            return numbered
        if self._looks_ahead:
            places.kept = max(places.kept, 2)
        return places.following(numbered, start)

    def with_processes(self) -> list[Watched]:
        """The loaders that are read here and have processes: its own, or those that it reads at once."""
        own = [self.reader] if isinstance(self.reader, Watched) else []
        return [*own, *(one for source in self.at_once for one in source.with_processes())]

    def keep_places(self, batches: int) -> None:
        """A checkpoint may be made of a moment up to so many batches before what was read."""
        self.samples.kept = batches
        if self._places is not None:
            self._places.kept = batches

    def generators_after(self, ended: bool) -> list[list[Any]]:
        """The states of generators that the project's samplers have, of this loader and of those that it reads at once,
        from which the epoch at hand is read again, or, where it has ``ended``, the next one goes on."""
        return [one.generators.after(self.epoch, ended) for one in (self, *self.at_once)]

    def go_on_with(self, generators: list[list[Any]]) -> None:
        """Let the epoch that is opened next draw from what :meth:`generators_after` gave."""
        for one, found in zip((self, *self.at_once), generators, strict=False):
            one.generators.go_on_from(found)

    def state_dict(self, batches: int = 0, ended: bool = False) -> dict[str, Any]:
        """What the order of the epoch at hand comes from, where the next run's seed may be another; and where a loader
        stood after ``batches`` of it that says so itself."""
        seeded = self._seeded()
        state: dict[str, Any] = {"generators": self.generators_after(ended)}
        state["samples"] = self.samples.after(batches) if batches and not ended else self.samples.now()
        state |= {} if seeded is None else {"seed": seeded.seed}
        if batches and self._places is not None:
            place = self._places.after(batches)
            state |= {} if place is None else {"loader": place}
        if self.natural:
            within = [one._draws for one in self.at_once] if batches else []
            state |= self._draws.state_dict(within, ahead=bool(batches) and self._looks_ahead)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.go_on_with(state.get("generators", []))
        by_process = [one.loader for one in (self, *self.at_once) if state and one._sampler is None]
        self.samples.go_on_from(state.get("samples", []), by_process)
        if not self.own_stream:  # those that the first of other ranks had; what each reads as its own begins anew
            self.go_on_with(state.get("generators_of_one", []))
        self._draws.load_state_dict(state, [one._draws for one in self.at_once])
        if self._places is not None and "loader" in state:
            self._places.go_on_from(state["loader"])
        seeded = self._seeded()
        if seeded is not None and "seed" in state:
            seeded.seed = state["seed"]

    def reseed(self, seed: int) -> None:
        """Give what the source of a run of this seed gives: of a run that goes on from a checkpoint."""
        self.seed = seed
        if self._resharded is not None:
            self._resharded.reseed(seed)
        if self._of_run is not None:
            self._of_run.seed = mix(seed, 2 * self.index + self.training)
        for source in self.at_once:
            source.reseed(seed)

    def go_on_as(self, former: BatchSource) -> None:
        """Draw as ``former`` did, in whose place this is read."""
        if self._resharded is not None and former._resharded is not None:
            go_on_as(self._resharded.reader.dataset, former._resharded.reader.dataset)
        for source, before in zip(self.at_once, former.at_once, strict=False):
            source.go_on_as(before)

    @property
    def chosen_first(self) -> float | None:
        """Fingerprint of the first samples of the epoch that a sampler of the project's chose which is read as it is;
        None where there is no such sampler."""
        return None if self._of_run is None else self._of_run.mark

    def _seeded(self) -> EpochOrder | DistributedSampler[Any] | None:
        """What draws the order of a ``DistributedSampler`` of the run's seed."""
        return self._dealer or (self._order if self._as_sampler else None)

    @property
    def given(self) -> Any:
        """What this source was made of, as the project gave it, or as it is dealt out to this rank."""
        return self.shown if self.combined is None else self.combined.rebuilt([one.shown for one in self.at_once])

    @property
    def shown(self) -> Any:
        """The loader as hooks see it: as a ``DistributedSampler`` deals it out to this rank, where that is meant."""
        dealt = self._as_sampler and self.mode == "per_process" and self._order is not None
        if not dealt or not is_dealt(self.loader):
            return self.loader
        if self._shown is None:
            assert self._order is not None
            self._shown = dealt_to(self.loader, self.shard.size, self.shard.rank, self._order.shuffle, self._order.seed)
            self._shown.sampler.set_epoch(self.epoch)  # type: ignore[attr-defined]
        return self._shown

    @property
    def counted(self) -> bool:
        """Whether there are ``length`` batches for certain; what a stream says of its length is a guess."""
        stream = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        return self.length != float("inf") and not (self.natural and stream)

    @property
    def lengths(self) -> list[int | float]:
        """Its length, or those of the loaders that it reads at once."""
        return [limited(source.length, self.limit_at_once) for source in self.at_once] or [self.length]

    @property
    def plain(self) -> bool:
        """Whether it is a data set with a length, read in order or shuffled, in batches of one size."""
        order = self._order
        return order is not None and not order.replacement and order.samples == order.length

    @property
    def shuffled(self) -> bool:
        """Whether our own order is a permutation drawn for each epoch."""
        return self._order is not None and self._order.shuffle

    def read_samples(self, batches: Iterable[list[int]]) -> Iterator[Any]:
        """Collated batches of just these samples, for this rank alone, by the loader's own workers (a client's data in
        federated training). For ``plain`` sources."""
        assert self._sampler is not None
        self._sampler.given = batches
        try:
            yield from self.reader
        finally:
            self._sampler.given = None

    def _repeatable(self) -> Iterable[Any]:
        if isinstance(self.reader, (list, tuple)):
            return self.reader
        reader_seed = mix(mix(self.seed, self.epoch), 2 * self.index + self.training)
        seed = mix(reader_seed, self.shard.rank if self.own_stream else 0)
        # A loader that iterates in a way of its own may ask torch's for an iterator when its first batch is asked for.
        opening = getattr(self.reader, "num_workers", 0) > 0 and type(self.loader).__iter__ is DataLoader.__iter__
        read = PrivateRandom(self.reader, seed, opening)
        return in_its_own_mode(iter(read))

    def _read_sampled(self, start: int) -> Iterator[MicroBatch]:
        sampler = self._sampler
        assert sampler is not None
        sampler.start, sampler.limit = start, as_slice(self.length)
        final = self.length - 1
        handed = 0
        for handed, batch in enumerate(self.samples.following(self.reader, start), start=1):
            index, total, copies = sampler.plan[handed - 1]
            rows, _ = part(total, self.shard, self.whole_tail)
            chosen = sampler.chosen.pop(handed - 1)
            even = is_even(total, self.shard, copies)
            count = rows.stop - rows.start
            weighs = batch_size(batch, uncut=True) if self._as_sampler else None
            last = index == final
            yield MicroBatch(batch, index, count, total, copies, self.index, last, chosen, even, rows=weighs)
        if handed < self._expected(start):
            raise TrainingError(
                f"the loader ended after {handed} of {self._expected(start)} batches in epoch {self.epoch}: its data"
                " set raised StopIteration or its sampler is shorter than it says."
            )

    def _expected(self, start: int) -> int:
        """Batches that this rank gets from ``start`` on."""
        if self.length == float("inf"):
            return 0
        if self.whole_tail or self.shard.size == 1:
            return max(0, int(self.length) - start)
        sizes = self.sizes()
        if sizes is None:
            return 0
        return sum(size > self.shard.rank for size in sizes[start:])

    def _cut(self) -> Cut:
        return rank_part(self.shard, self.whole_tail, self.own_stream, self.index, self._noted)

    def _read_sized(self, numbered: Numbered, start: int) -> Generator[MicroBatch, None, bool]:
        return sized(numbered, self._cut(), int(self.length) - 1, start, self._ended_early)

    def _ended_early(self, read: int) -> None:
        """The loader gave ``read`` batches, which are fewer than it said.

        Raises:
            TrainingError: that is not to be.
        """
        found = f"the loader ended after {read} of {int(self.length)} batches"
        if not self._may_end_early:
            raise TrainingError(f"{found} in epoch {self.epoch}: it is shorter than its len() says.")
        if self._told_early_end:
            return
        self._told_early_end = True
        then = (
            "the epoch ends there, as under Lightning without what its last batch brings (validation, schedules of"
            " interval epoch)"
        )
        warnings.warn(
            f"{found}, it is shorter than its len() says: {then if self.training else 'the others are left out'}; let"
            " __len__ give the number of batches, or have none.",
            stacklevel=2,
        )

    def _read_unsized(self, numbered: Numbered) -> Iterator[MicroBatch]:
        return one_ahead(numbered, next(numbered, None), self._cut(), self.length - 1)

    @property
    def _looks_ahead(self) -> bool:
        """Whether a batch is read before the one before it is given, from the epoch's opening on, as only that shows
        which is the last."""
        return self.length == float("inf") and not self.inner


def _to_the_end(read: Generator[MicroBatch, None, bool], numbered: Numbered) -> Iterator[MicroBatch]:
    """What was ``read``, and then the loader asked once more, as Lightning does before it begins it again: a sampler
    with a generator of its own draws then."""
    whole = yield from read
    if whole:
        next(numbered, None)


def _going_on(loader: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader that is its own iterator, and begins anew (perhaps in another order) whenever it is asked
    for one: asked no more."""
    while True:
        try:
            batch = next(loader)
        except StopIteration:
            return
        yield batch
