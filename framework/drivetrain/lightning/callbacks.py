"""Lightning's callbacks by class name; each is a plugin registered under ``drivetrain.callbacks``."""

from __future__ import annotations

import sys
from typing import Any

from drivetrain.callback import Callback as Callback
from drivetrain.lightning import deep_names
from drivetrain.lightning.plugin_names import finder
from drivetrain.states import EarlyStoppingReason as EarlyStoppingReason

NAMES = {
    "BackboneFinetuning": "backbone_finetuning",
    "BaseFinetuning": "base_finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "Checkpoint": "checkpoint",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EMAWeightAveraging": "ema_weight_averaging",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "learning_rate_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "ModelCheckpoint": "lightning_model_checkpoint",
    "ModelPruning": "model_pruning",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "ProgressBar": "progress_bar_base",
    "RichModelSummary": "rich_model_summary",
    "RichProgressBar": "progress_bar",
    "SpikeDetection": "spike_detection",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "TQDMProgressBar": "tqdm_progress_bar",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}
__all__ = ["Callback", *NAMES]  # noqa: PLE0604  (they are strings)
__path__: list[str] = []

_BESIDE = {  # by the class in whose module they are
    "Interval": "Timer",
    "RichProgressBarTheme": "RichProgressBar",
    "Throughput": "ThroughputMonitor",
    "Tqdm": "TQDMProgressBar",
    "TrainingSpikeException": "SpikeDetection",
    "WriteInterval": "BasePredictionWriter",
    "convert_inf": "TQDMProgressBar",
    "get_standard_metrics": "ProgressBar",
    "multiplicative": "BackboneFinetuning",
}
_find = finder(__name__, "callbacks", NAMES)


def __getattr__(name: str) -> Any:
    if name in _BESIDE:
        return getattr(sys.modules[_find(_BESIDE[name]).__module__], name)
    return _find(name)


deep_names.name_below(__name__)
