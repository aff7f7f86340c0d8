"""ModelSummary: a table of the module's layers and their sizes before training starts."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain.module_summary import Summary

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

UNITS = ("", " K", " M", " B", " T")
_KEYWORDS = {name for name, one in inspect.signature(Table).parameters.items() if one.kind is one.KEYWORD_ONLY}


class ModelSummary(Callback):
    """Print a :class:`Summary` when fitting starts, on the first worker.

    Args:
        max_depth: levels of children to show; 0 prints totals only, -1 everything.
        summarize_kwargs: keywords of ``rich``'s table (``header_style="bold"``), or of one's own :meth:`summarize`.
            A keyword that nothing knows is told and passed over, as Lightning passes over it.

    Raises:
        ConfigurationError: a depth below -1.
    """

    rank_zero_only = True

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        if max_depth < -1:
            raise ConfigurationError(f"ModelSummary(max_depth={max_depth}): use -1 for all levels or 0 and more.")
        self.max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs
        if type(self).summarize is ModelSummary.summarize and (unknown := sorted({*summarize_kwargs} - _KEYWORDS)):
            warnings.warn(
                f"{type(self).__name__} passes over {', '.join(unknown)}: its table has no such keyword"
                " (header_style, title and the like); leave it out.",
                stacklevel=2,
            )
        self._taken: tuple[TrainModule, Any] | None = None  # of a module that is divided by the time it is shown

    def before_division(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.is_global_zero:
            self._taken = pl_module, self._summary(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.is_global_zero:
            return
        taken = self._taken if self._taken is not None and self._taken[0] is pl_module else None
        summary = self._summary(trainer, pl_module) if taken is None else taken[1]
        if type(self).summarize is not ModelSummary.summarize:
            self._show_as_lightnings(summary)
            return
        # No terminal, no colours and no borders: rich then writes plain text.
        console = Console(soft_wrap=False)
        width = None if console.is_terminal else 160
        if summary.rows:
            console.print(table(summary, **self._summarize_kwargs), width=width)
        console.print(totals(summary), markup=False, highlight=False)

    def _summary(self, trainer: Trainer, pl_module: TrainModule) -> Any:
        """What is shown; Lightning's columns for a project's own ``summarize``."""
        if type(self).summarize is not ModelSummary.summarize:
            from drivetrain.lightning.model_summary import ModelSummary as Columns

            return Columns(pl_module, self.max_depth) if self.max_depth else None
        drawn = trainer.meanings.examples == "drawn" and trainer.world_size == 1  # else the others would wait for it
        summary = Summary(pl_module, self.max_depth, compute=drawn)
        if drawn:
            _ = pl_module.example_input_array  # Lightning's table asks once more, and what is asked may draw
        return summary

    def _show_as_lightnings(self, found: Any) -> None:
        """Have a project's own ``summarize`` print what Lightning would give it."""
        if found is None:
            return
        self.summarize(
            found._get_summary_data(),
            found.total_parameters,
            found.trainable_parameters,
            found.model_size,
            found.total_training_modes,
            total_flops=found.total_flops,
            **self._summarize_kwargs,
        )

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print these columns and totals; overridden it is called in place of the table that is printed here.

        Args:
            summary_data: the columns, each its name and its cells.
            model_size: in megabytes.
            total_training_modes: numbers of modules that are in training (``"train"``) and in evaluation (``"eval"``).
            summarize_kwargs: keywords of ``rich``'s table.
        """
        shown = _empty_table(summarize_kwargs)
        for name, _ in summary_data:
            shown.add_column(name)
        for cells in zip(*(column for _, column in summary_data), strict=True):
            shown.add_row(*(Text(str(cell)) for cell in cells))
        console = Console(soft_wrap=False)
        console.print(shown, width=None if console.is_terminal else 160)
        frozen = total_parameters - trainable_parameters
        modes = ", ".join(f"{number} in {mode}" for mode, number in total_training_modes.items())
        console.print(
            f"{readable(total_parameters)} parameters: {readable(trainable_parameters)} trainable, {readable(frozen)}"
            f" not; about {model_size:,.1f} MB; modules: {modes}; {readable(total_flops)} FLOPs",
            markup=False,
            highlight=False,
        )


class RichModelSummary(ModelSummary):
    """The same under Lightning's other name: tables are rich's here in any case."""


def _empty_table(looks: dict[str, Any]) -> Table:
    known = {name: value for name, value in looks.items() if name in _KEYWORDS}
    return Table(**{"box": None, "header_style": "bold", "pad_edge": False, **known})


def table(summary: Summary, **looks: Any) -> Table:
    """The layers as a table of rich's; ``looks`` are keywords of it; others are passed over."""
    table = _empty_table(looks)
    table.add_column("Name")
    table.add_column("Type")
    table.add_column("Params", justify="right")
    table.add_column("Trainable", justify="right")
    if summary.has_shapes:
        table.add_column("In sizes")
        table.add_column("Out sizes")
    for row in summary.rows:
        cells = [row.name, row.kind, readable(row.parameters), readable(row.trainable)]
        if summary.has_shapes:
            cells += [_shape_text(row.takes), _shape_text(row.gives)]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def totals(summary: Summary) -> str:
    """The line below the table, and why shapes are missing in it."""
    frozen = summary.parameters - summary.trainable
    line = (
        f"{readable(summary.parameters)} parameters: {readable(summary.trainable)} trainable,"
        f" {readable(frozen)} not; about {summary.megabytes:,.1f} MB"
    )
    return f"{line}\n{summary.note}" if summary.note else line


def _shape_text(value: Any) -> str:
    return "?" if value is None else str(value).replace("'", "")


def readable(number: int) -> str:
    """``1199882`` as ``1.2 M``."""
    if number < 1000:
        return str(number)
    power = min(int(math.log10(number)) // 3, len(UNITS) - 1)
    scaled = number / 1000**power
    return f"{scaled:.1f}{UNITS[power]}" if scaled < 100 else f"{scaled:.0f}{UNITS[power]}"
