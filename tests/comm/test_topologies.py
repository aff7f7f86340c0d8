"""Every algorithm does what its kind says, takes what the literature says, and is the same as its ranks see it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from drivetrain.comm import counts
from drivetrain.comm.check import check
from drivetrain.comm.counts import Counts, count, shares_between_hosts
from drivetrain.comm.schedule import Schedule, same_messages
from drivetrain.comm.topologies.chain import chain
from drivetrain.comm.topologies.double_tree import double_tree
from drivetrain.comm.topologies.doubling import recursive_doubling
from drivetrain.comm.topologies.halving_doubling import halving_doubling
from drivetrain.comm.topologies.hierarchical import balanced_hosts, hierarchical
from drivetrain.comm.topologies.ring import ring
from drivetrain.comm.topologies.tree import tree
from drivetrain.comm.verify import Algorithm, algorithms, prove
from drivetrain.errors import ConfigurationError

ALGORITHMS = algorithms()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_proved_with_the_counts_of_the_literature(name: str) -> None:
    for world_size in [*range(1, 18), 31, 33, 130]:
        prove(ALGORITHMS[name], world_size)


@pytest.mark.parametrize("name", ["ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical"])
def test_proved_for_a_thousand_ranks(name: str) -> None:
    prove(ALGORITHMS[name], 1000)


@pytest.mark.parametrize("name", ["tree", "double_tree", "recursive_doubling", "halving_doubling", "hierarchical"])
def test_proved_for_thousands_of_ranks(name: str) -> None:
    prove(ALGORITHMS[name], 4096)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 7, 12])
def test_the_view_of_a_rank_is_its_part_of_the_whole(name: str, world_size: int) -> None:
    schedule = ALGORITHMS[name].make(world_size)
    for rank in range(world_size):
        for each, part in zip(schedule.rounds, schedule.of_rank(rank), strict=True):
            whole = each.messages()
            assert (part.phase, part.step) == (each.phase, each.step)
            assert same_messages(part.sends, whole.select(whole.source == rank))
            assert same_messages(part.receives, whole.select(whole.destination == rank))
    some = np.arange(0, world_size, 2)
    for each in schedule.rounds:
        whole = each.messages()
        assert same_messages(each.sends(some), whole.select(np.isin(whole.source, some)))
        assert same_messages(each.receives(some), whole.select(np.isin(whole.destination, some)))


def test_counts_of_the_literature_in_figures() -> None:
    """The formulas again, written out where they are known by heart."""
    assert count(ring(8)) == Counts(14, Fraction(14, 8))
    assert count(tree(9)) == Counts(8, Fraction(4))
    assert count(halving_doubling(16)) == Counts(8, Fraction(30, 16))
    assert count(recursive_doubling(16)) == Counts(4, Fraction(4))
    assert count(halving_doubling(17)).rounds == 10
    assert count(halving_doubling(16, "reduce_scatter")) == Counts(4, Fraction(15, 16))
    assert count(halving_doubling(16, "all_gather")) == Counts(4, Fraction(15, 16))
    assert count(hierarchical(12, hosts=[4, 4, 4])) == Counts(2 * 3 + 2 * 2, Fraction(22, 12))
    assert count(chain(5, segments=7)).rounds == 10


def test_a_schedule_of_other_counts_is_refused() -> None:
    slow = Algorithm(lambda n: ring(n, 2), counts.ring_counts)
    with pytest.raises(Exception, match="takes 12 rounds and 3/2 of the tensor per rank, but the literature says 6"):
        prove(slow, 4)


def test_the_double_tree_sends_as_little_as_a_ring_in_few_rounds() -> None:
    for world_size in [*range(2, 40), 128, 1000]:
        for segments in (1, 6):
            found = check(double_tree(world_size, segments))
            assert found.share <= 2
            assert found.rounds <= 4 * (segments - 1) + 4 * (world_size - 1).bit_length() + 2
    assert check(double_tree(4096, 1)).rounds == 48


@pytest.mark.parametrize("hosts", [[1], [1, 1, 1], [4], [2, 2], [3, 1], [1, 5, 2], [4, 3, 3], [7, 2, 2, 9]])
def test_hosts_of_any_sizes(hosts: list[int]) -> None:
    schedule = hierarchical(sum(hosts), hosts=hosts)
    assert check(schedule) == counts.hierarchical_counts(hosts)
    between = shares_between_hosts(schedule, hosts)
    assert max(between) == Fraction(2 * (len(hosts) - 1), len(hosts) * min(hosts))
    if len(set(hosts)) == 1:
        assert set(between) == {counts.hierarchical_share_between_hosts(hosts[0], len(hosts))}


@pytest.mark.parametrize("levels", [[1], [5], [2, 3], [2, 2, 2], [3, 1, 4], [2, 3, 2, 2]])
def test_levels(levels: list[int]) -> None:
    schedule = hierarchical(int(np.prod(levels)), levels=levels)
    assert check(schedule) == counts.level_counts(levels)


def test_the_flat_ring_sends_more_between_hosts_than_the_hierarchy() -> None:
    ring_total = sum(shares_between_hosts(ring(4), [2, 2]))
    assert ring_total == 3  # two ranks at the edges, 2 * 3 / 4 each
    assert sum(shares_between_hosts(hierarchical(4, hosts=[2, 2]), [2, 2])) == 2


def test_hosts_found_for_a_plain_world() -> None:
    assert balanced_hosts(1) == [1]
    assert balanced_hosts(4096) == [64] * 64
    assert balanced_hosts(1000) == [40] * 25
    assert sorted(balanced_hosts(13)) == [4, 4, 5]
    for world_size in range(1, 200):
        hosts = balanced_hosts(world_size)
        assert sum(hosts) == world_size and max(hosts) - min(hosts) <= 1


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter"])
def test_trees_from_every_root(kind: str) -> None:
    for world_size in (1, 2, 3, 6, 8, 11):
        for root in range(world_size):
            check(tree(world_size, kind, root))  # type: ignore[arg-type]
            if kind in ("broadcast", "reduce"):
                check(chain(world_size, kind, root, 4))  # type: ignore[arg-type]


def refused(make: object, *arguments: object, **named: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make(*arguments, **named)  # type: ignore[operator]
    return str(caught.value)


def test_what_cannot_be_made() -> None:
    for make in (ring, tree, double_tree, chain, recursive_doubling, halving_doubling, hierarchical):
        assert "world_size=0 of a " in refused(make, 0)
    assert "no ring of kind 'gather': did you mean 'all_gather'" in refused(ring, 4, kind="gather")
    assert "root=4 is no rank of 4" in refused(tree, 4, root=4)
    assert "segments=0 of a ring is too small: pass 1 or more" in refused(ring, 4, 0)
    assert "segments=0 of a chain" in refused(chain, 4, segments=0)
    assert "segments=0 of a double tree" in refused(double_tree, 4, segments=0)
    assert "do not add up to world_size=7" in refused(hierarchical, 7, hosts=[4, 4])
    assert "do not add up" in refused(hierarchical, 4, hosts=[4, 0])
    assert "do not multiply to world_size=7" in refused(hierarchical, 7, levels=[2, 4])
    assert "not both" in refused(hierarchical, 8, hosts=[4, 4], levels=[2, 4])


def test_schedules_made_twice_are_equal() -> None:
    for make in (ring, tree, halving_doubling, hierarchical):
        schedule: Schedule = make(6)
        assert schedule.equals(make(6))
        assert not schedule.equals(make(7))
    assert not ring(6).equals(halving_doubling(6))
