"""Lightning's strategies: a name or an object of theirs, and the strategy of drivetrain that it means."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch

from drivetrain.declaration import Declaration
from drivetrain.errors import ConfigurationError, WrongKindError
from drivetrain.lightning import deep_names
from drivetrain.lightning.refused_classes import refused
from drivetrain.lightning.registries import Strategies
from drivetrain.strategy import Strategy as Strategy

__path__: list[str] = []

TBroadcast, TReduce = TypeVar("TBroadcast"), TypeVar("TReduce")  # what projects annotate strategies of their own with

_REPLICATED = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
# How processes come to be is not part of a strategy here: a script, a notebook and torchrun all start the same one.
_STARTS = ("", "_spawn", "_fork", "_notebook")


def _names() -> dict[str, dict[str, Any]]:
    unused = {"_find_unused_parameters_true": {"find_unused_parameters": True}, "_find_unused_parameters_false": {}}
    names: dict[str, dict[str, Any]] = {}
    for start in _STARTS:
        names[f"ddp{start}"] = {"name": "ddp"}
        for suffix, options in unused.items():
            names[f"ddp{start}{suffix}"] = {"name": "ddp", **options}
    names["fsdp"] = {"name": "fsdp"}
    names["single_device"] = {"name": "single"}
    for stage, name in ((2, "deepspeed"), (1, "deepspeed_stage_1"), (2, "deepspeed_stage_2"), (3, "deepspeed_stage_3")):
        names[name] = {"name": "zero", "stage": stage}
    return names


NAMES = _names()
_REFUSED = {
    "fsdp_cpu_offload": "use strategy=deepspeed_stage_3 or fewer parameters per GPU",
    "deepspeed_stage_1_offload": "use strategy=deepspeed_stage_1",
    "deepspeed_stage_2_offload": "use strategy=deepspeed_stage_2",
    "deepspeed_stage_3_offload": "use strategy=deepspeed_stage_3",
    "deepspeed_stage_3_offload_nvme": "use strategy=deepspeed_stage_3",
}


class _Kind(type):
    """``isinstance(trainer.strategy, DDPStrategy)`` holds for the running strategy that such an object means."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        matches: Any = getattr(cls, "matches")  # noqa: B009  (of the class, which mypy does not know here)
        return isinstance(instance, Strategy) and bool(matches(instance))


# Of FSDP1, in whatever way the figures are the same: when weights are gathered ahead, how parameters are laid out, that
# ranks begin with the weights of the first.
_HOW_FSDP1_DOES_IT = frozenset(
    {"backward_prefetch", "forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params"}
)
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}  # whether weights are freed after the forward pass


