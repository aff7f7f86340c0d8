"""Compressor: how gradients are made smaller before they travel. The contract, and what a compressor says of itself.

No torch is imported here: the declaration is read before launch and by ``--help``, implementations are imported in
workers only. A strategy that averages gradients in buckets composes a compressor with its topology: the strategy gives
the :class:`Transport`, the compressor says what goes over it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from drivetrain import registry
from drivetrain.cli.schema import checked
from drivetrain.declaration import Conflict, NoOptions, Plan
from drivetrain.dependent_options import Dependent
from drivetrain.errors import ConfigurationError
from drivetrain.late_import import drawing_nothing

if TYPE_CHECKING:
    import torch

NONE = "none"  # the name under which nothing is compressed


@dataclass(frozen=True)
class CompressorDeclaration:
    """A compressor as the registry (``drivetrain.compressors``) knows it.

    Attributes:
        name: what the user writes.
        summary: one line for ``--help`` and the docs.
        implementation: ``"module:Class"`` of the :class:`Compressor`, called with the options; None for no compression.
        options: torch-free dataclass of the options with their defaults.
        transport: what its payloads can travel by: ``"all_reduce"`` where they may be summed on the way,
            ``"all_gather"`` where every rank must read every other's.
        fidelity: what is kept of the gradients, in words.
        exact_with: options under which nothing is lost (``{}``: the defaults); None: something always is.
        check: conflicts found from a :class:`~drivetrain.declaration.Plan` without torch.
        dependents: options that have an effect in some runs only, of which is told who sets them in vain.
    """

    name: str
    summary: str
    implementation: str | None
    options: type = NoOptions
    transport: Literal["all_reduce", "all_gather"] = "all_reduce"
    fidelity: str = "exact"
    exact_with: Mapping[str, Any] | None = None
    check: Callable[[Plan], list[Conflict]] = lambda plan: []
    dependents: tuple[Dependent, ...] = ()

    def preload(self) -> type[Compressor] | None:
        """Import the implementation."""
        if self.implementation is None:
            return None
        module, _, name = self.implementation.partition(":")
        with drawing_nothing():
            return getattr(importlib.import_module(module), name)

    def build(self, options: Any) -> Compressor | None:
        """Import the implementation and return a compressor that has ``options``."""
        implementation = self.preload()
        return None if implementation is None else implementation(options)


class Transport(Protocol):
    """What a strategy lets a compressor send by; a :class:`~drivetrain.comm.communicator.Communicator` is one."""

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the flat ``tensor`` by its sum over the ranks, rounded in its own dtype; returns it."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks in rank order; equal in shape and dtype on all."""


class Memory(Protocol):
    """What is kept from one step to the next, by parameter. Nothing counts before the optimizer stepped: after a
    skipped step (an overflow, a window without a loss) everything is as it was."""

    def get(self, kind: str, name: str) -> torch.Tensor | None:
        """What was last put; None where nothing was."""

    def put(self, kind: str, name: str, value: torch.Tensor) -> None:
        """Keep ``value``; whoever calls must not change it any more."""


class Segment(NamedTuple):
    """Where the gradient of one parameter lies in a bucket.

    Attributes:
        name: of the parameter in the user's module.
        start, stop: its elements in the flat bucket.
        shape: the parameter's.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Bucket(NamedTuple):
    """What is to be averaged.

    Attributes:
        flat: this rank's part: its gradients plus what it still owes, fp32 or fp64, one-dimensional. A compressor
            must leave it as it is.
        segments: the parameters in it. Elements of no segment are zero.
        step: optimizer steps taken so far.
        memory: the compressor's own memory, alike on all ranks.
    """

    flat: torch.Tensor
    segments: tuple[Segment, ...]
    step: int
    memory: Memory


class Averaged(NamedTuple):
    """What came of a bucket.

    Attributes:
        mean: the mean over ranks of what they sent, with the same bits on all ranks.
        sent: what of this rank's bucket the others got; what is missing, ``flat - sent``, is owed. Without error
            feedback it is lost.
    """

    mean: torch.Tensor
    sent: torch.Tensor


class Compressor:
    """Base class. Elements that are not finite must make ``mean`` not finite on every rank, or a step that overflowed
    on one rank would be taken by the others.

    Attributes:
        options: the declared options.
        error_feedback: whether what was not sent is added to the next step's gradients (Karimireddy et al., "Error
            Feedback Fixes SignSGD", 2019).
    """

    def __init__(self, options: Any) -> None:
        self.options = options
        self.error_feedback: bool = getattr(options, "error_feedback", False)

    def average(self, bucket: Bucket, transport: Transport) -> Averaged:
        """Send ``bucket`` in fewer bytes and return the mean. All ranks call it with buckets of one layout, in one
        order."""
        raise NotImplementedError


def compression_of(compression: Any) -> tuple[CompressorDeclaration, Any]:
    """The compressor of that name, or of a mapping's ``name``, and its options; checked as those of a config are."""
    options: dict[str, Any] = {}
    if isinstance(compression, Mapping):
        options = {str(key): value for key, value in compression.items() if key != "name"}
        compression = compression.get("name")
        if compression is None:
            raise ConfigurationError("compression needs a name: pass a string, or a dict with 'name' and options.")
    declaration = registry.load("compressors", NONE if compression is None else str(compression))
    if not isinstance(declaration, CompressorDeclaration):
        raise ConfigurationError(
            f"compressor {str(compression)!r} is registered as a {type(declaration).__name__}: its package must"
            " register a drivetrain.compressor.CompressorDeclaration."
        )
    return declaration, checked(declaration.options, options, "compression")
