"""A module for use without drivetrain: as TorchScript or as ONNX. Modules come back in the mode they were in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.data_hooks import move
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule


@contextmanager
def _apart(module: TrainModule) -> Iterator[None]:
    """``module``, and those within it, in eval mode and without their trainer, which no export can hold."""
    from drivetrain.module import TrainModule

    modes = [(child, child.training) for child in module.modules()]
    trainers = [(child, child._trainer) for child in module.modules() if isinstance(child, TrainModule)]
    # TorchScript reads every property, also those that need a trainer.
    nowhere: Any = SimpleNamespace(strategy=SimpleNamespace(device=module.device, mesh=None), logger=None, loggers=[])
    nowhere.current_epoch = nowhere.global_step = nowhere.global_rank = nowhere.local_rank = 0
    for owner, _ in trainers:
        owner._trainer = nowhere
    module.eval()
    try:
        yield
    finally:
        for owner, trainer in trainers:
            owner._trainer = trainer
        for child, training in modes:
            child.training = training


def to_torchscript(
    module: TrainModule, file_path: Any, method: str, example_inputs: Any, options: dict[str, Any]
) -> Any:
    """Compile ``forward`` (``method="script"``) or trace it on ``example_inputs`` (``"trace"``; by default the module's
    ``example_input_array``); saved at ``file_path`` where it is given.

    Raises:
        ConfigurationError: there is nothing to trace on, or ``method`` is neither.
    """
    with _apart(module), torch.no_grad():
        if method == "script":
            scripted = torch.jit.script(module, **options)
        elif method == "trace":
            sample = module.example_input_array if example_inputs is None else example_inputs
            if sample is None:
                raise ConfigurationError("to_torchscript(method='trace') needs example_inputs or example_input_array.")
            scripted = torch.jit.trace(module, _arguments(move(sample, module.device)), **options)
        else:
            raise ConfigurationError(f"to_torchscript(method={method!r}): use 'script' or 'trace'.")
    if file_path is not None:
        torch.jit.save(scripted, str(file_path))
    return scripted


def to_onnx(module: TrainModule, file_path: Any, input_sample: Any, options: dict[str, Any]) -> Any:
    """Export ``forward`` on ``input_sample`` (by default ``example_input_array``) to ``file_path`` with
    ``torch.onnx.export``, which takes ``options``.

    Raises:
        ConfigurationError: there is no sample.
    """
    sample = module.example_input_array if input_sample is None else input_sample
    if sample is None:
        raise ConfigurationError("to_onnx needs input_sample or the module's example_input_array.")
    with _apart(module), torch.no_grad():
        return torch.onnx.export(module, _arguments(move(sample, module.device)), file_path, **options)


def _arguments(sample: Any) -> tuple[Any, ...]:
    return sample if isinstance(sample, tuple) else (sample,)
