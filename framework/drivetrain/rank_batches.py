"""This rank's part of batches that a loader gives whole: of a stream, or of a loader that is read as it is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain.batch_fingerprint import fingerprint
from drivetrain.batch_parts import MicroBatch, batch_size, is_even, part, take
from drivetrain.collated_part import Part
from drivetrain.sample_orders import Noted
from drivetrain.strategy import Shard

Numbered = Iterator[tuple[int, Any]]
# Of a batch's number, the batch and whether it is the last: this rank's part of it, None where it has none.
Cut = Callable[[int, Any, bool], MicroBatch | None]


@dataclass(frozen=True)
class Alike:
    """A batch that ``copies`` replicas have the same samples of."""

    batch: Any
    copies: int


def rank_part(shard: Shard, whole_tail: bool, own: bool, loader: int, noted: Noted | None) -> Cut:
    """How a batch is cut for this rank.

    Args:
        own: whether what the loader gives is this rank's already.
        loader: the loader's number among those of its stage.
        noted: which samples each batch is of, where that is asked for.
    """
    alone = shard.size == 1
    whole = alone or own

    def cut(index: int, batch: Any, last: bool) -> MicroBatch | None:
        alike = 1
        if isinstance(batch, Alike):
            batch, alike = batch.batch, batch.copies
        is_part = isinstance(batch, Part)
        total = batch.total if is_part else batch_size(batch, uncut=whole) or 1
        mark = 0.0
        if index == 0 and not whole:
            mark = batch.mark if is_part else fingerprint(batch)
        if is_part:
            batch = batch.batch
        if whole:
            chosen = None if noted is None else noted.chosen.pop(index, None)
            return MicroBatch(batch, index, total, total, alike, loader, last, chosen, alone)
        rows, copies = part(total, shard, whole_tail)
        if rows.start == rows.stop:
            return None
        mine = batch if is_part or copies > 1 else take(batch, total, rows)
        even = is_even(total, shard, copies)
        return MicroBatch(mine, index, rows.stop - rows.start, total, copies, loader, last, None, even, mark)

    return cut


def sized(
    numbered: Numbered, cut: Cut, final: int, start: int, ended: Callable[[int], None]
) -> Generator[MicroBatch, None, bool]:
    """The batches from ``start`` to ``final``. Where there are fewer, ``ended`` is told how many there were. Gives back
    whether there were all."""
    index = yield from as_told(numbered, cut, final, start - 1)
    if index < final:
        ended(index + 1)
    return index >= final


def as_told(numbered: Numbered, cut: Cut, final: int | float, before: int = -1) -> Generator[MicroBatch, None, int]:
    """A stream that says how long it is, after batch ``before``. Where it is shorter, no batch was the last. Gives back
    the number of the last batch that there was, ``before`` where there was none."""
    index = before
    if before >= final:  # a run that goes on at a limit, behind which the loader may have more
        return index
    for index, batch in numbered:
        item = cut(index, batch, index == final)
        if item is not None:
            yield item
        if index >= final:
            break
    return index


def one_ahead(numbered: Numbered, ahead: tuple[int, Any] | None, cut: Cut, final: int | float) -> Iterator[MicroBatch]:
    """Reads one batch ahead, ``ahead`` first, because which one is the last shows only when the next is not there."""
    while ahead is not None and ahead[0] <= final:
        (index, batch), ahead = ahead, next(numbered, None) if ahead[0] < final else None
        item = cut(index, batch, ahead is None)
        if item is not None:
            yield item
