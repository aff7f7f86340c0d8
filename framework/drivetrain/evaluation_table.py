"""The table that a Trainer shows of what an evaluation found, where no progress bar does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence

from rich import get_console
from rich.table import Column, Table
from rich.text import Text

_NARROWEST = 25  # characters of a column


def show(results: Sequence[Mapping[str, float]], stage: str) -> None:
    """Write metrics in rows and loaders in columns to standard output, loaders that do not fit in further tables.

    Args:
        results: the figures of each loader, by name; what follows ``/dataloader_idx_`` in a name is its column.
        stage: ``"validate"`` or ``"test"``.
    """
    loaders = [{name.split("/dataloader_idx_")[0]: value for name, value in found.items()} for found in results]
    names = sorted({name for found in loaders for name in found})
    if not names:
        return
    titles = [f"DataLoader {index}" for index in range(len(loaders))]
    room = shutil.get_terminal_size((120, 30)).columns or 120
    width = min(max(len(text) for text in (*names, *titles, " " * _NARROWEST)), room // 2)
    for some in _groups(range(len(loaders)), max(1, room // width - 1)):
        first = Column(f"{stage.capitalize()} metric", justify="center", style="cyan", width=width)
        table = Table(first, *(Column(titles[i], justify="center", style="magenta", width=width) for i in some))
        for name in names:
            table.add_row(Text(name), *(str(loaders[i].get(name, " ")) for i in some))
        get_console().print(table)


def _groups(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))
