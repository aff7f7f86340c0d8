"""CommunicationMonitor: what the first worker sends in training, by operation and by phase of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain_plugins.callbacks.boundaries import LogBoundaries, write

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class CommunicationMonitor(Callback):
    """Log at log boundaries, of the first worker, means over the steps since the last one:

    ==========================================  ===================================================================
    ``comm/bytes_per_step``, ``comm/messages_per_step``  as ``run.json`` counts them, the engine's gradients included
    ``comm/seconds_per_step``                   inside operations, in whatever thread: not all of it is waited for
    ``comm/PHASE/bytes_per_step``               forward, backward, optimizer, boundary, evaluation, checkpoint
    ``comm/OPERATION/bus_bandwidth``            bytes per second, as nccl-tests define it
    ==========================================  ===================================================================

    The phases and the two bandwidths of all operations go into ``run.json`` too, under ``communication``. They know
    what goes through the strategy's communicator and the groups made from it; what an engine of torch's sends by
    itself is in the totals only. Nothing is exchanged and no device is waited for.
    """

    rank_zero_only = True

    def __init__(self) -> None:
        self._boundaries = LogBoundaries()
        self._totals = (0, 0)
        self._before: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        trainer.communicator.enable_profiling()
        self._boundaries.start(trainer)
        self._totals = _totals(trainer)
        self._before = trainer.communicator.stats()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = self._boundaries.steps(trainer)
        if steps:
            self._log(trainer, steps)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        steps = self._boundaries.rest(trainer)
        if steps:
            self._log(trainer, steps)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        trainer.communicator.disable_profiling()

    def _log(self, trainer: Trainer, steps: int) -> None:
        before, now = self._before, trainer.communicator.stats()
        sent, messages = _totals(trainer)
        values = {
            "comm/bytes_per_step": (sent - self._totals[0]) / steps,
            "comm/messages_per_step": (messages - self._totals[1]) / steps,
            "comm/seconds_per_step": (now["seconds"] - before["seconds"]) / steps,
        }
        for phase, rows in now["phases"].items():
            former = before["phases"].get(phase, {}).values()
            grown = sum(row["bytes_sent"] for row in rows.values()) - sum(row["bytes_sent"] for row in former)
            values[f"comm/{phase}/bytes_per_step"] = grown / steps
        for operation, row in now["operations"].items():
            old = before["operations"].get(operation, {"seconds": 0.0, "bus_bandwidth": 0.0})
            seconds = row["seconds"] - old["seconds"]
            carried = row["bus_bandwidth"] * row["seconds"] - old["bus_bandwidth"] * old["seconds"]
            if seconds > 0 and carried > 0:
                values[f"comm/{operation}/bus_bandwidth"] = carried / seconds
        self._totals, self._before = (sent, messages), now
        write(trainer, values)


def _totals(trainer: Trainer) -> tuple[int, int]:
    """Bytes and messages so far, as the run record counts them."""
    own, engine = trainer.communicator.statistics, trainer.strategy.traffic()
    return own.bytes_sent + engine.get("bytes_sent", 0), own.messages + engine.get("messages", 0)
