"""Replicas whose gradients are averaged by a ring all-reduce (Patarasu and Yuan, 2009)."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from drivetrain.comm.bucket_hook import ScheduledAllReduce
from drivetrain.comm.schedule import Schedule
from drivetrain.comm.topologies.ring import ring
from drivetrain_plugins.strategies.ddp import DistributedDataParallelStrategy


class Ring(DistributedDataParallelStrategy):
    """Reduce-scatter, then all-gather around the ring: 2(N-1)/N of the data sent per rank, in a thread of its own, so
    that a bucket is on its way before the next one is ready."""

    _all_reduce: ScheduledAllReduce | None = None

    def register_hook(self, replicas: DistributedDataParallel) -> None:
        replicas.register_comm_hook(self._hook(), ScheduledAllReduce.hook)

    def schedule(self) -> Schedule | None:
        return ring(self.communicator.world_size)

    def raise_hidden(self) -> None:
        super().raise_hidden()
        if self._all_reduce is not None:
            self._all_reduce.raise_if_failed()

    def traffic(self) -> dict[str, int]:
        if self._all_reduce is None:
            return super().traffic()
        statistics = self._all_reduce.communicator.statistics
        sent = {"bytes_sent": statistics.bytes_sent, "messages": statistics.messages}
        return {**sent, "bytes_dense": statistics.bytes_sent}

    def exposed_communication(self) -> float | None:
        return super().exposed_communication() if self._all_reduce is None else self._all_reduce.exposed_seconds()

    def close(self, error: BaseException | None = None) -> None:
        if self._all_reduce is not None:
            self._all_reduce.close()
        super().close(error)

    def average_flat(self, flat: torch.Tensor) -> None:
        """Manual optimisation takes the same ring, without overlap. Where gradients are compressed only buffers come
        here, for which no ring is started."""
        if self.compressor is not None:
            super().average_flat(flat)
            return
        self._hook().submit(0, flat).wait()

    def _hook(self) -> ScheduledAllReduce:
        if self._all_reduce is None:
            self._all_reduce = ScheduledAllReduce(ring(self.communicator.world_size), self.communicator)
        return self._all_reduce
