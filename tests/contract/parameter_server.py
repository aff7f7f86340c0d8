"""Probe of the contract: a synchronous parameter server. The last rank holds the optimizer and never sees a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain import Declaration, Strategy, Support
from drivetrain.comm.communicator import Communicator
from drivetrain.launch import Job
from drivetrain.strategy import Shard

PARAMETER_SERVER = Declaration(
    name="probe_parameter_server",
    summary="one server, the others work",
    implementation="tests.contract.parameter_server:ParameterServer",
    support=Support(min_world_size=2, clipping=frozenset({"norm"}), several_optimizers=False, closures=False),
)


class ParameterServer(Strategy):
    def connect(self, job: Job) -> None:
        super().connect(job)
        self.everyone, self.server = self.communicator, job.world_size - 1
        self.trains = job.rank < self.server
        workers = self.everyone.sub(range(self.server), "workers")
        self.communicator = workers if workers is not None else Communicator()
        self.data = Shard(job.rank if self.trains else 0, self.server)

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        self.optimizers = make()
        return self.optimizers

    def _flat(self, of: Callable[[nn.Parameter], torch.Tensor]) -> torch.Tensor:
        return torch.cat([of(p).flatten() for p in self.module.parameters()])

    def _spread(self, flat: torch.Tensor, to: Callable[[nn.Parameter, torch.Tensor], Any]) -> None:
        offset = 0
        for p in self.module.parameters():
            to(p, flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()

    def serve(self) -> None:
        optimizer = self.optimizers[0]
        size = sum(p.numel() for p in self.module.parameters())
        pushed = [torch.empty(size + 2, dtype=torch.float64) for _ in range(self.server)]
        while True:
            for rank, buffer in enumerate(pushed):
                self.everyone.recv(buffer, rank)
            lr, clip = pushed[0][-2:].tolist()
            if lr < 0:
                return
            self._spread(sum(pushed)[:size], lambda p, g: setattr(p, "grad", g.clone()))
            if clip > 0:
                nn.utils.clip_grad_norm_(self.module.parameters(), clip)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            for rank in range(self.server):
                self.everyone.send(self._flat(lambda p: p.detach()), rank)

    def backward(self, loss: torch.Tensor, share: float, sync: bool, **options: Any) -> None:
        (loss * share).backward()

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        self.clip = value  # the server clips, of the true sum

    def optimizer_step(self, optimizer: Optimizer, closure: Any, before_step: Callable[[], None]) -> bool:
        self.clip = 0.0
        closure()
        before_step()
        extra = torch.tensor([optimizer.param_groups[0]["lr"], self.clip], dtype=torch.float64)
        self.everyone.send(torch.cat([self._flat(lambda p: p.grad), extra]), self.server)
        pulled = self.everyone.recv(self._flat(lambda p: p.detach()), self.server)
        with torch.no_grad():
            self._spread(pulled, lambda p, value: p.copy_(value))
        return True

    def finish(self) -> None:
        size = sum(p.numel() for p in self.module.parameters())
        self.everyone.send(torch.full((size + 2,), -1.0, dtype=torch.float64), self.server)
