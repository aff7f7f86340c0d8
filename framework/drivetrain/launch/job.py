"""What a worker knows about the job it belongs to. Plain data, no torch: it crosses a process boundary as a dict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One worker's place in a job.

    Attributes:
        rank: number of this worker among all, 0 to ``world_size - 1``.
        world_size: number of workers in the job.
        local_rank: number of this worker among those of its node.
        local_world_size: number of workers on this node.
        node_rank: number of this node, 0 to ``num_nodes - 1``.
        num_nodes: number of nodes.
        master_addr: host where the rendezvous store listens.
        master_port: its port; 0 when there is one worker and no store.
        accelerator: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: seconds that a collective may take before it fails.
        origin: who started the workers: ``"inline"`` (this process is the only worker), ``"local"`` (our launcher),
            ``"torchrun"``, ``"slurm"`` or ``"mpi"``.
        attempt: how often the workers were started before; part of the store's key prefix.
        gpus: which of this node's GPUs its workers use, one each; empty for the first ones.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    accelerator: str = "cpu"
    backend: str = "gloo"
    timeout: float = 300.0
    origin: str = "inline"
    attempt: int = 0
    gpus: tuple[int, ...] = ()

    @property
    def gpu(self) -> int:
        """Number of this worker's GPU among those that torch sees."""
        return self.gpus[self.local_rank] if self.gpus else self.local_rank

    def as_dict(self) -> dict[str, Any]:
        """Plain data that ``Job(**data)`` restores."""
        return asdict(self)
