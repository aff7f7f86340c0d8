"""ModelSummary: a table of the module's layers and their sizes before training starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.precision.conversion import cast_floating

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

UNITS = ("", " K", " M", " B", " T")


@dataclass
class Row:
    """One layer: its name, class, numbers of parameters and (if known) the shapes it takes and gives."""

    name: str
    kind: str
    parameters: int
    trainable: int
    takes: Any = None
    gives: Any = None


class Summary:
    """Sizes of ``module`` down to ``max_depth`` levels of children (1: direct children, 0: totals, -1: all).

    Where the module has an ``example_input_array``, its forward pass is traced with tensors that have a shape and no
    data: nothing is computed, no weight, statistic or random state is touched, no other worker is needed.

    Attributes:
        rows: a :class:`Row` for each layer.
        parameters, trainable: totals; a shared parameter counts once.
        megabytes: size of the parameters in the dtype they have.
        note: why shapes are missing, or ``""``.
    """

    def __init__(self, module: nn.Module, max_depth: int = 1) -> None:
        layers = [
            (name, child)
            for name, child in module.named_modules()
            if name and (max_depth == -1 or name.count(".") < max_depth)
        ]
        self.rows = [Row(name, type(child).__name__, *_count(child)) for name, child in layers]
        self.parameters, self.trainable = _count(module)
        known = [p for p in module.parameters() if not is_lazy(p)]
        self.megabytes = sum(p.numel() * p.element_size() for p in known) / 1e6
        self.note = ""
        example = getattr(module, "example_input_array", None)
        self.has_shapes = example is not None
        if example is not None:
            self._trace(module, layers, example)

    def _trace(self, module: nn.Module, layers: list[tuple[str, nn.Module]], example: Any) -> None:
        rows = {id(child): row for (_, child), row in zip(layers, self.rows, strict=True)}

        def record(child: nn.Module, inputs: Any, output: Any) -> None:
            row = rows[id(child)]
            if row.takes is None:
                row.takes, row.gives = shapes(inputs), shapes(output)

        handles = [child.register_forward_hook(record) for _, child in layers]
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        training = {child: child.training for child in module.modules()}
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
        arguments, keywords = _arguments(_on_meta(cast_floating(example, dtype)))
        try:
            module.eval()
            with torch.no_grad():
                empty = {name: tensor.detach().to("meta") for name, tensor in state.items()}
                torch.func.functional_call(module, empty, arguments, keywords)
        except Exception as error:  # the user's forward may raise anything; the summary is not worth a run
            self.note = f"no shapes: forward(example_input_array) raised {type(error).__name__}: {error}"
        finally:
            for child, flag in training.items():
                child.training = flag
            for handle in handles:
                handle.remove()

    def table(self, **looks: Any) -> Table:
        table = Table(**{"box": None, "header_style": "bold", "pad_edge": False, **looks})
        table.add_column("Name")
        table.add_column("Type")
        table.add_column("Params", justify="right")
        table.add_column("Trainable", justify="right")
        if self.has_shapes:
            table.add_column("In sizes")
            table.add_column("Out sizes")
        for row in self.rows:
            cells = [row.name, row.kind, readable(row.parameters), readable(row.trainable)]
            if self.has_shapes:
                cells += [_shape_text(row.takes), _shape_text(row.gives)]
            table.add_row(*(Text(cell) for cell in cells))
        return table

    def totals(self) -> str:
        frozen = self.parameters - self.trainable
        line = (
            f"{readable(self.parameters)} parameters: {readable(self.trainable)} trainable,"
            f" {readable(frozen)} not; about {self.megabytes:,.1f} MB"
        )
        return f"{line}\n{self.note}" if self.note else line


class ModelSummary(Callback):
    """Print a :class:`Summary` when fitting starts, on the first worker.

    Args:
        max_depth: levels of children to show; 0 prints totals only, -1 everything.
        summarize_kwargs: keywords of ``rich``'s table (``header_style="bold"``).

    Raises:
        ConfigurationError: a depth below -1.
    """

    rank_zero_only = True

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        if max_depth < -1:
            raise ConfigurationError(f"ModelSummary(max_depth={max_depth}): use -1 for all levels or 0 and more.")
        self.max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.is_global_zero:
            return
        summary = Summary(pl_module, self.max_depth)
        # No terminal, no colours and no borders: rich then writes plain text.
        console = Console(soft_wrap=False)
        width = None if console.is_terminal else 160
        if summary.rows:
            console.print(summary.table(**self._summarize_kwargs), width=width)
        console.print(summary.totals(), markup=False, highlight=False)


class RichModelSummary(ModelSummary):
    """The same under Lightning's other name: tables are rich's here in any case."""


def _count(module: nn.Module) -> tuple[int, int]:
    known = [p for p in module.parameters() if not is_lazy(p)]
    return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)


def _on_meta(example: Any) -> Any:
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(example, torch.Tensor, lambda tensor: tensor.to("meta"))


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``forward`` gets the example: a tuple as positions, a dictionary as keywords, else as the one argument."""
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def shapes(value: Any) -> Any:
    """The shape of a tensor, a list of them for what holds several, ``"?"`` for anything else."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, list | tuple):
        return shapes(value[0]) if len(value) == 1 else [shapes(item) for item in value]
    if isinstance(value, dict):
        return [shapes(item) for item in value.values()]
    return "?"


def _shape_text(value: Any) -> str:
    return "?" if value is None else str(value).replace("'", "")


def readable(number: int) -> str:
    """``1199882`` as ``1.2 M``."""
    if number < 1000:
        return str(number)
    power = min(int(math.log10(number)) // 3, len(UNITS) - 1)
    scaled = number / 1000**power
    return f"{scaled:.1f}{UNITS[power]}" if scaled < 100 else f"{scaled:.0f}{UNITS[power]}"
