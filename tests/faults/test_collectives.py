"""Between log boundaries nothing is exchanged but gradients, and under ring a bucket leaves while backward goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drivetrain import Callback
from drivetrain.comm.bucket_hook import ScheduledAllReduce
from drivetrain_plugins.callbacks.communication_monitor import CommunicationMonitor
from drivetrain_plugins.callbacks.performance_monitor import PerformanceMonitor
from tests.runs import Classifier, loader, train

STEPS = 40
EVERY = 10
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
