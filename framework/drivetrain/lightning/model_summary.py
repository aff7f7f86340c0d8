"""Lightning's summary of a module as an object: its layers, their sizes, and the table as text."""

from __future__ import annotations

from math import log10
from typing import Any

from torch import nn

from drivetrain.lightning import deep_names
from drivetrain.module_summary import Row, Summary

__path__: list[str] = []
UNKNOWN_SIZE, NOT_APPLICABLE, LEFTOVER_PARAMS_NAME = "?", "n/a", "other params"
PARAMETER_NUM_UNITS = [" ", "K", "M", "B", "T"]


class LayerSummary:
    """One layer of a :class:`ModelSummary`, or a module by itself (then without shapes)."""

    def __init__(self, module: nn.Module) -> None:
        self._row = next(iter(Summary(nn.ModuleList([module])).rows))

    @classmethod
    def of(cls, row: Row) -> LayerSummary:
        layer = cls.__new__(cls)
        layer._row = row
        return layer

    @property
    def in_size(self) -> Any:
        """Shape of what the layer takes, a list of shapes where that is several tensors."""
        return self._row.takes or UNKNOWN_SIZE

    @property
    def out_size(self) -> Any:
        return self._row.gives or UNKNOWN_SIZE

    @property
    def layer_type(self) -> str:
        return self._row.kind

    @property
    def num_parameters(self) -> int:
        return self._row.parameters

    @property
    def training(self) -> bool:
        return self._row.module.training


class ModelSummary:
    """Layers of ``model`` down to ``max_depth`` levels (1: its children, 0: none, -1: all) and its totals.

    Shapes and operations come of a forward pass with ``model.example_input_array``, in evaluation mode. ``str()`` gives
    the table.

    Raises:
        ValueError: a depth below -1.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"max_depth={max_depth!r}: give -1 for all levels, 0 for none, or a number of levels.")
        self._model, self._max_depth = model, max_depth
        self._summary = Summary(model, max_depth, count_flops=True, compute=True)
        self._layers = {row.name: LayerSummary.of(row) for row in self._summary.rows}
        attached = getattr(model, "_trainer", None)
        self._bytes = 2 if attached and attached.precision in ("16-true", "bf16-true") else 4
        if attached and attached.precision == "64-true":
            self._bytes = 8

    def summarize(self) -> dict[str, LayerSummary]:
        """The layers by name."""
        return dict(self._layers)

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        return [(row.name, row.module) for row in self._summary.rows]

    @property
    def layer_names(self) -> list[str]:
        return list(self._layers)

    @property
    def layer_types(self) -> list[str]:
        return [layer.layer_type for layer in self._layers.values()]

    @property
    def in_sizes(self) -> list[Any]:
        return [layer.in_size for layer in self._layers.values()]

    @property
    def out_sizes(self) -> list[Any]:
        return [layer.out_size for layer in self._layers.values()]

    @property
    def param_nums(self) -> list[int]:
        return [layer.num_parameters for layer in self._layers.values()]

    @property
    def training_modes(self) -> list[bool]:
        return [layer.training for layer in self._layers.values()]

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Modules within the model by their mode."""
        modes = [child.training for child in self._model.modules()][1:]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def total_parameters(self) -> int:
        return self._summary.parameters

    @property
    def trainable_parameters(self) -> int:
        return self._summary.trainable

    @property
    def total_layer_params(self) -> int:
        return sum(self.param_nums)

    @property
    def model_size(self) -> float:
        """Megabytes of the parameters in the Trainer's precision, in 32 bits without one."""
        return self.total_parameters * self._bytes * 1e-6

    @property
    def total_flops(self) -> int:
        return self._summary.flops

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        """The columns of the table: the name of each, and its cells."""
        # Asked for anew, as in Lightning: it may be drawn whenever it is.
        shaped = getattr(self._model, "example_input_array", None) is not None
        head = [" ", "Name", "Type", "Params", "Mode", "FLOPs", *(["In sizes", "Out sizes"] if shaped else [])]
        lines = []
        for number, (row, layer) in enumerate(zip(self._summary.rows, self._layers.values(), strict=True)):
            mode = "train" if layer.training else "eval"
            cells = [str(number), row.name, row.kind, get_human_readable_count(row.parameters), mode]
            cells.append(get_human_readable_count(row.flops))
            lines.append([*cells, *([str(layer.in_size), str(layer.out_size)] if shaped else [])])
        left = self.total_parameters - self.total_layer_params
        if left > 0:
            rest = [NOT_APPLICABLE] * (len(head) - 4)
            lines.append([" ", LEFTOVER_PARAMS_NAME, NOT_APPLICABLE, get_human_readable_count(left), *rest])
        return [(name, [line[column] for line in lines]) for column, name in enumerate(head)]

    def __str__(self) -> str:
        columns = self._get_summary_data()
        head = [name for name, _ in columns]
        lines = [head, *(list(cells) for cells in zip(*(column for _, column in columns), strict=True))]
        widths = [max(1, *(len(line[column]) for line in lines)) for column in range(len(head))]
        rule = "-" * (sum(widths) + 3 * (len(widths) + 1))
        table = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        modes = self.total_training_modes
        totals = [
            (get_human_readable_count(self.trainable_parameters), "Trainable params"),
            (get_human_readable_count(self.total_parameters - self.trainable_parameters), "Non-trainable params"),
            (get_human_readable_count(self.total_parameters), "Total params"),
            (get_formatted_model_size(self.model_size), "Total estimated model params size (MB)"),
            (str(modes["train"]), "Modules in train mode"),
            (str(modes["eval"]), "Modules in eval mode"),
            (get_human_readable_count(self.total_flops), "Total Flops"),
        ]
        return "\n".join([table[0], rule, *table[1:], rule, *(f"{figure:<10}{what}" for figure, what in totals)])

    def __repr__(self) -> str:
        return str(self)


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """A :class:`ModelSummary` of the module."""
    return ModelSummary(lightning_module, max_depth)


def get_human_readable_count(number: int) -> str:
    """``1199882`` as ``1.2 M``; there is a place for the unit also where there is none."""
    group = min((int(log10(number)) if number > 0 else 0) // 3, len(PARAMETER_NUM_UNITS) - 1)
    scaled = number / 1000**group
    text = f"{scaled:,.1f}" if group and scaled < 100 else f"{int(scaled):,}"
    return f"{text} {PARAMETER_NUM_UNITS[group]}"


def get_formatted_model_size(total_model_size: float) -> str:
    """Megabytes as text."""
    return f"{total_model_size:,.3f}"


def parse_batch_shape(batch: Any) -> Any:
    """The shape of a tensor as a list, those of a list or tuple of them; ``"?"`` of anything else."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, list | tuple):
        return [parse_batch_shape(part) for part in batch]
    return UNKNOWN_SIZE


deep_names.name_below(__name__)
