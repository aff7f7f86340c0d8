"""Communicators made from others: of given ranks, by colour, by host."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from drivetrain.comm.arguments import is_whole, is_whole_list
from drivetrain.comm.failures import CommunicationError
from drivetrain.launch import current_job

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator


class ByHost(NamedTuple):
    """What :meth:`drivetrain.comm.Communicator.by_host` gives.

    ``inside``: the ranks of this rank's host. ``between``: one rank of each host, those that have this rank's number
    inside their hosts. ``hosts``: for each rank of the whole group the number of its host, in order of first rank.
    """

    inside: Communicator
    between: Communicator
    hosts: list[int]


# How many thread blocks NCCL gives an operation of a group that is made for rings. A reduce-scatter and an all-gather
# move what one all-reduce does, but begin and end twice: with NCCL's own number (24 between two GPUs on NVLink) they
# take 1.2 times as long, with this one about as long from 256 MB up. Its price is memory, 1.2 GB for such a group there
# instead of 0.5 GB. ``python -m drivetrain.bench comm --device cuda --thread-blocks 0,32,64`` shows what each number
# takes here.
THREAD_BLOCKS = 64


def sub(comm: Communicator, ranks: Sequence[int], label: str, thread_blocks: int = 0) -> Communicator | None:
    """See :meth:`drivetrain.comm.Communicator.sub`. ``thread_blocks``: of each operation over NCCL, 0 for its own."""
    listed = is_whole_list(ranks) and len(ranks) > 0 and list(ranks) == sorted(set(ranks))
    if not listed or not 0 <= ranks[0] <= ranks[-1] < comm.world_size:
        shown = list(ranks) if isinstance(ranks, range) else ranks
        raise CommunicationError(
            f"cannot form group {label!r} of ranks {shown!r}: use a list of rising ranks below {comm.world_size}."
        )
    if comm.group is None:
        return comm.child(None, label)
    members = [dist.get_global_rank(comm.group, rank) for rank in ranks]
    group = dist.new_group(members, comm.timeout, group_desc=label, **_tuned(comm, thread_blocks))
    return comm.child(group, label, thread_blocks) if comm.rank in ranks else None


def again(comm: Communicator, label: str, thread_blocks: int = 0) -> dist.ProcessGroup:
    """Another process group of the same ranks, all of which call this at the same point."""
    child = split(comm, 0, None, label, thread_blocks)
    assert child is not None and child.group is not None
    return child.group


def tunable(comm: Communicator, thread_blocks: int) -> bool:
    """Whether a group of these ranks can be, and should be, made for operations of so many thread blocks over NCCL:
    what computes meanwhile keeps half of the device; and where GPUs reach each other through the host or are on several
    hosts, whose links are slower than a few blocks, NCCL's own choice is kept: each block has buffers of its own for
    such a link, in the host's memory too."""
    if not thread_blocks or comm.group is None or dist.get_backend(comm.group) != "nccl":
        return False
    job = current_job()
    if comm.world_size > torch.cuda.device_count() or (job is not None and job.num_nodes > 1):
        return False
    others = [number for number in range(torch.cuda.device_count()) if number != comm.device.index]
    return torch.cuda.get_device_properties(comm.device).multi_processor_count >= 2 * thread_blocks and all(
        torch.cuda.can_device_access_peer(comm.device, other) for other in others
    )


def _tuned(comm: Communicator, thread_blocks: int) -> dict[str, Any]:
    """What asks torch for such a group; nothing where that is not to be."""
    if not tunable(comm, thread_blocks):
        return {}
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = thread_blocks
    if comm.timeout is not None:
        options._timeout = comm.timeout  # torch warns where it is another than the group's
    return {"pg_options": options}


def split(
    comm: Communicator, color: int | None, key: int | None, label: str, thread_blocks: int = 0
) -> Communicator | None:
    """See :meth:`drivetrain.comm.Communicator.split`."""
    given = {"color": color, "key": comm.rank if key is None else key}
    wrong = [f"{name}={number!r}" for name, number in given.items() if number is not None and not is_whole(number)]
    # Who asks for what cannot be tells the others, which would wait for it otherwise.
    plain = [None if number is None or wrong else int(number) for number in given.values()]
    said = comm.all_gather_plain([*plain, _made(), wrong])
    refused = [f"{' and '.join(wrong)} on rank {rank}" for rank, (*_, wrong) in enumerate(said) if wrong]
    if refused:
        raise CommunicationError(f"split takes whole numbers, got {', '.join(refused)} of group {comm.label!r}.")
    if color is None:
        return None
    order = sorted((place, rank) for rank, (other, place, *_) in enumerate(said) if other == color)
    name = f"{label} {color}"
    if comm.group is None:
        return comm.child(None, name)
    members = [dist.get_global_rank(comm.group, rank) for _, rank in order]
    options = _tuned(comm, thread_blocks)
    if members != sorted(members):
        if _takes_any_order():
            options["sort_ranks"] = False
        else:
            members = [_Placed(member, place) for place, member in enumerate(members)]
    # Only the members meet: ranks of the job that are not in this group know nothing of it.
    with _by_its_members():
        _catch_up(max(made for other, _, made, _ in said if other == color))
        group = dist.new_group(members, comm.timeout, use_local_synchronization=True, group_desc=name, **options)
    return comm.child(group, name, thread_blocks)


@contextmanager
def _by_its_members() -> Iterator[None]:
    """While it lasts torch makes an NCCL group by its members alone. Where the default group is bound to a GPU torch
    splits it (ncclCommSplit), and in that all ranks of the job take part: members would wait for those that do not."""
    whole = dist.group.WORLD
    bound = None if whole is None else whole.bound_device_id
    if whole is None or bound is None:
        yield
        return
    whole.bound_device_id = None
    try:
        yield
    finally:
        whole.bound_device_id = bound


def _takes_any_order() -> bool:
    """Whether torch can be told to leave a new group's ranks in their order; 2.11 sorts them."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


class _Placed(int):
    """A rank that is sorted by its place in a group, for a torch that sorts a new group's ranks."""

    def __new__(cls, rank: int, place: int) -> _Placed:
        placed = super().__new__(cls, rank)
        placed.place = place
        return placed

    place: int

    def __lt__(self, other: int) -> bool:
        return self.place < other.place if isinstance(other, _Placed) else int(self) < other


def _made() -> int:
    """How many process groups this process knows."""
    return len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 0


def _catch_up(made: int) -> None:
    """Where only the members of a group meet, torch names it by its ranks and by how many groups a process has made:
    a member that made fewer than another would wait under another name. A group of one rank costs nobody else."""
    while _made() < made:
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="filler")


def by_host(comm: Communicator, host: str | None) -> ByHost:
    """See :meth:`drivetrain.comm.Communicator.by_host`."""
    if not isinstance(host, str | None):
        raise CommunicationError(f"by_host on rank {comm.rank} got host={host!r}: pass a name, or None.")
    names = comm.all_gather_plain(host_name() if host is None else host)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    hosts = [numbers[name] for name in names]
    place = hosts[: comm.rank].count(hosts[comm.rank])
    inside = split(comm, hosts[comm.rank], None, "host")
    between = split(comm, place, None, "between hosts, place")
    assert inside is not None and between is not None
    return ByHost(inside, between, hosts)


def host_name() -> str:
    """What tells this host from the job's others: the number that the launcher gave it, else its name."""
    job = current_job()
    return f"node {job.node_rank}" if job is not None and job.num_nodes > 1 else socket.gethostname()
