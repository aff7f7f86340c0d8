"""Taking part in the passes of other ranks without a loss of one's own.

Ranks that hold a module in shards gather weights and reduce gradients together, in the order in which a pass goes
through the module's parts. A rank whose ``training_step`` returned None goes through the same parts in the same order
as in its last step with a loss, computes nothing, and brings zeros: what it ran forward already is gone back through
from zeros, and the rest is called with nothing but its weights. The user's code is not run for it, so no random numbers
are drawn and no buffers change.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Call:
    """One call of a part in a forward pass.

    Attributes:
        part: the part's number.
        enters, leaves: whether some of its inputs, and of its outputs, require a gradient.
        enabled: whether gradients were recorded at all.
        went_back: whether the backward pass came to its outputs.
        passes: whether its output is that of the last call within it.
        inner: the calls within it.
        ends: its outputs in the graph with what a gradient of theirs looks like, as long as they may be needed.
    """

    __slots__ = ("enabled", "ends", "enters", "inner", "leaves", "part", "passes", "went_back")

    def __init__(self, part: int, enters: bool, enabled: bool) -> None:
        self.part, self.enters, self.enabled = part, enters, enabled
        self.leaves = self.passes = self.went_back = False
        self.inner: list[Call] = []
        self.ends: list[tuple[GradientEdge, torch.Size, torch.dtype]] = []

    def form(self) -> tuple[Any, ...]:
        """What must be the same on all ranks for their passes to meet."""
        return self.part, self.enters, self.enabled, self.leaves, tuple(one.form() for one in self.inner)

    def state(self, names: Sequence[str]) -> list[Any]:
        """This call and those within it as plain data, with the part by its name."""
        inner = [one.state(names) for one in self.inner]
        return [names[self.part], self.enters, self.enabled, self.leaves, self.passes, self.went_back, inner]

    @classmethod
    def of(cls, state: Any, numbers: Mapping[str, int]) -> Call:
        """The inverse of :meth:`state`.

        Raises:
            ValueError: ``state`` is none that it gives, or of a part that is not in ``numbers``.
        """
        match state:
            case [str(name), bool(enters), bool(enabled), bool(leaves), bool(passes), bool(back), list(inner)]:
                if name not in numbers:
                    raise ValueError(name)
                call = cls(numbers[name], enters, enabled)
                call.leaves, call.passes, call.went_back = leaves, passes, back
                call.inner = [cls.of(one, numbers) for one in inner]
                return call
        raise ValueError(state)


class GoingAlong:
    """Notes what the passes of ``module``, held in shards by FSDP2, go through, and goes through it again without a
    loss.

    Args:
        parts: those of ``module`` that gather their weights by themselves; ``module`` itself is left out.
        device: where passes are made.
        begins: called when the first part of a step is about to gather its weights.

    Attributes:
        parts: those that have parameters of their own; their numbers are their places here.
        layout: names which parts there are and what parameters are each one's, in a few letters.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[Any],
        training_step: StepWithRest,
        device: torch.device,
        begins: Callable[[], None],
    ) -> None:
        self.module, self.device, self._begins = module, device, begins
        self._step = training_step
        training_step.rest = self.rest
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        own = [(part, _own_parameters(part, names)) for part in parts if part is not module]
        self.parts = [part for part, held in own if held]  # with none of its own it gathers nothing
        self._own = [*(held for _, held in own if held), _own_parameters(module, names)]
        self._parameter_names = frozenset(names.values())
        called = {id(one): name for name, one in module.named_modules()}
        self._names = [called[id(part)] for part in self.parts]
        held = [sorted(known for *_, known in own) for own in self._own]
        self.layout = hashlib.sha256(json.dumps([self._names, held]).encode()).hexdigest()[:16]
        self._hooks: list[RemovableHandle] = []
        for number, part in enumerate(self.parts):
            self._hooks += [
                part.register_forward_pre_hook(self._about_to_gather, prepend=True),
                part.register_forward_pre_hook(self._entered(number), with_kwargs=True),
                part.register_forward_hook(self._left),
            ]
        self._forward = self._repeated = self._zeroes = self._over = False
        self._back_within = False  # whether the step takes gradients by itself, whose pass gathers weights, too
        self._calls: list[Call] = []
        self._open: list[Call] = []
        self._order: list[int] = []  # of the parts that the backward pass came to, and left (the complement)
        self._known: list[Call] | None = None  # of the last step with a loss
        self._used: frozenset[str] = frozenset()  # parameters that it gave gradients to
        self._zeroed: list[RemovableHandle] = []
        self._through_last: Any = None  # with what it is called in :meth:`told`, for most passes are like the last
        self._told = ""
        self._ends: list[Any] = []  # what the backward pass without a loss begins at
        self._zeros: list[Tensor] = []

    def close(self) -> None:
        """Take the hooks off the module."""
        self._step.rest = None
        for hook in [*self._hooks, *self._zeroed]:
            hook.remove()

    # -- what a pass goes through -------------------------------------------------------------------------------
    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, of which the calls are noted until :meth:`turns`."""
        self._calls, self._open, self._order = [], [], []
        self._forward, self._repeated, self._over, self._back_within = True, False, False, False
        try:
            yield
        finally:
            self._forward = self._over = False
            self._ends, self._zeros = [], []
            self._let_go()

    def turns(self) -> None:
        """The forward pass has given a loss, and the backward pass begins."""
        self._forward = False
        self._let_go()

    def went(self, used: Iterable[str] | None) -> None:
        """The backward pass is over. ``used``: the parameters that have gradients now, None where that is not known
        before the window's last."""
        if used is not None:
            self._used = frozenset(used)
        repeats_unseen = self._repeated and not all(one.enabled for one in _all(self._calls))
        self._known = None if self._open or repeats_unseen or self._back_within else self._calls
        self._over = True

    def told(self) -> str:
        """What the pass that is over went through, in a few letters."""
        through = [one.form() for one in self._calls], self._order
        if through != self._through_last:
            self._through_last = through
            self._told = hashlib.sha256(repr(through).encode()).hexdigest()[:16]
        return self._told

    # -- from one process to the next ----------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What the last step with a loss went through, as plain data; nothing where that is not known."""
        if self._known is None or not self._used:
            return {}
        calls = [call.state(self._names) for call in self._known]
        return {"layout": self.layout, "calls": calls, "used": sorted(self._used)}

    def load_state_dict(self, state: Any) -> None:
        """Know what :meth:`state_dict` gave on any rank, also in another process. Nothing is known after it where that
        was of a module with other parts or parameters, or is something else altogether."""
        self._known, self._used = None, frozenset()
        match state:
            case {"layout": self.layout, "calls": list(calls), "used": list(used)}:
                if not all(isinstance(name, str) and name in self._parameter_names for name in used):
                    return
                numbers = {name: number for number, name in enumerate(self._names)}
                try:
                    self._known = [Call.of(call, numbers) for call in calls]
                except (ValueError, RecursionError):
                    return
                self._used = frozenset(used)

    def _about_to_gather(self, part: nn.Module, args: Any) -> None:
        if self._forward and not self._calls:
            self._begins()

    def _entered(self, number: int) -> Any:
        def entered(part: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._forward:
                self._repeated = True
                if self._over:  # hooks go forward, which are not called where there is no loss
                    self._known = None
                return
            inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.requires_grad]
            call = Call(number, bool(inputs), torch.is_grad_enabled())
            (self._open[-1].inner if self._open else self._calls).append(call)
            self._open.append(call)
            if inputs and call.enabled:
                self._follow_out(number, inputs[0])

        return entered

    def _left(self, part: nn.Module, args: Any, output: Any) -> None:
        if not self._forward or not self._open:
            return
        call = self._open.pop()
        if not call.enabled:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._follow(call, tensor)
                call.ends.append((get_gradient_edge(tensor), tensor.shape, tensor.dtype))
        within = call.inner[-1].ends if call.inner else []
        call.passes = any(mine[0] == theirs[0] for mine in call.ends for theirs in within)

    def _follow(self, call: Call, output: Tensor) -> None:
        call.leaves, order = True, self._order

        def came(gradient: Tensor) -> None:
            self._back_within = self._back_within or self._forward
            if not call.went_back:
                call.went_back = True
                order.append(call.part)
            if self._zeroes:
                self._bring_zeros(call.part)

        output.register_hook(came)

    def _follow_out(self, number: int, enter: Tensor) -> None:
        """Note when the backward pass leaves a part by what had entered it, and the part reduces its gradients."""
        order = self._order
        enter.register_hook(lambda gradient: order.append(~number))

    def _let_go(self) -> None:
        for call in _all(self._calls):
            call.ends = []

    # -- a pass without a loss ----------------------------------------------------------------------------------
    def begun(self) -> bool:
        """Whether this step gathered any part's weights, or need not."""
        return bool(self._calls) or not self.parts

    def goes(self) -> bool:
        """Whether this step, which returned None, was gone through to its end, so that it can be gone back."""
        return bool(self._ends)

    def _can(self) -> bool:
        """Whether what this step has called so far is how the last one with a loss began."""
        known = self._known
        if known is None or self._open or len(self._calls) > len(known):
            return False
        begun = zip(self._calls, known, strict=False)
        return bool(self._used) and all(mine.form() == theirs.form() for mine, theirs in begun)

    def rest(self) -> Tensor | None:
        """Within the forward pass of a step that returned None: go through what is left of it, for the other ranks
        gather the same weights; None where that is not known. What is returned is to leave with the step's output, as
        a loss does."""
        known, begun = self._known, self._calls
        if not self._forward or known is None or not self._can():
            return None
        if not begun:
            self._begins()
        self._forward = False
        with torch.enable_grad():
            chain = torch.zeros((), device=self.device, requires_grad=True)
            chain, _ = self._through(known[len(begun) :], begun, chain)
            end: Tensor = _Zeros.apply(chain, *self._parameters(-1))
        self._ends, self._zeros = [end], [torch.zeros_like(end)]
        for mine, theirs in zip(begun, known, strict=True):
            if theirs.went_back:
                for edge, shape, dtype in mine.ends:
                    self._ends.append(edge)
                    self._zeros.append(torch.zeros(shape, dtype=dtype, device=self.device))
        return end

    def without_batch(self) -> None:
        """Go through a step as one that returned None before it called any part."""
        self._step.without_batch()

    def go_back(self) -> None:
        """Go back through all of it, from zeros."""
        self._zeroes = True
        try:
            self._bring_zeros(-1)
            torch.autograd.backward(self._ends, self._zeros)
        finally:
            self._zeroes = False
            self._ends, self._zeros = [], []
            for handle in self._zeroed:
                handle.remove()
            self._zeroed = []

    def _through(self, calls: Sequence[Call], noted: list[Call], chain: Tensor) -> tuple[Tensor, Tensor]:
        """Call the parts again that ``calls`` called, as they were called, and note it in ``noted``; what depends on
        all of them, and on the last."""
        end = chain
        for call in calls:
            again = Call(call.part, call.enters, call.enabled)
            again.leaves = call.leaves
            noted.append(again)
            enter = chain if call.enters else torch.zeros((), device=self.device)
            with torch.set_grad_enabled(call.went_back):
                end = _called_for(self.parts[call.part], self._within(call, again), enter)
            if end.requires_grad:
                self._follow(again, end)
                chain = chain + end
        return chain, end

    def _within(self, call: Call, again: Call) -> Any:
        def within(enter: Tensor) -> Tensor:
            if enter.requires_grad and torch.is_grad_enabled():
                self._follow_out(call.part, enter)
            chain: Tensor = _Zeros.apply(enter, *self._parameters(call.part))
            chain, end = self._through(call.inner, again.inner, chain)
            return end if call.passes else chain

        return within

    def _parameters(self, number: int) -> list[nn.Parameter]:
        """Those of a part that had a gradient, as it holds them for its pass."""
        own = self._own[number]
        return [getattr(owner, name) for owner, name, known in own if known in self._used]

    def _bring_zeros(self, number: int) -> None:
        """Let the weights of a part, which are gathered now, get zeros: what this rank computed may not be finite."""
        for owner, name, _ in self._own[number]:
            parameter = getattr(owner, name)
            if parameter.requires_grad:
                self._zeroed.append(parameter.register_hook(torch.zeros_like))


