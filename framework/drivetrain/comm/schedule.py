"""A collective as data: for each round, who sends which chunks to whom, and whether they are added or copied.

One :class:`Schedule` serves every use of an algorithm: ``check`` proves it, ``simulate`` plays it on plain values,
``cost`` predicts its time, ``draw`` shows it, ``execute`` runs it over any transport. No torch here.

A ring of 4,096 ranks has 33 million transfers, so a round is two functions, evaluated when someone looks: what given
ranks send, and what given ranks expect. Asked for all ranks they give the whole round as arrays, asked for one rank
its own part without the others'. ``check`` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from drivetrain.comm.arguments import require_name, require_whole
from drivetrain.errors import ConfigurationError

Op = Literal["add", "copy"]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"]
KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter")
ROOTED: tuple[Kind, ...] = ("broadcast", "reduce", "gather", "scatter")
REDUCING: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "reduce")
OWNED: tuple[Kind, ...] = ("reduce_scatter", "all_gather", "gather", "scatter")

REDUCE_SCATTER = "reduce_scatter"
ALL_GATHER = "all_gather"
REDUCE = "reduce"
BROADCAST = "broadcast"
GATHER = "gather"
SCATTER = "scatter"
FOLD = "fold"
UNFOLD = "unfold"
EXCHANGE = "exchange"

Integers = NDArray[np.int64]


class Transfer(NamedTuple):
    """Rank ``source`` sends its present value of ``chunk`` to ``destination``, which adds it to its own or overwrites.

    All transfers of one round happen at once: each carries the value that its source held before the round.
    """

    source: int
    destination: int
    chunk: int
    op: Op


@dataclass(frozen=True, eq=False)
class Messages:
    """Some messages of one round as arrays of equal length, ``(M,)`` each.

    Message ``i`` carries chunks ``chunk[i]`` to ``chunk[i] + count[i] - 1`` from rank ``source[i]`` to rank
    ``destination[i]``, which adds them to its own (``add[i]``) or overwrites. Several entries between the same two
    ranks are one message with gaps.
    """

    source: Integers
    destination: Integers
    chunk: Integers
    count: Integers
    add: NDArray[np.bool_]

    @classmethod
    def of(
        cls, source: Integers, destination: Integers, chunk: Integers | int, op: Op, count: Integers | int = 1
    ) -> Messages:
        """Messages of one ``op``; a number stands for all. Messages of no chunk (``count`` 0) are left out."""
        size = len(source)
        source, destination, chunk, count = (_column(values, size) for values in (source, destination, chunk, count))
        made = cls(source, destination, chunk, count, np.full(size, op == "add"))
        return made if made.count.all() else made.select(made.count != 0)

    @classmethod
    def join(cls, parts: Iterable[Messages]) -> Messages:
        """All messages of ``parts``, in this order."""
        columns = zip(*((p.source, p.destination, p.chunk, p.count, p.add) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    @classmethod
    def of_transfers(cls, transfers: Iterable[Transfer]) -> Messages:
        """One message of one chunk per transfer.

        Raises:
            ConfigurationError: an operation is neither ``"add"`` nor ``"copy"``.
        """
        listed = list(transfers)
        for transfer in listed:
            if transfer.op not in ("add", "copy"):
                raise ConfigurationError(f"{transfer}: operation {transfer.op!r} is neither 'add' nor 'copy'.")
        numbers = np.array([transfer[:3] for transfer in listed], np.int64).reshape(-1, 3)
        add = np.array([transfer.op == "add" for transfer in listed], np.bool_)
        return cls(numbers[:, 0], numbers[:, 1], numbers[:, 2], np.ones(len(listed), np.int64), add)

    def __len__(self) -> int:
        return len(self.source)

    def select(self, which: ArrayLike) -> Messages:
        """The messages of a mask or of some indices."""
        chosen = np.asarray(which)
        return Messages(
            self.source[chosen], self.destination[chosen], self.chunk[chosen], self.count[chosen], self.add[chosen]
        )

    def transfers(self) -> tuple[Transfer, ...]:
        """Chunk by chunk; for small worlds."""
        columns = (self.source, self.destination, self.chunk, self.count, self.add)
        return tuple(
            Transfer(source, destination, chunk + i, "add" if add else "copy")
            for source, destination, chunk, count, add in zip(*(column.tolist() for column in columns), strict=True)
            for i in range(count)
        )

    def canonical(self) -> Messages:
        """Ordered by destination, source and chunk: equal for equal sets of messages."""
        return self.select(np.lexsort((self.chunk, self.source, self.destination)))


def _column(value: Integers | int, size: int) -> Integers:
    return np.full(size, value, np.int64) if isinstance(value, int) else np.asarray(value, np.int64)


Side = Callable[[Integers], Messages]


@dataclass(frozen=True, eq=False)
class Round:
    """Messages that are under way at the same time.

    Args:
        phase: The part of the algorithm, for example ``"reduce_scatter"``.
        step: Number of the round within its phase, from 0.
        world_size: Number of ranks.
        sends: For an array of different ranks, what these send.
        receives: For an array of different ranks, what these expect.
    """

    phase: str
    step: int
    world_size: int
    sends: Side
    receives: Side

    @classmethod
    def listed(cls, phase: str, step: int, world_size: int, messages: Messages) -> Round:
        """A round given by all its messages."""

        # Asked for all, nothing is filtered: check must see messages of ranks that do not exist.
        def sends(ranks: Integers) -> Messages:
            return messages if len(ranks) == world_size else messages.select(np.isin(messages.source, ranks))

        def receives(ranks: Integers) -> Messages:
            return messages if len(ranks) == world_size else messages.select(np.isin(messages.destination, ranks))

        return cls(phase, step, world_size, sends, receives)

    def messages(self) -> Messages:
        """What all ranks send."""
        return self.sends(np.arange(self.world_size))

    def expected(self) -> Messages:
        """What all ranks expect."""
        return self.receives(np.arange(self.world_size))

    def transfers(self) -> tuple[Transfer, ...]:
        """What all ranks send, chunk by chunk; for small worlds."""
        return self.messages().transfers()


class RankRound(NamedTuple):
    """What one rank sends and expects in one round; both empty where it rests."""

    phase: str
    step: int
    sends: Messages
    receives: Messages


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective over ``world_size`` ranks of a tensor cut into ``chunks`` nearly equal pieces.

    =================  =====================================  ==========================================
    ``kind``           before                                 after
    =================  =====================================  ==========================================
    all_reduce         every rank has its contribution        every rank has the whole sum
    reduce_scatter     every rank has its contribution        rank ``owner(c)`` has the sum of chunk c
    all_gather         rank ``owner(c)`` has chunk c          every rank has every chunk
    broadcast          ``root`` has every chunk               every rank has every chunk
    reduce             every rank has its contribution        ``root`` has the whole sum
    gather             rank ``owner(c)`` has chunk c          ``root`` has every chunk
    scatter            ``root`` has every chunk               rank ``owner(c)`` has chunk c
    =================  =====================================  ==========================================

    What the table does not name is undefined: ranks may use the place of any chunk as they like.

    Args:
        name: Name of the algorithm.
        world_size: Number of ranks.
        chunks: Number of pieces; a multiple of ``world_size`` where chunks have owners.
        rounds: One after the other; a rank may run ahead as far as the messages that it waits for allow.
        kind: What the schedule does.
        root: The rank that the kind names.
        ports: To how many ranks one rank may send in one round, and from how many it may receive.
    """

    name: str
    world_size: int
    chunks: int
    rounds: Sequence[Round]
    kind: Kind = "all_reduce"
    root: int = 0
    ports: int = 1

    @classmethod
    def of_transfers(
        cls,
        name: str,
        world_size: int,
        chunks: int,
        rounds: Iterable[Iterable[Transfer]],
        phases: Iterable[str],
        kind: Kind = "all_reduce",
        root: int = 0,
        ports: int = 1,
    ) -> Schedule:
        """A schedule written out transfer by transfer, with the phase of each round.

        Raises:
            ConfigurationError: there are more rounds than phases or the other way round, or an operation is unknown.
        """
        listed, named = [Messages.of_transfers(transfers) for transfers in rounds], list(phases)
        if len(listed) != len(named):
            raise ConfigurationError(f"schedule {name!r} has {len(listed)} rounds but {len(named)} phase names.")
        made = tuple(
            Round.listed(phase, named[:number].count(phase), world_size, messages)
            for number, (phase, messages) in enumerate(zip(named, listed, strict=True))
        )
        return cls(name, world_size, chunks, made, kind, root, ports)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phase of each round."""
        return tuple(each.phase for each in self.rounds)

    def owner(self, chunk: int) -> int:
        """The rank to which ``chunk`` belongs where the kind gives chunks to ranks: equally many each, in order."""
        return chunk * self.world_size // self.chunks

    def of_rank(self, rank: int) -> list[RankRound]:
        """What ``rank`` does, round by round, made without what the other ranks do."""
        alone = np.array([rank], np.int64)
        return [RankRound(each.phase, each.step, each.sends(alone), each.receives(alone)) for each in self.rounds]

    def equals(self, other: Schedule) -> bool:
        """Whether both have the same rounds with the same messages; looks at all of them."""

        def facts(one: Schedule) -> tuple[object, ...]:
            return one.name, one.world_size, one.chunks, len(one.rounds), one.kind, one.root, one.ports

        return facts(self) == facts(other) and all(map(_same_round, self.rounds, other.rounds))


def _same_round(one: Round, other: Round) -> bool:
    if (one.phase, one.step) != (other.phase, other.step):
        return False
    return same_messages(one.messages(), other.messages()) and same_messages(one.expected(), other.expected())


def same_messages(one: Messages, other: Messages) -> bool:
    """Whether both hold the same messages, in whatever order."""
    if len(one) != len(other):
        return False
    return _equal(one, other) or _equal(one.canonical(), other.canonical())


def _equal(one: Messages, other: Messages) -> bool:
    """Whether both hold as many messages, and the same at every place."""
    columns = ("source", "destination", "chunk", "count", "add")
    return all(bool((getattr(one, name) == getattr(other, name)).all()) for name in columns)


Topology = Callable[[int], Schedule]


def require(algorithm: str, world_size: int, kind: Kind, kinds: Sequence[Kind], root: int = 0) -> None:
    """What every topology asks of its arguments.

    Raises:
        ConfigurationError: there is no rank, the algorithm has no such kind, or the root is no rank.
    """
    require_whole("world_size", world_size, whose=f" of a {algorithm}")
    require_name(f"{algorithm} of kind", kind, kinds)
    require_whole("root", root, 0, f" of a {algorithm}")
    if root >= world_size:
        raise ConfigurationError(f"root={root} is no rank of {world_size}: pass 0 to {world_size - 1}.")
