"""Lightning's enumerations of what a Trainer is doing."""

from __future__ import annotations

from drivetrain.states import RunningStage as RunningStage
from drivetrain.states import TrainerFn as TrainerFn
from drivetrain.states import TrainerState as TrainerState
from drivetrain.states import TrainerStatus as TrainerStatus
