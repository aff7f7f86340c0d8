"""The loops under the names that projects annotate with; they are drivetrain's."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.lightning import deep_names
from drivetrain.loops.evaluate import EvaluateLoop as _EvaluationLoop
from drivetrain.loops.names import LoopNames
from drivetrain.loops.predict import PredictLoop as _PredictionLoop

__all__ = ["_EvaluationLoop", "_FitLoop", "_PredictionLoop", "_TrainingEpochLoop"]
__path__: list[str] = []

_FitLoop = _TrainingEpochLoop = LoopNames  # the loop of a fit, or what stands for it before; an epoch's is the same


def check_finite_loss(loss: Tensor | None) -> None:
    """Raise ``ValueError`` where ``loss`` is not finite."""
    if loss is not None and not torch.isfinite(loss).all():
        raise ValueError(f"the loss of training_step is {loss}, which is not finite.")


deep_names.name_below(__name__)
