"""Lightning's utilities that published projects use."""

from __future__ import annotations

import gc
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict
from warnings import filterwarnings

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.enums import StrEnum as LightningEnum
from lightning_utilities.core.imports import RequirementCache as RequirementCache
from lightning_utilities.core.imports import compare_version as compare_version
from lightning_utilities.core.imports import module_available as module_available
from lightning_utilities.core.imports import package_available as package_available
from lightning_utilities.core.overrides import is_overridden as _is_overridden
from lightning_utilities.core.rank_zero import WarningCache as _WarningCache
from lightning_utilities.core.rank_zero import rank_prefixed_message as rank_prefixed_message
from lightning_utilities.core.rank_zero import rank_zero_deprecation as _rank_zero_deprecation
from torch import Tensor, nn
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.attribute_dict import AttributeDict as AttributeDict
from drivetrain.callback import Callback
from drivetrain.checkpoint import rng, single
from drivetrain.combined import CombinedLoader as CombinedLoader
from drivetrain.data import DataModule
from drivetrain.data_hooks import move
from drivetrain.errors import ConfigurationError
from drivetrain.errors import PossibleUserWarning as PossibleUserWarning
from drivetrain.errors import Terminated as SIGTERMException  # noqa: F401
from drivetrain.hyperparameters import HyperparametersMixin as HyperparametersMixin
from drivetrain.lightning import deep_names
from drivetrain.lightning.compiled import from_compiled as from_compiled
from drivetrain.lightning.compiled import to_uncompiled as to_uncompiled
from drivetrain.lightning.conversions import CONVERSION_DTYPES as CONVERSION_DTYPES
from drivetrain.lightning.conversions import convert_tensors_to_scalars as convert_tensors_to_scalars
from drivetrain.lightning.conversions import convert_to_tensors as convert_to_tensors
from drivetrain.lightning.environment_defaults import _defaults_from_env_vars as _defaults_from_env_vars
from drivetrain.lightning.environment_defaults import _parse_env_variables as _parse_env_variables
from drivetrain.lightning.fp32_weights import (
    convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
)
from drivetrain.lightning.lengths import has_iterable_dataset as has_iterable_dataset
from drivetrain.lightning.lengths import has_len as has_len
from drivetrain.lightning.lengths import has_len_all_ranks as has_len_all_ranks
from drivetrain.lightning.lengths import sized_len as sized_len
from drivetrain.lightning.logged_parameters import _add_prefix as _add_prefix
from drivetrain.lightning.logged_parameters import _convert_json_serializable as _convert_json_serializable
from drivetrain.lightning.logged_parameters import _convert_params as _convert_params
from drivetrain.lightning.logged_parameters import _flatten_dict as _flatten_dict
from drivetrain.lightning.logged_parameters import _is_json_serializable as _is_json_serializable
from drivetrain.lightning.logged_parameters import _sanitize_callable_params as _sanitize_callable_params
from drivetrain.lightning.logged_parameters import _sanitize_params as _sanitize_params
from drivetrain.lightning.messages import rank_zero_debug as rank_zero_debug
from drivetrain.lightning.messages import rank_zero_info as rank_zero_info
from drivetrain.lightning.overrides import DistributedSamplerWrapper as DistributedSamplerWrapper
from drivetrain.lightning.parsing import clean_namespace as clean_namespace
from drivetrain.lightning.parsing import collect_init_args as collect_init_args
from drivetrain.lightning.parsing import get_init_args as get_init_args
from drivetrain.lightning.parsing import is_picklable as is_picklable
from drivetrain.lightning.parsing import lightning_getattr as lightning_getattr
from drivetrain.lightning.parsing import lightning_hasattr as lightning_hasattr
from drivetrain.lightning.parsing import lightning_setattr as lightning_setattr
from drivetrain.lightning.parsing import parse_class_init_keys as parse_class_init_keys
from drivetrain.lightning.parsing import save_hyperparameters as save_hyperparameters
from drivetrain.lightning.seed import max_seed_value as max_seed_value
from drivetrain.lightning.seed import min_seed_value as min_seed_value
from drivetrain.lightning.seed import pl_worker_init_function as pl_worker_init_function
from drivetrain.lightning.seed import reset_seed as reset_seed
from drivetrain.lightning.seed import seed_everything as seed_everything
from drivetrain.module import TrainModule
from drivetrain.optimizer import SchedulerConfig as LRSchedulerConfig  # noqa: F401
from drivetrain.rank_zero import rank_zero_only as rank_zero_only
from drivetrain.rank_zero import rank_zero_warn as rank_zero_warn
from drivetrain.sharding import batch_size as _batch_size

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "GradClipAlgorithmType",
    "LightningEnum",
    "disable_possible_user_warnings",
    "find_shared_parameters",
    "grad_norm",
    "is_picklable",
    "is_shared_filesystem",
    "measure_flops",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "set_shared_parameters",
    "suggested_max_num_workers",
]
__path__: list[str] = []

