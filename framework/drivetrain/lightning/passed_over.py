"""What a project overrides of Lightning's callbacks, loggers and profilers, and nothing here asks for.

Overridden hooks and methods of Lightning's documentation are called. What is listed here is of Lightning's inside, or
is done in another way; a test draws the list from the installed Lightning.
"""

from __future__ import annotations

from typing import Any

from drivetrain.rank_zero import rank_zero_warn

_OF_PROFILERS = "_prepare_streams _rank_zero_info"
PASSED_OVER: dict[str, tuple[str, ...]] = {
    name: tuple(members.split())
    for name, members in {
        "BackboneFinetuning": "_apply_mapping_to_param_groups",
        "BaseFinetuning": "_apply_mapping_to_param_groups",
        "BatchSizeFinder": "SUPPORTED_MODES",
        "LearningRateFinder": "SUPPORTED_MODES",
        "ModelCheckpoint": "_find_last_checkpoints _should_save_on_exception",
        "ModelPruning": (
            "_apply_global_pruning _apply_local_pruning _copy_param _create_pruning_fn "
            "_get_pruned_stats _is_pruning_method _log_sparsity_stats "
            "_make_pruning_permanent_on_state_dict _resolve_global_kwargs"
        ),
        "RichProgressBar": (
            "has_dataloader_changed is_disabled reset_dataloader_idx_tracker "
            "total_predict_batches_current_dataloader total_test_batches_current_dataloader "
            "total_val_batches_current_dataloader"
        ),
        "StochasticWeightAveraging": "_clear_schedulers _load_average_model_state",
        "SpikeDetection": "_check_atol _check_rtol _handle_spike _is_better _update_stats",
        "ThroughputMonitor": "_compute",
        "CSVLogger": "_get_next_version experiment",
        "TensorBoardLogger": "_get_next_version _sanitize_params",
        "Profiler": _OF_PROFILERS,
        "AdvancedProfiler": "_dump_stats _prepare_streams _rank_zero_info",
        "PassThroughProfiler": _OF_PROFILERS,
        "PyTorchProfiler": (
            "AVAILABLE_SORT_KEYS STEP_FUNCTIONS _cache_functions_events _create_profiler "
            "_create_profilers _default_activities _delete_profilers _init_kineto _prepare_streams "
            "_rank_zero_info _should_override_schedule _total_steps"
        ),
        "SimpleProfiler": "_make_report _make_report_extended _prepare_streams _rank_zero_info",
    }.items()
}


def tell(part: Any) -> None:
    """Say what the class of ``part`` overrides in vain."""
    kind = type(part)
    base = next((each for each in kind.__mro__ if _is_ours(each)), object)
    names = [
        name
        for name in PASSED_OVER.get(base.__name__, ())
        if any(name in vars(each) for each in kind.__mro__[: kind.__mro__.index(base)])
    ]
    if names:
        rank_zero_warn(
            f"{kind.__name__} overrides {', '.join(names)} of Lightning's {base.__name__}, which nothing here asks for:"
            " it has no effect; do it in a hook (on_train_epoch_end and its like).",
            stacklevel=4,
        )


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("drivetrain", "drivetrain_plugins")
