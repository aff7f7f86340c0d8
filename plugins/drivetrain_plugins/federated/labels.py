"""The label of every sample of a data set, for partitions by label."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from drivetrain.errors import ConfigurationError

_KNOWN = ("targets", "labels")


def labels_of(dataset: Any, where: str | None = None) -> list[int]:
    """One whole number for each sample of ``dataset``.

    Args:
        dataset: a map-style data set.
        where: the attribute that holds the labels, or ``"module:function"``, called with the data set. None looks for
            ``targets`` and ``labels``, then at the last tensor of a TensorDataset, then reads every sample.

    Raises:
        ConfigurationError: there is no such attribute or function, or samples have no single label.
    """
    found = _named(dataset, where) if where is not None else _found(dataset)
    array = np.asarray(found.cpu() if isinstance(found, torch.Tensor) else found)
    if array.shape != (len(dataset),) or (array.dtype.kind == "f" and (array != array.round()).any()):
        raise ConfigurationError(
            f"a partition by label needs one label a sample, {type(dataset).__name__} gives {array.shape} for"
            f" {len(dataset)} samples: set strategy.labels to an attribute or 'module:function' that gives them, or"
            " strategy.partition=iid."
        )
    return np.unique(array, return_inverse=True)[1].tolist()


def _named(dataset: Any, where: str) -> Any:
    module, colon, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(dataset) if colon else getattr(dataset, where)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"strategy.labels={where}: {error}; name an attribute of {type(dataset).__name__}, or 'module:function'."
        ) from error


def _found(dataset: Any) -> Any:
    for name in _KNOWN:
        if hasattr(dataset, name):
            return getattr(dataset, name)
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    if isinstance(dataset, Subset):
        inner = labels_of(dataset.dataset)
        return [inner[index] for index in dataset.indices]
    return [_label(dataset, dataset[index]) for index in range(len(dataset))]


def _label(dataset: Any, sample: Any) -> Any:
    try:
        value = sample[1]
        return value.item() if hasattr(value, "item") else int(value)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ConfigurationError(
            f"the samples of {type(dataset).__name__} have no single label in second place ({error}): set"
            " strategy.labels to an attribute or 'module:function' that gives them, or strategy.partition=iid."
        ) from error