FLOAT16_EPSILON = torch.finfo(torch.float16).eps
FLOAT32_EPSILON = torch.finfo(torch.float32).eps
FLOAT64_EPSILON = torch.finfo(torch.float64).eps

# -- types that projects annotate with --------------------------------------------------------------------------
STEP_OUTPUT = Tensor | Mapping[str, Any] | None
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any
_METRIC = Any
_NUMBER = int | float
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]
BType = Any  # a batch
LRSchedulerTypeUnion = torch.optim.lr_scheduler.LRScheduler | torch.optim.lr_scheduler.ReduceLROnPlateau
LRSchedulerType = type[torch.optim.lr_scheduler.LRScheduler] | type[torch.optim.lr_scheduler.ReduceLROnPlateau]
LRSchedulerPLType = LRSchedulerTypeUnion
LRScheduler, ReduceLROnPlateau = torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
LRSchedulerTypeTuple = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_PATH = str | os.PathLike[str]
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = Any


class Steppable(Protocol):
    """What has an optimizer's ``step``."""

    def step(self, closure: Callable[[], float] | None = None) -> Any: ...


class Optimizable(Steppable, Protocol):
    """What has an optimizer's ``step`` and states."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: dict[Any, Any]

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class LRSchedulerConfigType(TypedDict, total=False):
    scheduler: Any
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    optimizer: Optimizer
    lr_scheduler: Any
    monitor: NotRequired[str]


OptimizerLRScheduler = Any


class GradClipAlgorithmType(LightningEnum):
    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Whether ``val`` is one."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """The values, as text."""
        return [kind.value for kind in GradClipAlgorithmType]


MisconfigurationException = ConfigurationError  # Lightning's name; a project catches what the Trainer raises


class LightningDeprecationWarning(DeprecationWarning):
    """What :func:`rank_zero_deprecation` warns with."""


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn, on the first worker, of what will not be there much longer."""
    _rank_zero_deprecation(message, stacklevel=stacklevel + 1, **{"category": LightningDeprecationWarning, **kwargs})


class WarningCache(_WarningCache):
    """Tells each message once, on the first worker."""

    def deprecation(self, message: str, stacklevel: int = 6, **kwargs: Any) -> None:
        super().deprecation(message, stacklevel, **{"category": LightningDeprecationWarning, **kwargs})


def disable_possible_user_warnings(module: str = "") -> None:
    """Silence warnings of the kind :class:`PossibleUserWarning`."""
    filterwarnings("ignore", module=module, category=PossibleUserWarning)


# -- data -------------------------------------------------------------------------------------------------------
def move_data_to_device(batch: Any, device: Any) -> Any:
    """``batch`` (any nesting of tensors) on ``device``."""
    return move(batch, torch.device(device))


def extract_batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor.

    Raises:
        ConfigurationError: it has no tensor.
    """
    size = _batch_size(batch, uncut=True)
    if size is None:
        raise ConfigurationError("the batch size cannot be read off this batch: give self.log(..., batch_size=...).")
    return size


def suggested_max_num_workers(local_world_size: int) -> int:
    """Loader workers for each of ``local_world_size`` processes of this machine, which has so many cores."""
    if local_world_size < 1:
        raise ValueError(f"local_world_size is at least 1, not {local_world_size}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)


def is_shared_filesystem(strategy: Any, path: Any = None, timeout: int = 3) -> bool:
    """Whether all ranks see the same files: so on one node, and asked of the user's set-up on several."""
    return bool(strategy.job.num_nodes == 1)


