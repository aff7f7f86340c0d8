"""Finding out whether a step computes with weights that lie on other ranks: whose own copies are old, or empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# What takes the kind, the shape or the place of a tensor and leaves alone what is in it.
_SHAPES = frozenset(f"{how}{kind}" for kind in ("zeros", "ones", "empty", "full") for how in ("new_", "")) | {
    "new_tensor",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "type_as",
}
_NUMBERS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__bool__"})


class StaleReads(TorchFunctionMode):
    """While it is entered: notes which of ``stale`` functions of torch compute with. It looks at every call, so it is
    for a first step, and not for all.

    Args:
        at_times: says of one of them whether it is stale just now; None: all always are.

    Attributes:
        found: their names.
    """

    def __init__(self, stale: Mapping[str, nn.Parameter], at_times: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in stale.items()}
        self._at_times = at_times
        self.found: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = args[:1] if name == "to" else (*args, *(kwargs or {}).values())
        stale = [one for one in _tensors(given) if id(one) in self._names]
        stale = [one for one in stale if self._at_times is None or self._at_times(one)]
        result = func(*args, **(kwargs or {}))
        if stale and name not in _SHAPES and func != _GRADIENT and (name in _NUMBERS or _holds_tensor(result)):
            self.found |= {self._names[id(one)]: None for one in stale}
        return result


_GRADIENT: Any = getattr(Tensor.grad, "__get__", None)


def _holds_tensor(result: Any) -> bool:
    return any(True for _ in _tensors((result,)))


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
