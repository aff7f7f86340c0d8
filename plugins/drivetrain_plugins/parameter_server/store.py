"""What a server holds: its parameters, the gradients of this clock, and the memory in which both reach the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from drivetrain_plugins.parameter_server.layout import Layout
from drivetrain_plugins.parameter_server.window import Window


class Store:
    """Parameters moved into one flat tensor per dtype, which optimizers step and messages carry as it is.

    What all workers are given in ``sync`` is written down once. No copy protects it: it changes when every worker has
    pushed again, or asked for the step, and so has read it. In ``async`` each worker gets a copy of its own.

    Args:
        parameters: by name; their memory is replaced.
        workers: how many.
        alone: whether workers are answered each by itself (``async``).
        window: memory shared with workers, None for none.

    Attributes:
        sharing: ranks of the workers that have the window.
        totals: the flat gradients of this clock.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], workers: int, alone: bool, window: Window | None = None
    ) -> None:
        self.parameters, self.workers, self.alone = parameters, workers, alone
        self.layout = Layout.of({name: p.detach() for name, p in parameters.items()})
        self.areas: list[list[Tensor]] = window.areas if window is not None else []
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        in_place = window is not None and not alone and self.device.type == "cpu"
        made = (torch.empty(count, dtype=dtype, device=self.device) for dtype, count in self.layout.sizes)
        self.flats = self.areas[workers] if in_place else list(made)
        with torch.no_grad():
            for name, view in self.layout.split(self.flats).items():
                view.copy_(parameters[name])
                parameters[name].data = view
        if window is not None:
            window.pin(range(workers + 1), self.device)
        self.sharing: set[int] = set()
        self.totals: list[Tensor] = []
        self.written: dict[str, list[Tensor]] = {}  # on the host, of what holds now

    # -- gradients ----------------------------------------------------------------------------------------------
    def average(self, pushed: Sequence[Sequence[Tensor]], divisor: float, present: Sequence[bool]) -> None:
        """Hold the sum of the workers' gradients, in this order, over ``divisor``."""
        self.forget()
        totals = [self._sum(flats) for flats in zip(*pushed, strict=True)]
        self.set_gradients([total.div_(divisor) if divisor != 1.0 else total for total in totals], present)

    def _sum(self, flats: Sequence[Tensor]) -> Tensor:
        """In the memory of the first, where that is where the parameters are: nobody reads it again."""
        total = flats[0].to(self.device, non_blocking=True)
        for other in flats[1:]:
            total.add_(other.to(self.device, non_blocking=True))
        return total

    def forget(self) -> None:
        """Let go of gradients, whose memory the next ones may need."""
        for p in self.parameters.values():
            p.grad = None
        self.totals = []
        self.written.pop("gradients", None)

    def set_gradients(self, flats: Sequence[Tensor], present: Sequence[bool]) -> None:
        self.totals = [flat.to(self.device, non_blocking=True) for flat in flats]
        views = self.layout.split(self.totals)
        for name, there in zip(self.layout.names, present, strict=True):
            self.parameters[name].grad = views[name] if there else None

    def square(self, stepped: Iterable[nn.Parameter]) -> float:
        """Of the 2-norm of the gradients of ``stepped``."""
        gradients = [p.grad for p in stepped if p.grad is not None]
        return float(get_total_norm(gradients)) ** 2 if gradients else 0.0

    def clip(self, factor: float | None, bound: float | None) -> None:
        """Those of parameters that no optimizer steps too, which does not matter."""
        for flat in self.totals:
            if factor is not None:
                flat.mul_(factor)
            if bound is not None:
                flat.clamp_(-bound, bound)

    # -- weights ------------------------------------------------------------------------------------------------
    def set_weights(self, flats: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for flat, value in zip(self.flats, flats, strict=True):
                flat.copy_(value)
        self.changed()

    def changed(self) -> None:
        """The weights are others than those that were given."""
        self.written.pop("weights", None)

    # -- answers ------------------------------------------------------------------------------------------------
    def weights_for(self, rank: int) -> tuple[list[Tensor], int | None]:
        """The weights on the host and the area that they lie in, if that worker can look there."""
        shared = rank in self.sharing
        if self.alone:
            return self._copy(self.flats, self.areas[rank] if shared else None), rank if shared else None
        return self._written("weights", self.flats, self.workers, shared)

    def gradients_for(self, rank: int) -> tuple[list[Tensor], int | None]:
        """The gradients of this clock, in the same way; in the first worker's area, who pushes nothing before the
        step."""
        return self._written("gradients", self.totals, 0, rank in self.sharing)

    def _written(self, what: str, flats: list[Tensor], area: int, shared: bool) -> tuple[list[Tensor], int | None]:
        if what not in self.written:
            known = self.areas[area] if self.areas else None
            in_place = self.device.type == "cpu" and (known is None or _same_memory(flats, known))
            self.written[what] = flats if in_place else self._copy(flats, known)
        self._settle()
        return self.written[what], area if shared else None

    def _copy(self, flats: Sequence[Tensor], to: list[Tensor] | None) -> list[Tensor]:
        on_gpu = self.device.type == "cuda"
        if to is None:
            to = [torch.empty(flat.shape, dtype=flat.dtype, pin_memory=on_gpu) for flat in flats]
        for flat, target in zip(flats, to, strict=True):
            target.copy_(flat, non_blocking=on_gpu)
        self._settle()
        return to

    def _settle(self) -> None:
        """Wait for the device: a worker that is answered may write to its area again."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _same_memory(flats: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(one.data_ptr() == other.data_ptr() for one, other in zip(flats, others, strict=True))
