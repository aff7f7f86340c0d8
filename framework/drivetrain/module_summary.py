"""The layers of a module and their sizes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode


@dataclass
class Row:
    """One layer: its name, class, numbers of parameters and (if known) the shapes it takes and gives."""

    name: str
    kind: str
    parameters: int
    trainable: int
    module: nn.Module = field(repr=False)
    takes: Any = None
    gives: Any = None
    flops: int = 0


class Summary:
    """Sizes of ``module`` down to ``max_depth`` levels of children (1: direct children, 0: totals, -1: all).

    Where the module has an ``example_input_array``, its forward pass is traced, in evaluation mode, with tensors that
    have a shape and no data: nothing is computed, no weight, statistic or random state is touched, no other worker is
    needed. With ``compute`` it is a pass like any other: what it draws at random is drawn.

    Attributes:
        rows: a :class:`Row` for each layer.
        parameters, trainable: totals; a shared parameter counts once.
        megabytes: size of the parameters in the dtype they have.
        flops: floating-point operations of the traced pass, where they are counted.
        note: why shapes are missing, or ``""``.

    Args:
        count_flops: count the operations of the pass, in all and of each layer.
        compute: pass the example itself.
    """

    def __init__(self, module: nn.Module, max_depth: int = 1, count_flops: bool = False, compute: bool = False) -> None:
        layers = [
            (name, child)
            for name, child in module.named_modules()
            if name and (max_depth == -1 or name.count(".") < max_depth)
        ]
        self.rows = [Row(name, type(child).__name__, *_count(child), child) for name, child in layers]
        self.parameters, self.trainable = _count(module)
        known = [p for p in module.parameters() if not is_lazy(p)]
        self.megabytes = sum(p.numel() * p.element_size() for p in known) / 1e6
        self.note, self.flops = "", 0
        example = getattr(module, "example_input_array", None)
        self.has_shapes = example is not None
        if example is not None and any(hasattr(p, "placements") for p in module.parameters()):
            # Parts of tensors (DTensor): a pass here would wait for the other ranks.
            self.note = "no shapes: the layers are divided among the ranks"
        elif example is not None:
            if compute:  # Lightning looks whether it is there and asks again: it may be drawn whenever it is asked for
                example = module.example_input_array
            self._trace(module, example, count_flops, compute)

    def _trace(self, module: nn.Module, example: Any, count_flops: bool, compute: bool) -> None:
        rows = {id(row.module): row for row in self.rows}

        def record(child: nn.Module, inputs: Any, keywords: dict[str, Any], output: Any) -> None:
            row = rows[id(child)]
            if row.takes is None:
                row.takes, row.gives = shapes((*inputs, *keywords.values())), shapes(output)

        watched = [row.module for row in self.rows if not isinstance(row.module, torch.jit.ScriptModule)]  # takes none
        handles = [one.register_forward_hook(record, with_kwargs=True) for one in watched]
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        training = {child: child.training for child in module.modules()}
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        arguments, keywords = _arguments(_moved(example, device if compute else torch.device("meta"), dtype))
        counter = FlopCounterMode(display=False) if count_flops else nullcontext()
        try:
            module.eval()
            with torch.no_grad(), counter:
                if compute:
                    module(*arguments, **keywords)
                else:
                    empty = {name: tensor.detach().to("meta") for name, tensor in state.items()}
                    torch.func.functional_call(module, empty, arguments, keywords)
        except Exception as error:  # the user's forward may raise anything; the summary is not worth a run
            self.note = f"no shapes: forward(example_input_array) raised {type(error).__name__}: {error}"
        finally:
            if isinstance(counter, FlopCounterMode):
                self._take_flops(type(module).__name__, counter)
            for child, flag in training.items():
                child.training = flag
            for handle in handles:
                handle.remove()

    def _take_flops(self, root: str, counter: FlopCounterMode) -> None:
        counted = counter.get_flop_counts()
        self.flops = int(counter.get_total_flops())
        for row in self.rows:
            row.flops = sum(counted.get(f"{root}.{row.name}", {}).values())


def _count(module: nn.Module) -> tuple[int, int]:
    known = [p for p in module.parameters() if not is_lazy(p)]
    return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)


def _moved(example: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The tensors of ``example`` on ``device``, those of numbers with a point in ``dtype``."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    return apply_to_collection(example, torch.Tensor, moved)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``forward`` gets the example: a tuple or list as positions, a dictionary as keywords, else as the one
    argument."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def shapes(value: Any) -> Any:
    """The shape of a tensor, a list of them for what holds several, ``"?"`` for anything else."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, list | tuple):
        return shapes(value[0]) if len(value) == 1 else [shapes(item) for item in value]
    if isinstance(value, dict):
        return [shapes(item) for item in value.values()]
    return "?"
