"""SpikeDetection: training ends where the loss leaps, and the batches that may be at fault are written down."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError, TrainingError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class TrainingSpikeException(TrainingError):
    """The loss leapt in batch ``batch_idx``."""

    def __init__(self, batch_idx: int, path: str) -> None:
        super().__init__(
            f"the loss leapt in batch {batch_idx}: it and the one before are listed in {path}; leave them out and go on"
            " from the last checkpoint."
        )
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Arguments are Lightning's. Each worker looks at its own loss, without asking the others: the first that sees a
    leap writes the file and ends the job.

    A leap is a loss that is worse than the last one and differs from the mean of the last ``window`` by ``atol`` and by
    ``rtol`` times that mean.

    Args:
        mode: ``"min"`` or ``"max"``: which losses are better.
        window: batches in the mean.
        warmup: the first batch of an epoch, from 0, that is looked at.
        atol, rtol: bounds; None for none.
        exclude_batches_path: file (``.json``), or folder of ``skip_batches.json``; default: the Trainer's root folder.
        finite_only: whether every loss that is not finite is a leap; else infinity is one where it is worse.

    Attributes:
        bad_batches: numbers of the batches to leave out.

    Raises:
        ConfigurationError: another mode.
        TrainingSpikeException: the loss leapt.
    """

    def __init__(
        self,
        mode: str = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"SpikeDetection(mode={mode!r}) is none: use 'min' or 'max'.")
        self.mode = mode
        self.window = window
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.bad_batches: list[int] = []
        self.last_val = 0.0
        self._recent: deque[float] = deque(maxlen=window)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if found is None:
            return
        loss = float(found)
        if batch_idx >= self.warmup and self._is_spike(loss):
            raise TrainingSpikeException(batch_idx, self._write(trainer, batch_idx))
        if math.isfinite(loss):
            self._recent.append(loss)
            self.last_val = loss

    def _is_spike(self, loss: float) -> bool:
        if self.finite_only and not math.isfinite(loss):
            return True
        better = loss <= self.last_val if self.mode == "min" else loss >= self.last_val
        if better or not self._recent:
            return False
        mean = sum(self._recent) / len(self._recent)
        far = abs(loss - mean)
        return (self.atol is None or far >= abs(self.atol)) and (self.rtol is None or far >= abs(self.rtol * mean))

    def _write(self, trainer: Trainer, batch_idx: int) -> str:
        """The batch may be at fault, or the one before, which changed the weights."""
        self.bad_batches.extend([batch_idx - 1, batch_idx])
        path = Path(self.exclude_batches_path or trainer.default_root_dir)
        if path.suffix != ".json":
            path = path / "skip_batches.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{trainer.global_rank}.part")
        beside.write_text(json.dumps(self.bad_batches, indent=4), encoding="utf-8")
        os.replace(beside, path)
        return str(path)

    def state_dict(self) -> dict[str, Any]:
        return {"last_val": self.last_val, "bad_batches": list(self.bad_batches), "recent": list(self._recent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_val = state_dict["last_val"]
        self.bad_batches = list(state_dict["bad_batches"])
        self._recent = deque(state_dict["recent"], maxlen=self.window)
