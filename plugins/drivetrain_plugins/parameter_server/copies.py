"""A worker's copies of the servers' parameters: gradients are gathered for a push, weights are taken from an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from drivetrain_plugins.parameter_server.fingerprint import fingerprint, same
from drivetrain_plugins.parameter_server.layout import Layout
from drivetrain_plugins.parameter_server.pieces import Piece
from drivetrain_plugins.parameter_server.window import Window
from drivetrain_plugins.parameter_server.wire import Message


class Copies:
    """The parameters of the module here, as pieces that servers hold.

    Gradients go into memory that is there once for each server: shared with it, or else this worker's own, pinned where
    the parameters are on a GPU. It may be written again when the server has answered the push.

    Args:
        rank: of this worker among the workers.
        parameters: by name.
        held: what each server holds, by its key.
        layouts: of that in messages.
        windows: memory shared with each server, None for none.
        looks: whether this worker will ask if weights were :meth:`changed`.
        at_rest: whether servers' weights stay as they are until this worker asks for a step (``sync``).
    """

    def __init__(
        self,
        rank: int,
        parameters: Mapping[str, Tensor],
        held: Sequence[Mapping[str, Piece]],
        layouts: Sequence[Layout],
        windows: Sequence[Window | None],
        looks: bool,
        at_rest: bool,
    ) -> None:
        self.rank, self.parameters, self.held, self.layouts, self.windows = rank, parameters, held, layouts, windows
        self.device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.looks = looks
        self.buffers = [self._buffer(*pair) for pair in zip(layouts, windows, strict=True)]
        self.known: Tensor | None = None  # fingerprint of the weights as they came
        on_host = at_rest and self.device.type == "cpu"
        self.originals = [window.areas[-1] for window in windows if window is not None] if on_host else []

    def _buffer(self, layout: Layout, window: Window | None) -> list[Tensor]:
        if window is None:
            pinned = self.device.type == "cuda"
            return [torch.empty(count, dtype=dtype, pin_memory=pinned) for dtype, count in layout.sizes]
        window.pin((self.rank, len(window.areas) - 1), self.device)
        return window.areas[self.rank]

    # -- gradients ----------------------------------------------------------------------------------------------
    def push(self, number: int) -> tuple[list[Tensor], int | None]:
        """This worker's gradients for server ``number``, and the area that they lie in, if any."""
        gradients = self._gradients(number)
        self.layouts[number].fill(self.buffers[number], gradients)
        self.settle()
        return self.buffers[number], self.rank if self.windows[number] is not None else None

    def gradients(self, number: int) -> list[Tensor]:
        """The same in new memory."""
        return self.layouts[number].flatten(self._gradients(number))

    def present(self, number: int) -> list[bool]:
        """Which of the server's parameters have a gradient here, in the layout's order."""
        held = self.held[number]
        return [self.parameters[held[key].name].grad is not None for key in self.layouts[number].names]

    def _gradients(self, number: int) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for key, piece in self.held[number].items():
            gradient = self.parameters[piece.name].grad
            found[key] = None if gradient is None else piece.of(gradient)
        return found

    def take_gradients(self, answers: Sequence[Message]) -> None:
        """Hold the gradients that the servers sent; none where they have none."""
        whole: dict[str, Tensor] = {}
        for layout, held, answer in zip(self.layouts, self.held, answers, strict=True):
            values = layout.split(answer.tensors)
            for key, there in zip(layout.names, answer.fields["present"], strict=True):
                if there:
                    p = self.parameters[held[key].name]
                    part = whole.setdefault(held[key].name, torch.empty(p.shape, dtype=p.dtype, device=p.device))
                    held[key].of(part).copy_(values[key], non_blocking=p.is_cuda)
        for name, p in self.parameters.items():
            p.grad = whole.get(name)
        self.settle()

    # -- weights ------------------------------------------------------------------------------------------------
    def weights(self, number: int) -> list[Tensor]:
        """The weights here, for server ``number``."""
        held = self.held[number]
        return self.layouts[number].flatten({k: p.of(self.parameters[p.name].detach()) for k, p in held.items()})

    def take(self, answers: Sequence[Message]) -> None:
        """Hold the weights that the servers sent. From a GPU's side the copies may still be under way: what writes to
        their memory again waits for this worker's next push, which comes after them on the same stream."""
        with torch.no_grad():
            for layout, held, answer in zip(self.layouts, self.held, answers, strict=True):
                for key, value in layout.split(answer.tensors).items():
                    p = self.parameters[held[key].name].detach()
                    held[key].of(p).copy_(value, non_blocking=p.is_cuda)
        self.remember()

    def remember(self) -> None:
        """Know the weights of now from changed ones."""
        if self.looks and not self._sees_originals():
            self.known = fingerprint(self.parameters.values())

    def changed(self) -> bool:
        """Whether weights are others than the servers'."""
        if self._sees_originals():
            return not all(self._equal(number) for number in range(len(self.held)))
        return self.known is None or not torch.equal(fingerprint(self.parameters.values()), self.known)

    def _sees_originals(self) -> bool:
        return len(self.originals) == len(self.held)

    def _equal(self, number: int) -> bool:
        held = self.held[number]
        views = self.layouts[number].split(self.originals[number])
        return all(same(p.of(self.parameters[p.name].detach()), views[key]) for key, p in held.items())

    def settle(self) -> None:
        """Wait for copies that are under way."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Let go of all memory that is shared."""
        self.settle()
        self.buffers, self.windows, self.originals = [], [], []
