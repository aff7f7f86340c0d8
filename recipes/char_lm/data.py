"""Real text that is on every machine: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError

Batch = tuple[Tensor, Tensor]


class LibraryText(DataModule):
    """Loaders of ``(bytes (B, T), the bytes that follow them (B, T))``, both int64.

    The text is cut into pieces of ``context + 1`` bytes; every tenth piece is held out for validation and test.

    Args:
        dir: folder whose ``*.py`` (or, where it has none, ``*.txt``) files are read instead of the library's.
        bytes: how much of the text is used, from its beginning.
        context: bytes that a prediction may look back, ``T``.
        batch_size: pieces of a training batch.
        eval_batch_size: pieces of a validation, test or prediction batch.
        num_workers: loader processes.

    Raises:
        ConfigurationError: a number is out of range; in ``setup``: there is no text, or too little of it.
    """

    def __init__(
        self,
        dir: str | Path | None = None,
        bytes: int = 1_000_000,
        context: int = 64,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("bytes", bytes, 1),
            ("context", context, 1),
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigurationError(f"data.{name}={value} is too small: give at least {least}.")
        self.dir = None if dir is None else Path(dir).expanduser()
        self.bytes, self.context = bytes, context
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.train: Pieces | None = None

    def setup(self, stage: str) -> None:
        """Read the text once; every stage takes its part of it."""
        if self.train is not None:
            return
        text = read(self.dir, self.bytes)
        size = self.context + 1
        if len(text) < 10 * size:
            raise ConfigurationError(
                f"{len(text)} bytes of text make fewer than ten pieces of data.context + 1 = {size} bytes:"
                " give more text (data.bytes, data.dir) or a shorter context."
            )
        pieces = text[: len(text) // size * size].reshape(-1, size)
        held_out = np.arange(len(pieces)) % 10 == 9
        self.train, self.held_out = Pieces(pieces[~held_out]), Pieces(pieces[held_out])

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.train and self.held_out, self.eval_batch_size)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def loader(self, pieces: Pieces | None, batch_size: int, shuffle: bool = False) -> DataLoader[Batch]:
        if pieces is None:
            raise RuntimeError("call setup() before asking for a loader.")
        return DataLoader(
            pieces,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=as_it_is,
        )


class Pieces(Dataset[Batch]):
    """Pieces of text ``(N, T + 1)`` kept as bytes; numpy, which starts no threads, fetches whole batches."""

    def __init__(self, pieces: np.ndarray) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The batch of these pieces: ``(B, T)`` and, one byte on, ``(B, T)``."""
        chosen = torch.from_numpy(self.pieces[indices].astype(np.int64))
        return chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()

    def __getitem__(self, index: int) -> Batch:
        """One piece: ``(T,)`` and ``(T,)``."""
        tokens, following = self.__getitems__([index])
        return tokens[0], following[0]


def as_it_is(batch: Any) -> Any:
    """The dataset gives whole batches; there is nothing left to collate."""
    return batch


def read(folder: Path | None, limit: int) -> np.ndarray:
    """Up to ``limit`` bytes of the files in ``folder`` (``None``: Python's standard library), in the order of their
    names, as ``(N,)`` uint8.

    Raises:
        ConfigurationError: there is no file to read.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    found: list[Path] = []
    for ending in ("*.py", "*.txt"):
        found = found or sorted(root.glob(ending))
    if not found:
        raise ConfigurationError(f"{root} has no *.py or *.txt files to read: set data.dir to a folder that has some.")
    parts, total = [], 0
    for path in found:
        try:
            parts.append(np.frombuffer(path.read_bytes()[: limit - total], np.uint8))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read ({error}).") from error
        total += len(parts[-1])
        if total >= limit:
            break
    return np.concatenate(parts)
