"""What the run record holds of a run."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.checkpoint import weights_digest

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def run_summary(trainer: Trainer) -> dict[str, Any]:
    """What the run record holds of this run (plain data); all ranks hold the same, communication apart."""
    statistics = trainer.strategy.communicator.statistics
    sent = trainer.strategy.traffic()
    profile = trainer.strategy.communicator.stats()
    exposed = trainer.strategy.exposed_communication()
    callback = trainer.checkpoint_callback
    return {
        "strategy": trainer.strategy_name,
        "compression": trainer.compression_name,
        "world_size": trainer.world_size,
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "seed": trainer.data_seed,
        "epochs": trainer.current_epoch,
        "global_step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "loss_curve": [list(point) for point in trainer.loss_curve],
        "weights_digest": weights_digest(trainer.full_weights()),
        "throughput": {
            "samples_per_second": trainer.timing.samples / trainer.timing.total if trainer.timing.total > 0 else 0.0
        },
        "seconds": trainer.timing.summary(),
        "communication": {
            **sent,  # what a strategy counts beside bytes and messages
            "bytes_sent": statistics.bytes_sent + sent.get("bytes_sent", 0),
            "bytes_dense": statistics.bytes_sent + sent.get("bytes_dense", 0),
            "messages": statistics.messages + sent.get("messages", 0),
            **({} if exposed is None else {"exposed_seconds_per_step": exposed}),
            **({key: profile[key] for key in ("operations", "phases")} if profile["phases"] else {}),
        },
        "checkpoints": {
            "best": getattr(callback, "best_model_path", "") or None,
            "last": getattr(callback, "last_model_path", "") or None,
        },
        "versions": {"drivetrain": version("drivetrain"), "torch": torch.__version__},
    }