class Asked(metaclass=_Kind):
    """What a strategy object of Lightning asks for.

    Attributes:
        wanted: drivetrain's strategy and its options.
        settings: arguments of the Trainer that come with it; ``"on"``: the kind of device that it names.
    """

    means = ""

    @classmethod
    def matches(cls, strategy: Strategy) -> bool:
        """Whether a running strategy is of this kind."""
        return strategy.name == cls.means

    def __init__(self, **options: Any) -> None:
        self.wanted: dict[str, Any] = {"name": self.means}
        self.settings: dict[str, Any] = {}
        timeout = options.pop("timeout", None)
        if timeout is not None:
            self.settings["timeout"] = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        backend = options.pop("process_group_backend", None)
        if backend is not None:
            self.settings["backend"] = backend
        writer = options.pop("checkpoint_io", None)
        if writer is not None:
            self.settings["checkpoint_io"] = writer
        accelerator = options.pop("accelerator", None)
        if accelerator is not None:
            self.settings["accelerator"] = accelerator
        self._take(options)

    def _take(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if value is not None:
                raise ConfigurationError(f"{type(self).__name__}({name}={value!r}) is not offered: leave it out.")


class SingleDeviceStrategy(Asked):
    means = "single"

    def __init__(self, device: Any = "cpu", **options: Any) -> None:
        super().__init__(**options)
        where = torch.device(device)
        if where.type not in ("cpu", "cuda"):
            raise ConfigurationError(f"SingleDeviceStrategy(device={device!r}): use 'cpu' or 'cuda:0' and its like.")
        self.settings |= {"on": where.type, "devices": [where.index or 0] if where.type == "cuda" else 1}


class ParallelStrategy(Asked):
    """Any running strategy on several workers."""

    @classmethod
    def matches(cls, strategy: Strategy) -> bool:
        return strategy.job.world_size > 1


class DDPStrategy(Asked):
    means = "ddp"

    def __init__(  # named, for a command line offers what it finds here
        self,
        *,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **options,
        )

    def _take(self, options: Mapping[str, Any]) -> None:
        mine = {name: value for name, value in options.items() if name in _REPLICATED and value is not None}
        self.wanted |= mine
        rest = {name: value for name, value in options.items() if name not in (*_REPLICATED, "start_method")}
        if rest.get("ddp_comm_hook") is not None:
            raise ConfigurationError("DDPStrategy(ddp_comm_hook=...): use Trainer(compression='bf16') and its like.")
        super()._take(rest)


class FSDPStrategy(Asked):
    """Sharded by FSDP2. Options that say how FSDP1 goes about it and change no figure are passed over.

    Args:
        auto_wrap_policy: the classes of modules to gather one at a time: a set of them, a ``ModuleWrapPolicy``, or a
            partial of ``transformer_auto_wrap_policy``. Of any other policy the blocks are found as without one.
        sharding_strategy: ``"FULL_SHARD"``, or ``"SHARD_GRAD_OP"``, which keeps gathered weights until backward.
        activation_checkpointing, activation_checkpointing_policy: activations are kept here, which is said.

    Raises:
        ConfigurationError: what is asked for is not offered.
    """

    means = "fsdp"

    def __init__(  # named, for a command line offers what it finds here
        self,
        *,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        cpu_offload: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        rest = {name: value for name, value in options.items() if name not in _HOW_FSDP1_DOES_IT}
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, cpu_offload=cpu_offload or None, **rest
        )
        if state_dict_type not in ("full", "sharded"):
            raise ConfigurationError(f"FSDPStrategy(state_dict_type={state_dict_type!r}): use 'full' or 'sharded'.")
        kind = getattr(sharding_strategy, "name", sharding_strategy)
        if kind not in _RESHARDS:
            raise ConfigurationError(
                f"FSDPStrategy(sharding_strategy={kind!r}) is not offered: use {' or '.join(_RESHARDS)}, strategy='ddp'"
                " for no shards, or strategy={'name': 'mesh', 'data': 2, 'shard': 2} for shards within groups."
            )
        if not _RESHARDS[kind]:
            self.wanted["reshard_after_forward"] = False
        if activation_checkpointing is not None or activation_checkpointing_policy is not None:
            warnings.warn(
                "FSDPStrategy: activations are kept, which takes more memory; the figures are the same. Call"
                " torch.utils.checkpoint.checkpoint in the module for activation checkpointing.",
                stacklevel=2,
            )
        wrapped = _wrapped(auto_wrap_policy)
        if wrapped:
            self.wanted["wrap"] = ",".join(sorted(kind.__name__ for kind in wrapped))


def _wrapped(policy: Any) -> set[type]:
    """The classes of modules that a policy of FSDP1 wraps, where it names them."""
    if isinstance(policy, functools.partial):
        policy = policy.keywords.get("transformer_layer_cls", ())
    policy = getattr(policy, "_module_classes", policy)  # of torch's ModuleWrapPolicy
    named = policy if isinstance(policy, set | frozenset | tuple | list) else ()
    return {one for one in named if isinstance(one, type)}


class DeepSpeedStrategy(Asked):
    means = "zero"

    def __init__(self, stage: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.wanted["stage"] = stage


class ModelParallelStrategy(Asked):
    means = "mesh"

    def __init__(self, data_parallel_size: Any = "auto", tensor_parallel_size: Any = "auto", **options: Any) -> None:
        super().__init__(**options)
        raise ConfigurationError(
            "ModelParallelStrategy leaves sharding to configure_model: use strategy={'name': 'mesh', 'tensor': 2},"
            " which shards by itself."
        )


SingleDeviceXLAStrategy = refused("strategies", "SingleDeviceXLAStrategy", Asked)
XLAStrategy = refused("strategies", "XLAStrategy", Asked)


def _registered() -> dict[str, tuple[type[Asked], dict[str, Any]]]:
    kinds = {kind.means: kind for kind in (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, DeepSpeedStrategy)}
    options = {name: dict(wanted) for name, wanted in NAMES.items()}
    return {name: (kinds[wanted.pop("name")], wanted) for name, wanted in options.items()}


StrategyRegistry = Strategies("strategy", _registered())


def meaning_of(strategy: Any) -> tuple[Any, dict[str, Any]]:
    """drivetrain's strategy (a name, or a dict of name and options), and arguments of the Trainer that come with it."""
    if isinstance(strategy, Asked):
        return dict(strategy.wanted), dict(strategy.settings)
    if isinstance(strategy, str):
        name = strategy.lower()
        if name in _REFUSED:
            raise ConfigurationError(f"strategy={strategy}: nothing is offloaded here, {_REFUSED[name]}.")
        if name in NAMES:
            return dict(NAMES[name]), {}
    elif not isinstance(strategy, Mapping | Declaration):
        kind = type(strategy)
        raise WrongKindError(
            f"strategy={kind.__name__}(...) is of {kind.__module__}: give a name, or an object of"
            " drivetrain.lightning.strategies."
        )
    return strategy, {}


deep_names.name_below(__name__)
