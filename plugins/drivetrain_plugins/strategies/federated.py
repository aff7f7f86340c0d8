"""Federated learning: clients train by themselves on data of their own, rounds join what they learned.

FedAvg (McMahan et al., arXiv 1602.05629) and FedProx (Li et al., arXiv 1812.06127), with the clients simulated in turn
on each rank. A round is an epoch and one global step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.checkpoint import rng
from drivetrain.errors import ConfigurationError
from drivetrain.launch import Job
from drivetrain.loops.windows import Window, Windows
from drivetrain.module import TrainModule
from drivetrain.sharding import BatchSource, MicroBatch
from drivetrain.strategy import Run, Shard, Strategy
from drivetrain_plugins.federated import sampling
from drivetrain_plugins.federated.aggregation import WeightedMean
from drivetrain_plugins.federated.labels import labels_of
from drivetrain_plugins.federated.partition import check_enough, dirichlet, iid
from drivetrain_plugins.federated.proximal import add_proximal_gradient
from drivetrain_plugins.strategies.averaging import Averaging

_CLIENT = (
    "the training of a client, while other ranks train clients that make other numbers of steps and do not come to it:"
    " do so in on_train_epoch_end."
)


class Federated(Strategy):
    """Between rounds all ranks hold the global model. In a round each chosen client starts from it with a fresh
    optimizer state (learning rates stay as the schedulers set them), trains, and leaves; the global model becomes the
    mean weighted by samples. What a client does depends on seed, round and client only, never on its rank. A limit of
    training batches holds for each pass of a client over its own.
    """

    _optimizers: list[Optimizer] = []
    _partition: list[list[int]] | None = None
    _start: dict[int, torch.Tensor] = {}  # the round's first weights, by the parameter's id

    def check_data(self, loader: Any) -> None:
        try:
            samples = len(loader.dataset)
        except (AttributeError, TypeError):  # refused by _divide, which knows how the loader is read
            return
        options = self.options
        check_enough(samples, options.clients, options.min_samples if options.partition == "dirichlet" else 1)

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.data = Shard(self.communicator.rank, self.communicator.world_size)
        self.averaging = Averaging(self.communicator)

    def prepare(self, module: TrainModule, stage: str) -> None:
        super().prepare(module, stage)
        self._partition, self._optimizers = None, []
        if stage == "fit":
            for tensor in [*module.parameters(), *module.buffers()]:
                self.communicator.broadcast(tensor.detach())

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        self._optimizers = make()
        return self._optimizers

    # -- a round ------------------------------------------------------------------------------------------------
    def run_epoch(self, run: Run, source: Windows) -> None:  # type: ignore[override]
        if source.start:  # resumed from a checkpoint that was made after this epoch's round
            return
        data, options = source.source, self.options
        if self._partition is None:
            self._partition = self._divide(data)
        number = data.epoch
        chosen = sampling.sample_clients(options.clients, options.count, data.seed, number)
        work = {client: self._work(self._partition[client], source, (data.seed, number, client)) for client in chosen}
        mine = chosen[self.data.rank :: self.data.size]
        stream = data.read_samples(batch for client in mine for window in work[client] for batch in window)
        held = self._held()
        start = {name: t.clone() for name, t in held.items()}
        names = {id(p): name for name, p in self.module.named_parameters()}
        self._start = {key: start[name] for key, name in names.items() if name in start}
        mean = WeightedMean(start)
        random_state = rng.capture()
        for client in mine:
            sampling.seed_client(data.seed, number, client)
            self._forget()
            for name, tensor in held.items():
                tensor.copy_(start[name])
            windows = self._windows(work[client], stream)
            self.apart = _CLIENT if self.data.size > 1 else None
            run(windows, inner=True)
            self.apart = None
            for _ in windows:  # what a client that was ended early did not read
                pass
            mean.add(held, len(self._partition[client]))
        rng.restore(random_state)
        mean.into(held, sum(len(self._partition[client]) for client in chosen), self.averaging)
        self._forget()
        self._start = {}
        run.outer(sum(len(batch) for client in chosen for window in work[client] for batch in window))

    def _held(self) -> dict[str, torch.Tensor]:
        """What clients change: the parameters that optimizers hold, and buffers."""
        trained = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        named = [(name, p) for name, p in self.module.named_parameters() if id(p) in trained]
        return {name: t.detach() for name, t in [*named, *self.module.named_buffers()]}

    def _forget(self) -> None:
        """A client knows nothing of the one before it."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
            optimizer.zero_grad()

    def _work(self, samples: list[int], source: Windows, key: tuple[int, ...]) -> sampling.Windows:
        data, options = source.source, self.options
        return sampling.local_windows(
            samples,
            batch_size=options.batch_size or data.loader.batch_size,
            accumulate=source.accumulate,
            shuffle=data.shuffled,
            drop_last=data.loader.drop_last,
            epochs=options.local_epochs,
            steps=options.local_steps,
            limit=self.module.trainer.limits["train"],  # of this client's batches, not of those of the loader
            key=key,
        )

    def _windows(self, work: sampling.Windows, stream: Iterator[Any]) -> Iterator[Window]:
        index = 0
        for window in work:
            micro = []
            for indices in window:
                micro.append(MicroBatch(next(stream), index, len(indices), len(indices)))
                index += 1
            yield Window(micro, float(sum(len(indices) for indices in window)))

    def _divide(self, source: BatchSource) -> list[list[int]]:
        """The clients' samples, the same on every rank."""
        options, loader = self.options, source.loader
        if not source.plain:
            raise ConfigurationError(
                "strategy=federated divides the data set among clients and reads each one's part by itself: train with"
                " a DataLoader over a data set with a length, with batch_size and shuffle but no sampler of its own."
            )
        if options.partition == "iid":
            return iid(len(loader.dataset), options.clients, source.seed)
        random_state = rng.capture()  # reading samples may draw random numbers
        labels = labels_of(loader.dataset, options.labels)
        rng.restore(random_state)
        return dirichlet(labels, options.clients, options.alpha, source.seed, options.min_samples)

    # -- a client's step ----------------------------------------------------------------------------------------
    def backward(self, loss: torch.Tensor, share: float, sync: bool, *, weighted: bool = False, **options: Any) -> None:
        """A client's batch is its own: nothing is summed over ranks."""
        self._run_backward(self.precision.scale(loss if share == 1.0 else loss * share), options)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        if self.options.algorithm != "fedprox":
            return super().optimizer_step(optimizer, closure, before_step)

        def with_proximal_gradient() -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            add_proximal_gradient(((p, self._start[id(p)]) for p in parameters), self.options.mu)
            before_step()

        return super().optimizer_step(optimizer, closure, with_proximal_gradient)

    def traffic(self) -> dict[str, int]:
        """One all-reduce of the model's change a round."""
        return self.averaging.traffic()
