"""Between log boundaries nothing is exchanged but gradients, and under ring a bucket leaves while backward goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Callback, Trainer
from drivetrain.comm.bucket_hook import ScheduledAllReduce
from drivetrain_plugins.callbacks.communication_monitor import CommunicationMonitor
from drivetrain_plugins.callbacks.performance_monitor import PerformanceMonitor
from tests.runs import QUIET, Classifier, loader, train

STEPS = 40
EVERY = 10
SHAPES = 2  # calls that bring plain data to all ranks: its lengths, and the text
COLLECTIVES = ["all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather", "scatter",
               "reduce_scatter_tensor", "barrier", "monitored_barrier", "all_to_all", "send", "recv", "isend", "irecv",
               "batch_isend_irecv", "all_gather_object", "broadcast_object_list"]  # fmt: skip


class Counter(Callback):
    """Counts what the main thread asks of torch.distributed in each step: gradients go through DDP's own engine and
    ring's thread, neither of which calls these."""

    def __init__(self) -> None:
        self.calls = self.messages = 0
        self.by_step: dict[str, int] = {}
        self.at = "start"
        self.end = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        def counted(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return original(*args, **kwargs)

            return call

        for name in [*COLLECTIVES, "all_gather_single", "reduce_scatter_single"]:
            if hasattr(dist, name):
                setattr(dist, name, counted(getattr(dist, name)))

    def _mark(self, trainer: Any, key: str) -> None:
        # Point-to-point messages of the job's communicator go past torch.distributed's functions.
        messages = trainer.communicator.statistics.messages
        calls = self.calls or messages - self.messages
        self.by_step[self.at] = self.by_step.get(self.at, 0) + calls
        self.calls, self.messages, self.at = 0, messages, key

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._mark(trainer, f"{trainer.global_step + 1}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._mark(trainer, "end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._mark(trainer, "over")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.by_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.by_step = dict(state_dict)


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_no_collective_between_log_boundaries(strategy: str) -> None:
    counter = Counter()
    watched = [counter, CommunicationMonitor(), PerformanceMonitor()]  # they measure, and exchange nothing for it
    run = train(
        Classifier, strategy, 2, data=loader(8 * STEPS), max_epochs=1, callbacks=watched, log_every_n_steps=EVERY
    )
    assert run.steps == STEPS
    counts = {step: counter.by_step[str(step)] for step in range(1, STEPS + 1)}
    boundaries = {step: count for step, count in counts.items() if step % EVERY == 0}
    assert all(count == 0 for step, count in counts.items() if step not in boundaries), counts
    assert all(0 < count <= 2 for count in boundaries.values()), boundaries
    assert 0 < counter.by_step["end"] <= 6


class Gathers(Callback):
    """Notes how many calls of torch.distributed each gathering of a batch's rows took."""

    def __init__(self, **asks: Any) -> None:
        self.asks = asks
        self.calls = 0
        self.seen: dict[str, list[int]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        original = dist.all_gather

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        dist.all_gather = counted

    def note(self, pl_module: Any, name: str, rows: torch.Tensor) -> None:
        before = self.calls
        both = pl_module.all_gather(rows, **self.asks)
        assert torch.equal(both[pl_module.global_rank, : len(rows)], rows)
        self.seen.setdefault(name, []).append(self.calls - before)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(pl_module, "on_train_batch_end", batch[0])

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note(pl_module, "on_validation_batch_start", batch[0])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(pl_module, "on_train_epoch_end", torch.ones(2 - pl_module.global_rank, 1))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = dict(state_dict)


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.callbacks[0].note(self, "training_step", batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("batch", "asks", "training", "validation"),
    [
        ("global", {}, [1, 1, SHAPES + 1], [1, SHAPES + 1]),
        ("global", {"uneven": True}, [SHAPES + 1] * 3, [SHAPES + 1] * 2),
        ("per_process", {}, [1, SHAPES + 1], [SHAPES + 1]),
        ("per_process", {"sync_grads": True}, [1, SHAPES + 1], [SHAPES + 1]),
    ],
)
def test_all_gather_sends_shapes_ahead_only_where_rows_may_differ(
    batch: str, asks: Any, training: list[int], validation: list[int]
) -> None:
    """Two ranks share batches of 8, 8 and 3 samples, or have 8 each and then 2 and 1."""
    counter = Gathers(**asks)
    train(
        Gathering, "ddp", 2, data=loader(19, 8), validation=loader(11, 8), batch=batch, max_epochs=1,
        callbacks=[counter],
    )  # fmt: skip
    assert counter.seen == {
        "training_step": training,
        "on_train_batch_end": training,
        "on_validation_batch_start": validation,
        "on_train_epoch_end": [SHAPES + 1],
    }


def test_all_gather_in_a_batch_of_each_rank_s_own() -> None:
    """The ranks agreed on how many samples each has before the step, so that they know if these differ."""

    class Own(Gathering):
        def train_dataloader(self) -> Any:
            rows, last = torch.randn(8, 6, dtype=torch.float64), 5 - self.global_rank
            return [[rows, torch.zeros(8, dtype=torch.long)], [rows[:last], torch.zeros(last, dtype=torch.long)]]

    counter = Gathers()
    trainer = Trainer(
        **QUIET, strategy="ddp", devices=2, batch="per_process", max_epochs=1, precision="64-true", callbacks=[counter]
    )
    trainer.fit(Own())
    assert counter.seen["training_step"] == counter.seen["on_train_batch_end"] == [1, SHAPES + 1]


class Deep(Classifier):
    """Layers large enough that each fills a bucket."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 256), *[nn.Linear(256, 256) for _ in range(5)], nn.Linear(256, 4)]
        self.net = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


class Trace(Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        hook: ScheduledAllReduce = trainer.strategy._all_reduce
        hook.trace = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.events = [list(event) for event in trainer.strategy._all_reduce.trace]

    def state_dict(self) -> dict[str, Any]:
        return {"events": self.events}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.events = state_dict["events"]


def test_a_bucket_leaves_before_the_last_is_ready() -> None:
    torch.manual_seed(0)
    trace = Trace()
    train(
        Deep, {"name": "ring", "bucket_cap_mb": 0.5}, 2, data=loader(640, 32), max_epochs=1, callbacks=[trace],
        log_every_n_steps=100,
    )  # fmt: skip
    steps: list[dict[tuple[int, str], float]] = []
    for bucket, what, seconds in trace.events:
        if bucket == 0 and what == "ready":
            steps.append({})
        steps[-1][bucket, what] = seconds
    assert len(steps) == 20
    last = max(bucket for bucket, _ in steps[0])
    assert last >= 3
    assert all(max(bucket for bucket, _ in step) == last for step in steps), "the buckets changed"
    early = sum(step[0, "started"] < step[last, "ready"] for step in steps)
    assert early > len(steps) / 2
