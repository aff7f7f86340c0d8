"""Schedules of torch.distributed.pipelining for pieces of any size, each built once.

A stage of torch's holds buffers of fixed shapes. Here there is one for each shape of piece, made when the shape is met
first, and what the stages send each other is worked out on every rank from the shapes alone: nothing is exchanged
for it (torch would send pickles).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.func import functional_call
from torch.utils import _pytree as pytree

from drivetrain.errors import TrainingError
from drivetrain.sharding import take
from drivetrain_plugins.strategies.declared.pipeline import PipelineOptions, interleaves
from drivetrain_plugins.strategies.pipeline_capture import Call

_NO_OUTPUTS = {"return_outputs": False} if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters else {}


def runs(total: int, microbatches: int) -> list[tuple[int, int]]:
    """``total`` samples as runs of ``(pieces, samples in each)``: at most ``microbatches`` pieces in all, of equal size
    but for a smaller last one, which is a run of its own."""
    size = -(-total // microbatches)
    whole, rest = divmod(total, size)
    return [(whole, size)] + ([(1, rest)] if rest else [])


def signature(batch: Any) -> Hashable:
    """Shapes and dtypes of all tensors in ``batch``: what the shapes within the network follow from."""
    leaves, form = pytree.tree_flatten(batch)
    return str(form), tuple(
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
    )


@dataclass(frozen=True)
class _Built:
    """A schedule, what the network is called with under it, and what this rank sends in a training run of it."""

    schedule: Any
    shapes: list[Any]
    bytes_sent: int
    messages: int


class Schedules:
    """Runs pieces of a batch through the stages.

    Args:
        stages: all stages of the network, in order.
        mine: the indices of those on this rank.
        options: the pipeline's.
        group: the ranks of the pipeline.
        device: where this rank computes.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mine: list[int],
        options: PipelineOptions,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages, self.mine, self.options, self.group, self.device = stages, mine, options, group, device
        self.ranks = group.size()
        self.first = 0 in mine
        self.last = len(stages) - 1 in mine
        self.bytes_sent = self.messages = 0  # while training
        self._built: dict[Hashable, _Built] = {}
        self._loss: Callable[[Tensor, int], Tensor] | None = None

    def run(
        self,
        batch: Any,
        rows: slice,
        pieces: int,
        record: Callable[[Any, int], Call],
        loss: Callable[[Tensor, int], Tensor] | None,
        total: int,
    ) -> Any:
        """Run ``rows`` of ``batch`` through the pipeline in ``pieces`` equal pieces.

        Args:
            record: what the network is called with for a piece of the batch, which has a number.
            loss: on the last rank called with each piece's output and number; gives what backward starts from. None
                for a forward pass without backward.
            total: samples in ``batch``.

        Returns:
            The output for ``rows`` on the last rank where there is no ``loss``, else None.
        """
        size = (rows.stop - rows.start) // pieces
        parts = [take(batch, total, slice(rows.start + i * size, rows.start + (i + 1) * size)) for i in range(pieces)]
        key = (pieces, loss is None, torch.is_inference_mode_enabled(), size, signature(parts[0]))
        calls: list[Call] = []
        if self.first or key not in self._built:
            calls = [record(part, number) for number, part in enumerate(parts if self.first else parts[:1])]
        if key not in self._built:
            self._built[key] = self._build(calls[0], pieces, loss is not None)
        built = self._built[key]
        args: tuple[Tensor, ...] = ()
        kwargs: dict[str, Tensor] = {}
        if self.first:
            for call in calls:
                if _shapes(call) != built.shapes:
                    raise TrainingError(
                        f"the network is called with {_shapes(call)} for a batch like one before that gave"
                        f" {built.shapes}: under a pipeline equal batches must give equal shapes."
                    )
            args = tuple(torch.cat(column) for column in zip(*(call.args for call in calls), strict=True))
            kwargs = {name: torch.cat([call.kwargs[name] for call in calls]) for name in calls[0].kwargs}
        self._loss = loss
        try:
            if loss is None:
                return built.schedule.step(*args, **kwargs)
            target = {"target": torch.arange(pieces)} if self.last else {}
            built.schedule.step(*args, **kwargs, **target, **_NO_OUTPUTS)
            self.bytes_sent += built.bytes_sent
            self.messages += built.messages
            return None
        except RuntimeError as error:
            # torch wraps what a stage raises into a list of shapes.
            if "failed to run forward" in str(error) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        finally:
            self._loss = None

    def _start(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, int(target))

    def _build(self, call: Call, pieces: int, trains: bool) -> _Built:
        between = self._between(call, trains)
        stages: list[Any] = [
            PipelineStage(
                self.stages[i],
                i,
                len(self.stages),
                self.device,
                input_args=between[i],
                output_args=between[i + 1],
                group=self.group,
            )
            for i in self.mine
        ]
        loss = self._start if trains else None
        kind = self.options.schedule
        if len(stages) > 1:
            looped = kind == "interleaved_1f1b" and trains and interleaves(pieces, self.ranks)
            several = ScheduleInterleaved1F1B if looped else ScheduleLoopedBFS
            schedule: Any = several(stages, pieces, loss_fn=loss, scale_grads=False)
        else:
            flush = kind != "gpipe" and trains and pieces >= len(self.stages)
            one = Schedule1F1B if flush else ScheduleGPipe
            schedule = one(stages[0], pieces, loss_fn=loss, scale_grads=False)
        outputs = [value for i in self.mine if i < len(self.stages) - 1 for value in between[i + 1]]
        gradients = [value for i in self.mine if i > 0 for value in between[i] if value.requires_grad]
        sent = [value.numel() * value.element_size() for value in (*outputs, *gradients)]
        return _Built(schedule, _shapes(call), pieces * sum(sent), pieces * len(sent))

    def _between(self, call: Call, trains: bool) -> list[tuple[Tensor, ...]]:
        """What flows into each stage and out of the last, as tensors without data."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.inference_mode(False), torch.enable_grad() if trains else torch.no_grad():
            args: Any = tuple(self._fake(value) for value in call.args)
            kwargs = {name: self._fake(value) for name, value in call.kwargs.items()}
            between = [args]
            for stage in self.stages:
                # Weights of other ranks' stages may be elsewhere than on this rank's device.
                state = {name: self._fake(p).requires_grad_(p.requires_grad) for name, p in stage.named_parameters()}
                state |= {name: self._fake(b) for name, b in stage.named_buffers()}
                output = functional_call(stage, state, args, kwargs)
                args, kwargs = output if isinstance(output, tuple) else (output,), {}
                between.append(args)
        return [tuple(_empty(value) for value in values) for values in between]

    def _fake(self, value: Tensor) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device=self.device)


def _empty(value: Tensor) -> Tensor:
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return meta.requires_grad_(value.requires_grad)


def _shapes(call: Call) -> list[Any]:
    named = [*enumerate(call.args), *call.kwargs.items()]
    return [(name, tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in named]