# -- modules ----------------------------------------------------------------------------------------------------
def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Norms of each parameter's gradient, and of all together, by name."""
    kind = float(norm_type)
    if kind <= 0:
        raise ValueError(f"norm_type is above 0, not {norm_type}.")
    head = f"grad_{kind}_norm"
    found = {
        f"{head}{group_separator}{name}": _whole(p.grad.data.norm(kind))
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    if found:
        found[f"{head}_total"] = torch.stack(list(found.values())).norm(kind)
    return found


def _whole(value: Tensor) -> Tensor:
    """``value`` as every rank of its mesh has it: norms of gradients that are cut otherwise do not go together."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, in groups."""
    groups: dict[int, list[str]] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                groups.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    return [names for names in groups.values() if len(names) > 1]


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Make the parameters of each group one tensor, the first's."""
    for first, *others in shared_params:
        owner, _, name = first.rpartition(".")
        tensor = getattr(module.get_submodule(owner), name)
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, tensor)
    return module


def measure_flops(model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Any] | None = None) -> int:
    """Floating-point operations of ``forward_fn()``, and of backward where ``loss_fn`` gives a loss of its result."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        result = forward_fn()
        if loss_fn is not None:
            loss_fn(result).backward()
    return int(counter.get_total_flops())


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Random generators are afterwards as they were before."""
    state = rng.capture()
    try:
        yield
    finally:
        rng.restore(state)


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Whether the object has a method of its own in the place of ``parent``'s, by default of the class of this package
    that it derives from."""
    if instance is None:
        return False
    if parent is None:
        parent = next((kind for kind in (TrainModule, DataModule, Callback) if isinstance(instance, kind)), None)
        if parent is None:
            raise ValueError(f"is_overridden needs the parent class of a {type(instance).__name__}: pass it as parent.")
    return bool(_is_overridden(method_name, instance, parent))


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Whether a GPU had no memory left."""
    return isinstance(exception, torch.OutOfMemoryError) or _tells(exception, "CUDA", "out of memory")


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Whether cuDNN refused for want of memory, in words of its own."""
    return _tells(exception, "CUDNN_STATUS_NOT_SUPPORTED")


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Whether this machine had no memory left."""
    return _tells(exception, "DefaultCPUAllocator: can't allocate memory")


def _tells(exception: BaseException, *words: str) -> bool:
    return isinstance(exception, RuntimeError) and all(word in str(exception) for word in words)


def is_oom_error(exception: BaseException) -> bool:
    """Whether a device, or this machine, had no memory left."""
    return is_cuda_out_of_memory(exception) or is_cudnn_snafu(exception) or is_out_of_cpu_memory(exception)


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Any nesting of tensors, detached; ``to_cpu`` copies them there."""
    return apply_to_collection(in_dict, Tensor, lambda t: t.detach().cpu() if to_cpu else t.detach())


def garbage_collection_cuda() -> None:
    """Collect garbage, and give the memory of GPUs that is held for later back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Whether a method takes ``param`` by name, or ``min_args`` arguments, or, unless asked ``explicit``, any number.
    Of a decorated one, what it decorates."""
    found = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    arguments = found.args[1:]
    several = not explicit and found.varargs is not None
    return param in arguments or several or (isinstance(min_args, int) and len(arguments) >= min_args)


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """A model of torchvision, with the arguments of its function there.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    from torchvision import models

    model: nn.Module = models.get_model(model_name, **kwargs)
    return model


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The file system of fsspec that ``path`` is on."""
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]


def _get_rank() -> int | None:
    """The rank that this process's environment tells; None where it tells none."""
    found = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    return next((int(rank) for rank in found if rank is not None), None)


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """The dictionary in a file, or a stream, of ``torch.save``; objects are made with ``weights_only=False`` only.

    Raises:
        CheckpointError: there is no such file, it is damaged, it needs more trust, or it is an address.
    """
    return single.read(path_or_url, weights_only=weights_only, map_location=map_location)


def _atomic_save(checkpoint: dict[str, Any], filepath: str | os.PathLike[str]) -> None:
    """Write a file that is complete or absent.

    Raises:
        CheckpointError: the disk refused, or something cannot be pickled.
    """
    single.write(checkpoint, Path(filepath))


def _distributed_is_initialized() -> bool:
    """Whether this process is in a process group of torch's."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_VERSION = re.compile(r"_(TORCH|TORCHMETRICS|TORCHVISION)_(GREATER|LESS)_EQUAL_(\d+(?:_\d+)*)")


def __getattr__(name: str) -> Any:
    if found := _VERSION.fullmatch(name):  # _TORCH_GREATER_EQUAL_2_1
        compare = operator.ge if found[2] == "GREATER" else operator.le
        return compare_version(found[1].lower(), compare, found[3].replace("_", "."))
    if name in ("Throughput", "TrainingSpikeException"):  # they are beside callbacks
        from drivetrain.lightning import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


deep_names.name_below(__name__)
