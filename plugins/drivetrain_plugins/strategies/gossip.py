"""Decentralised training: each replica exchanges weights with its neighbours in a graph; no rank sees them all.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD, arXiv 1705.09056).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drivetrain.comm.communicator import Communicator
from drivetrain.launch import Job
from drivetrain_plugins.strategies.averaging import has_mean
from drivetrain_plugins.strategies.declared.gossip import mixing_matrix, sources
from drivetrain_plugins.strategies.local_replicas import LocalReplicas


class Neighbourhood:
    """The exchange of one rank: ``x_i = sum_j W_ij x_j`` over itself and the ranks that it hears.

    Attributes:
        bytes_sent: by this rank.
        messages: sent by this rank.
    """

    def __init__(self, heard: list[list[int]], weights: str, communicator: Communicator) -> None:
        self.communicator = communicator
        rank = communicator.rank
        self.row = mixing_matrix(heard, weights)[rank]
        self.heard = heard[rank]
        self.hearers = [other for other, ranks in enumerate(heard) if rank in ranks]
        self.bytes_sent = 0
        self.messages = 0

    @torch.no_grad()
    def mix(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace ``tensors`` by their mixture, one message for each dtype and neighbour."""
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            group = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.detach().reshape(-1) for t in group])
            if dtype.itemsize == 2:
                flat = flat.float()
            mixed = self._mixed(flat)
            offset = 0
            for t in group:
                t.copy_(mixed[offset : offset + t.numel()].view(t.shape))
                offset += t.numel()

    def _mixed(self, mine: torch.Tensor) -> torch.Tensor:
        arrived = {rank: torch.empty_like(mine) for rank in self.heard}
        group = self.communicator.group
        # As one batch: NCCL would deadlock on single transfers.
        transfers = [dist.P2POp(dist.isend, mine, group=group, group_peer=rank) for rank in self.hearers]
        transfers += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for rank, tensor in arrived.items()]
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        self.bytes_sent += mine.nbytes * len(self.hearers)
        self.messages += len(self.hearers)
        mixed = mine * self.row[self.communicator.rank]
        for rank, tensor in arrived.items():
            mixed.add_(tensor, alpha=self.row[rank])
        return mixed


class Gossip(LocalReplicas):
    """Steps on this rank's part of the batch, then mixes weights with the neighbours every ``period`` steps.

    On the full graph with ``period=1`` every rank hears all others at every step: gradients are averaged instead of
    weights, the same for SGD and exact for every optimizer.
    """

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.synchronous = self.options.graph == "full" and self.options.period == 1
        heard = sources(self.options.graph, self.options.edges, self.data.size)
        self.neighbourhood = Neighbourhood(heard, self.options.weights, self.communicator)

    def mix(self) -> None:
        self.neighbourhood.mix([t for t in self.held().values() if has_mean(t)])

    def traffic(self) -> dict[str, int]:
        sent = super().traffic()
        if not self.synchronous:
            sent |= {"bytes_sent": self.neighbourhood.bytes_sent, "messages": self.neighbourhood.messages}
        return sent
