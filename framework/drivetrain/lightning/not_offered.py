"""Names of Lightning that are not offered here: why, and what to do instead, in a sentence each."""

from __future__ import annotations

_TPU = "there is no TPU support"
_MPS = "there is no MPS support"
_INSIDE = "it is a part of Lightning's inside"
_LEGACY = "rewrite a file of Lightning 1 with Lightning's own command: python -m lightning.pytorch.utilities."
_FABRIC = "there is no Fabric here: use L.Trainer, or drivetrain's parts in a loop by hand (docs/by_hand.md)"
_DEMO = "it is an example of Lightning's documentation: copy it into the project, or see drivetrain's recipes"
_HPARAMS = "hyper-parameters are under LightningModule.CHECKPOINT_HYPER_PARAMS_KEY"
_LOGGER = "derive a logger from drivetrain.Logger that writes there, or use WandbLogger or MLFlowLogger"

# Modules of which nothing is here, by their paths.
MODULES = {
    "fabric.cli": _FABRIC,
    "fabric.connector": _FABRIC,
    "fabric.fabric": _FABRIC,
    "fabric.plugins.collectives": f"{_FABRIC}; drivetrain.comm has the collectives",
    "fabric.strategies": _FABRIC,
    "fabric.utilities.init": "use Trainer.init_module(empty_init=True)",
    "fabric.utilities.load": "read a checkpoint with torch.load, lazily with mmap=True",
    "fabric.utilities.registry": _INSIDE,
    "fabric.utilities.testing": _INSIDE,
    "fabric.wrappers": _FABRIC,
    "loops.optimization": f"{_INSIDE}: override optimizer_step, or set automatic_optimization = False",
    "serve": "load the checkpoint and serve the module with a server of your own",
    "strategies.launchers": f"{_INSIDE}: workers are started by the Trainer, torchrun, srun or mpirun",
    "trainer.call": f"{_INSIDE}: call the module's or the callback's hook itself",
    "trainer.configuration_validator": f"{_INSIDE}: what cannot run is refused before a worker starts",
    **dict.fromkeys(
        (f"trainer.connectors.{one}_connector" for one in ("callback", "checkpoint", "data", "logger", "signal")),
        f"{_INSIDE}: read the Trainer's own attributes",
    ),
    "trainer.setup": _INSIDE,
    "utilities.model_registry": "nothing is uploaded or fetched: copy trainer.checkpoint_callback.best_model_path",
    "utilities.model_summary.model_summary_deepspeed": "ModelSummary counts whole layers under every strategy",
    "utilities.testing": _INSIDE,
}

# Names by the module here that would have them.
NAMES = {
    "": {"Fabric": _FABRIC},
    "accelerators": {
        "MPSAccelerator": _MPS,
        "XLAAccelerator": _TPU,
        "get_cpu_stats": "use DeviceStatsMonitor(cpu_stats=True), or the package psutil",
        "get_device_stats": _MPS,
        "get_nvidia_gpu_stats": "use DeviceStatsMonitor, or torch.cuda.memory_stats",
    },
    "callbacks": dict.fromkeys(
        (
            "BatchesProcessedColumn",
            "CustomBarColumn",
            "CustomInfiniteTask",
            "CustomProgress",
            "CustomTimeColumn",
            "MetricsTextColumn",
            "ProcessingSpeedColumn",
        ),
        "override RichProgressBar.configure_columns with columns of rich's own",
    ),
    "saving": {"CHECKPOINT_PAST_HPARAMS_KEYS": _HPARAMS},
    "demos": dict.fromkeys(
        (
            "Dictionary",
            "IterableBoringDataModule",
            "LightningLSTM",
            "LightningTransformer",
            "MNIST",
            "MNISTDataModule",
            "Net",
            "PositionalEncoding",
            "SequenceSampler",
            "SimpleLSTM",
            "Transformer",
            "WikiText2",
            "tokenize",
        ),
        _DEMO,
    ),
    "fabric": {"Fabric": _FABRIC},
    "loggers": {
        "CometLogger": _LOGGER,
        "ExperimentWriter": "CSVLogger writes its file itself: call log_metrics and save",
        "FRAMEWORK_NAME": _LOGGER,
        "comet_experiment": _LOGGER,
        "LitLogger": "it writes to its vendor's platform: use TensorBoardLogger, MLFlowLogger or WandbLogger",
        "NeptuneLogger": _LOGGER,
    },
    "loops": {"RestartStage": f"{_INSIDE}: where a resumed run goes on is in its checkpoint"},
    "overrides": {"prepare_for_backward": "manual_backward does what it is for"},
    "plugins": {
        # The names that end in "Plugin" are those of before Lightning 2.1.
        **dict.fromkeys(
            ("BitsandbytesPrecision", "BitsandbytesPrecisionPlugin"), "quantise the layers in configure_model"
        ),
        **dict.fromkeys(
            ("DeepSpeedPrecision", "DeepSpeedPrecisionPlugin"), "set precision, strategy=deepspeed takes it"
        ),
        **dict.fromkeys(
            ("FSDPPrecision", "FSDPPrecisionPlugin", "FSDPMixedPrecisionPlugin"),
            "set precision, strategy=fsdp takes it",
        ),
        "LSFEnvironment": "start the script with mpirun or torchrun, which are recognised by themselves",
        "XLAEnvironment": _TPU,
        "LayerSync": "use sync_batchnorm=True",
        "LightningDoublePrecisionModule": "precision='64-true' converts the module itself",
        "TorchSyncBatchNorm": "use sync_batchnorm=True",
        **dict.fromkeys(("TransformerEnginePrecision", "TransformerEnginePrecisionPlugin"), "use precision=bf16-mixed"),
        "XLACheckpointIO": _TPU,
        **dict.fromkeys(("XLAPrecision", "XLAPrecisionPlugin", "TPUPrecisionPlugin"), _TPU),
        **dict.fromkeys(("TPUBf16PrecisionPlugin", "XLABf16PrecisionPlugin"), _TPU),
    },
    "profilers": {
        "RegisterRecordFunction": "PyTorchProfiler(record_module_names=True) names the modules",
        "ScheduleWrapper": "give PyTorchProfiler(schedule=torch.profiler.schedule(...))",
        "XLAProfiler": f"{_TPU}: use PyTorchProfiler",
    },
    "strategies": {
        "SingleDeviceXLAStrategy": _TPU,
        "XLAStrategy": _TPU,
        "remove_module_hooks": _INSIDE,
    },
    "utilities": {
        "CPU_DEVICE": "use torch.device('cpu')",
        "CollectibleGroup": "annotate with torch.distributed.ProcessGroup",
        "SpikeDetection": f"{_FABRIC}; the callback is callbacks.SpikeDetection",
        "ThroughputMonitor": f"{_FABRIC}; the callback is callbacks.ThroughputMonitor",
        "get_available_flops": "give Throughput(available_flops=...), from the maker's data sheet",
        "ds_checkpoint_dir": "a checkpoint is one file under every strategy: name that",
        "main": f"{_LEGACY}upgrade_checkpoint FILE",
        "migrate_checkpoint": f"{_LEGACY}upgrade_checkpoint FILE",
        "pl_legacy_patch": f"{_LEGACY}upgrade_checkpoint FILE",
    },
}


def of_module(path: str) -> str | None:
    """Why there is no module ``path`` (below this package) and what to do instead; None where that is not known."""
    return next((why for name, why in MODULES.items() if f"{path}.".startswith(f"{name}.")), None)


def of_name(module: str, name: str) -> str | None:
    """The same of ``name`` in ``module``, which is here."""
    return NAMES.get(module, {}).get(name)
