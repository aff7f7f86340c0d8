"""Lightning's plugins: what a Trainer takes through ``plugins=``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from drivetrain.checkpoint.io import AsyncCheckpointIO as AsyncCheckpointIO
from drivetrain.checkpoint.io import CheckpointIO as CheckpointIO
from drivetrain.checkpoint.io import TorchCheckpointIO as TorchCheckpointIO
from drivetrain.checkpoint.io import WrappingCheckpointIO as _WrappingCheckpointIO  # noqa: F401
from drivetrain.errors import ConfigurationError
from drivetrain.launch import current_job
from drivetrain.lightning import deep_names
from drivetrain.lightning.environments import ClusterEnvironment as ClusterEnvironment
from drivetrain.lightning.environments import KubeflowEnvironment as KubeflowEnvironment
from drivetrain.lightning.environments import LightningEnvironment as LightningEnvironment
from drivetrain.lightning.environments import MPIEnvironment as MPIEnvironment
from drivetrain.lightning.environments import SLURMEnvironment as SLURMEnvironment
from drivetrain.lightning.environments import TorchElasticEnvironment as TorchElasticEnvironment
from drivetrain.lightning.environments import tell_of_no_requeueing
from drivetrain.precision import Precision as Precision

__path__: list[str] = []


def _named(kind: str, name: str) -> Any:
    from drivetrain import registry

    return registry.load("precisions", name)(name, None) if kind else None


def MixedPrecision(precision: str = "16-mixed", device: Any = "cuda", scaler: Any = None) -> Precision:
    """``precision="16-mixed"`` or ``"bf16-mixed"`` as an object; the scaler is drivetrain's."""
    if scaler is not None:
        raise ConfigurationError("MixedPrecision(scaler=...): set Trainer(loss_scale=...) for another initial scale.")
    return _named("mixed", precision)


def HalfPrecision(precision: str = "16-true") -> Precision:
    """``precision="bf16-true"`` as an object."""
    return _named("half", precision)


def DoublePrecision() -> Precision:
    """``precision="64-true"`` as an object."""
    return _named("double", "64-true")


# The names that they had until Lightning 2.1, which it still finds.
MixedPrecisionPlugin, HalfPrecisionPlugin, DoublePrecisionPlugin = MixedPrecision, HalfPrecision, DoublePrecision
PrecisionPlugin = Precision


def environment_of(plugins: Any) -> ClusterEnvironment:
    """The environment that ``plugins`` hold, or the one that this process finds itself in."""
    given = list(plugins) if isinstance(plugins, Sequence) else [plugins]
    mine = [plugin for plugin in given if isinstance(plugin, ClusterEnvironment)]
    kinds: tuple[type[ClusterEnvironment], ...]
    kinds = (TorchElasticEnvironment, KubeflowEnvironment, MPIEnvironment, SLURMEnvironment)
    job = current_job()
    joined = () if job is None or job.origin in LightningEnvironment.origins else kinds
    return mine[0] if mine else next((kind() for kind in joined if kind.detect()), LightningEnvironment())


_AS_IT_IS = ("None", "32", "32-true")  # what Lightning's default means: modules and batches keep their formats


def meant_by(plugins: Any, precision: Any, checkpoint_io: CheckpointIO | None = None) -> tuple[Any, CheckpointIO]:
    """The precision and who writes checkpoints that ``plugins`` hold, or what was given apart from them.

    Raises:
        ConfigurationError: they hold something else, or one of both is given twice.
    """
    given = [] if plugins is None else list(plugins) if isinstance(plugins, Sequence) else [plugins]
    for plugin in given:
        if isinstance(plugin, ClusterEnvironment):
            if not hasattr(plugin, "given"):
                raise ConfigurationError(
                    f"plugins: the Trainer joins no job through {type(plugin).__name__}: leave it out and set RANK,"
                    " WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from it before."
                )
        elif not isinstance(plugin, Precision | CheckpointIO):
            raise ConfigurationError(
                f"plugins: {type(plugin).__name__} is no Precision, no CheckpointIO and no ClusterEnvironment, the"
                " plugins that a Trainer takes here: leave it out; sync_batchnorm=True synchronises BatchNorm."
            )
    in_slurm = SLURMEnvironment.detect() and SLURMEnvironment.job_id() is not None and "SLURM_NTASKS" in os.environ
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    if in_slurm and first and not any(isinstance(plugin, ClusterEnvironment) for plugin in given):
        tell_of_no_requeueing("in a job of SLURM's")
    precisions = [plugin for plugin in given if isinstance(plugin, Precision)]
    writers = [plugin for plugin in given if isinstance(plugin, CheckpointIO)]
    if len(precisions) > 1 or (precisions and precision is not None):
        raise ConfigurationError("plugins and precision give more than one precision: give one.")
    if len(writers) + (checkpoint_io is not None) > 1:
        raise ConfigurationError("plugins and strategy give more than one CheckpointIO: give one.")
    if not precisions and str(precision) in _AS_IT_IS:
        precision = Precision("32-true")
    return (precisions or [precision])[0], (writers or [checkpoint_io or TorchCheckpointIO()])[0]


deep_names.name_below(__name__)