class StepWithRest:
    """``training_step`` of a module that FSDP2 cuts: one that returns None may have more to gather, with the others.

    Attributes:
        rest: does that, within the forward pass; None while nobody has.
    """

    def __init__(self, module: Any, method: str) -> None:
        self.rest: Callable[[], Tensor | None] | None = None
        self._step, self._more = getattr(module, method), False
        signature = inspect.signature(getattr(type(module), method))
        setattr(module, method, self._inner)
        register_fsdp_forward_method(module, method)
        self._gathered = getattr(module, method)

        def outer(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._more = False
            output = self._gathered(*args, **kwargs)
            return output[0] if self._more else output

        outer.__signature__ = signature  # type: ignore[attr-defined]
        setattr(module, method, MethodType(outer, module))

    def without_batch(self) -> None:
        """Do what a step does around the project's own, which is not called."""
        step, self._step = self._step, _no_step
        try:
            self._gathered(None)  # FSDP2 moves what it is given to the GPU, and fails where that is nothing
        finally:
            self._step = step

    def _inner(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step(*args, **kwargs)
        if self.rest is None or not (output is None or (isinstance(output, Mapping) and output.get("loss") is None)):
            return output
        end = self.rest()
        self._more = end is not None
        return (output, end) if self._more else output


def _no_step(_: None) -> None:
    """Stands for a step that has no batch."""


class _Zeros(torch.autograd.Function):
    """The first argument as it is; the others get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, through: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.parameters = parameters
        return through.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *(torch.zeros_like(parameter) for parameter in ctx.parameters)


def zero_loss(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """A loss whose backward pass comes to ``parameters`` in this order and brings each a gradient of zeros."""
    chain = torch.zeros((), device=device, requires_grad=True)
    for parameter in [*parameters][::-1]:
        chain = _Zeros.apply(chain, parameter)
    return chain


def _called_for(part: nn.Module, method: Any, argument: Any) -> Tensor:
    """Call ``method`` as if it were the forward pass of ``part``, whose weights are gathered for it."""
    caller: Any = part
    caller.going_along = method
    try:
        register_fsdp_forward_method(caller, "going_along")
        found: Tensor = caller.going_along(argument)
    finally:
        del caller.going_along
    return found


def _own_parameters(part: nn.Module, names: Mapping[int, str]) -> list[tuple[nn.Module, str, str]]:
    """The parameters that ``part`` gathers, not those of parts within it: their owner, their name there, and what they
    are known as."""
    found, seen, waiting = [], set[int](), [part]
    while waiting:
        owner = waiting.pop()
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((owner, name, names[id(parameter)]))
        waiting += [child for child in owner.children() if not isinstance(child, FSDPModule)]
    return found


def _all(calls: Iterable[Call]) -> Iterator[Call]:
    for call in calls:
        yield call
        yield from _all(call.inner)
