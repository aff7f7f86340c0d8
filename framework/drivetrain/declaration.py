"""What a strategy says of itself before anything starts. Plain data, no torch.

A strategy is registered as a :class:`Declaration`: its options, what it supports and where its implementation
lives. Everything that must know a strategy's abilities (the check before launch, the tests, the docs) reads the
declaration; nothing asks for a strategy's name or class.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain import registry
from drivetrain.dependent_options import Dependent
from drivetrain.errors import ConfigurationError
from drivetrain.late_import import drawing_nothing

ALL_PRECISIONS = frozenset({"32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"})
ANY_COMPRESSOR = frozenset({"*"})  # a stranger's compressor too


@dataclass(frozen=True)
class Plan:
    """What the user asks for, as far as it is known without torch; ``None`` means not known yet.

    Attributes:
        strategy: registered name.
        options: the strategy's options dataclass, filled in.
        world_size: number of workers on all nodes.
        num_nodes: number of nodes.
        accelerator: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        precision: registered name, for example ``"bf16-mixed"``.
        accumulation: micro-batches per optimizer step.
        clip_value: bound of the gradient's norm or of its entries, ``None`` for no clipping.
        clip_algorithm: ``"norm"`` or ``"value"``.
        compile: whether ``torch.compile`` is asked for.
        batch: ``"global"`` or ``"per_process"``.
        val_check_interval: batches between validations, or a fraction of an epoch.
        check_val_every_n_epoch: epochs between validations; ``None`` counts the interval over epochs.
        automatic_optimization: whether the loop steps the optimizer (``False``: the module does).
        optimizers: number of optimizers that the module configured.
        closures: whether an optimizer calls its closure several times a step (LBFGS).
        stages: which of ``"fit"``, ``"validate"``, ``"test"``, ``"predict"`` will run.
        compression: registered name of what makes the gradients smaller.
        compression_options: its options dataclass, filled in; ``None`` for the defaults.
        arguments: the Trainer's arguments by name, and a command's own, as they were given; what is not here is not
            known.
    """

    strategy: str
    options: Any = None
    world_size: int = 1
    num_nodes: int = 1
    accelerator: str = "cpu"
    backend: str = "gloo"
    precision: str = "32-true"
    accumulation: int = 1
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    compile: bool = False
    batch: str = "global"
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    automatic_optimization: bool | None = None
    optimizers: int | None = None
    closures: bool | None = None
    stages: tuple[str, ...] = ("fit",)
    compression: str = "none"
    compression_options: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conflict:
    """One thing that does not go together and the way out, as one sentence."""

    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Support:
    """The abilities of a strategy.

    Attributes:
        fidelity: ``"exact"`` when a run equals ``single``'s, else what is kept, in words.
        exact_with: the options under which a run equals ``single``'s (``{}``: the defaults); ``None``: it never does.
        tolerance: largest difference of an exact run's losses and weights from ``single``'s, in the highest precision
            that the strategy takes.
        precisions: registered precision names it takes.
        accelerators: devices it runs on.
        clipping: subset of ``{"norm", "value"}``.
        accumulation: whether several micro-batches may share an optimizer step.
        manual_optimization: whether modules may step their optimizers themselves.
        several_optimizers: whether more than one optimizer may be configured.
        closures: whether optimizers that re-evaluate the loss (LBFGS) work.
        compile: whether ``torch.compile`` works under it.
        min_world_size: fewest workers it makes sense with.
        max_world_size: most workers it can use, ``None`` for any number.
        stages: what it can run besides ``"fit"``.
        compressors: registered names of the compressors that its gradients can go through; :data:`ANY_COMPRESSOR`
            where it does not matter which.
        thaws: whether parameters may be frozen and thawed, and join an optimizer, while training runs.
        editable: whether every rank's module holds whole weights, which a callback may read and replace between steps.
        replicated: whether every rank has the whole state by itself between two steps, so that one can save it alone
            and all can put it back without a word to each other.
        rounds: whether an epoch is one global step, a round of many local ones.
        divides: whether the module itself is divided among the ranks, so that no rank can run its forward alone.
        explains: patterns of errors that a project's own code meets because of how the strategy holds its module, each
            with what is so and the way out, in words.
    """

    fidelity: str = "exact"
    exact_with: Mapping[str, Any] | None = field(default_factory=dict)
    tolerance: float = 1e-10
    precisions: frozenset[str] = ALL_PRECISIONS
    accelerators: frozenset[str] = frozenset({"cpu", "cuda"})
    clipping: frozenset[str] = frozenset({"norm", "value"})
    accumulation: bool = True
    manual_optimization: bool = True
    several_optimizers: bool = True
    closures: bool = True
    compile: bool = True
    min_world_size: int = 1
    max_world_size: int | None = None
    stages: frozenset[str] = frozenset({"fit", "validate", "test", "predict"})
    compressors: frozenset[str] = frozenset()
    thaws: bool = False
    editable: bool = False
    replicated: bool = False
    rounds: bool = False
    divides: bool = False
    explains: Mapping[str, str] = field(default_factory=dict)

    def compresses(self, name: str) -> bool:
        """Whether gradients can go through the compressor ``name``; without one they always can."""
        return name == "none" or self.compressors == ANY_COMPRESSOR or name in self.compressors


@dataclass(frozen=True)
class NoOptions:
    """Options of a strategy that has none."""


@dataclass(frozen=True)
class Variant:
    """Another algorithm under a strategy's name, which options choose; tests over the registry run it as well.

    Attributes:
        options: the fewest options that choose it.
        implementation: as that of a :class:`Declaration`.
        chosen: whether the filled-in options ask for it.
    """

    options: Mapping[str, Any]
    implementation: str
    chosen: Callable[[Any], bool]


def no_conflicts(plan: Plan) -> list[Conflict]:
    """The check of a declaration that has none. It has a name, so that a Trainer can be pickled."""
    return []


@dataclass(frozen=True)
class Declaration:
    """A strategy as the registry knows it.

    Attributes:
        name: what the user writes.
        summary: one line for ``--help`` and the docs.
        implementation: ``"module:Class"`` of the :class:`drivetrain.strategy.Strategy`; imported in workers only.
        options: torch-free dataclass of the options with their defaults.
        support: the abilities.
        check: more conflicts, found from a :class:`Plan` without torch.
        preset_of: registered name of a strategy of the same implementation from which this one differs in nothing but
            the value of an option that has tests of its own, so that tests over all strategies may let that one stand
            for both; ``None``: none does.
        variants: by a word of their own, what options choose in place of ``implementation``.
        dependents: options that have an effect in some runs only, of which is told who sets them in vain.
    """

    name: str
    summary: str
    implementation: str
    options: type = NoOptions
    support: Support = field(default_factory=Support)
    check: Callable[[Plan], list[Conflict]] = no_conflicts
    preset_of: str | None = None
    variants: Mapping[str, Variant] = field(default_factory=dict)
    dependents: tuple[Dependent, ...] = ()

    def implementation_for(self, options: Any) -> str:
        """``"module:Class"`` of what runs under ``options``."""
        chosen = (one.implementation for one in self.variants.values() if one.chosen(options))
        return next(chosen, self.implementation)

    def build(self, options: Any) -> Any:
        """Import the implementation and return a strategy that has ``options``."""
        module, _, name = self.implementation_for(options).partition(":")
        with drawing_nothing():
            found = importlib.import_module(module)
        return getattr(found, name)(options, self.support)


def conflicts(plan: Plan, declaration: Declaration) -> list[Conflict]:
    """Everything in ``plan`` that the declared strategy does not do, each as a sentence with the way out."""
    able, name, found = declaration.support, plan.strategy, []

    def need(condition: bool, what: str) -> None:
        if not condition:
            found.append(Conflict(what))

    def choices(values: frozenset[str]) -> str:
        return ", ".join(sorted(values)) or "none"

    need(
        plan.precision in able.precisions,
        f"strategy={name} cannot train in precision={plan.precision}: use one of {choices(able.precisions)}.",
    )
    need(
        plan.accelerator in able.accelerators,
        f"strategy={name} does not run on {plan.accelerator}: use accelerator={choices(able.accelerators)}.",
    )
    need(
        plan.clip_value is None or plan.clip_algorithm in able.clipping,
        f"strategy={name} cannot clip gradients by {plan.clip_algorithm}: use {choices(able.clipping)}"
        " or set gradient_clip_val=null.",
    )
    need(
        plan.accumulation == 1 or able.accumulation,
        f"strategy={name} cannot accumulate gradients: set accumulate_grad_batches=1.",
    )
    need(not plan.compile or able.compile, f"strategy={name} does not work with compile=true: set compile=false.")
    need(
        plan.world_size >= able.min_world_size,
        f"strategy={name} needs at least {able.min_world_size} workers, devices gives {plan.world_size}:"
        f" set devices={able.min_world_size} or use strategy=single.",
    )
    need(
        able.max_world_size is None or plan.world_size <= able.max_world_size,
        f"strategy={name} uses {able.max_world_size} worker, devices gives {plan.world_size}:"
        f" set devices={able.max_world_size} or use strategy=ddp.",
    )
    need(
        plan.automatic_optimization is not False or able.manual_optimization,
        f"strategy={name} cannot train a module with automatic_optimization=False: use strategy=ddp.",
    )
    need(
        plan.automatic_optimization is not False or plan.accumulation == 1 or "fit" not in plan.stages,
        f"accumulate_grad_batches={plan.accumulation} needs automatic optimisation: a module that steps its optimizers"
        " itself can do so every so many batches.",
    )
    need(
        (plan.optimizers or 1) <= 1 or able.several_optimizers,
        f"strategy={name} takes one optimizer, the module configures {plan.optimizers}: use strategy=ddp.",
    )
    need(
        not plan.closures or able.closures,
        f"strategy={name} cannot run an optimizer that evaluates its closure several times (LBFGS): use strategy=ddp.",
    )
    need(
        not (plan.closures and plan.precision == "16-mixed"),
        "LBFGS does not go with the loss scaling of precision=16-mixed: use precision=bf16-mixed or 32-true.",
    )
    only = f" or one of {choices(able.compressors)}" if able.compressors else ""
    need(
        able.compresses(plan.compression),
        f"strategy={name} cannot send gradients through compression={plan.compression}: set compression=none{only},"
        " or use strategy=ddp.",
    )
    need(
        not plan.closures or plan.compression == "none",
        f"compression={plan.compression} gives every evaluation of LBFGS's closure another gradient of the same"
        " weights: set compression=none or use another optimizer.",
    )
    every = "a number of rounds with check_val_every_n_epoch=null"
    need(
        not able.rounds or plan.check_val_every_n_epoch is None or plan.val_check_interval in (1, 1.0),
        f"strategy={name} cannot validate within a round, which is its whole epoch: leave out"
        f" val_check_interval={plan.val_check_interval}, or set it to {every}.",
    )
    if plan.compression != "none":
        found += registry.load("compressors", plan.compression).check(plan)
    for stage in plan.stages:
        need(stage in able.stages, f"strategy={name} cannot {stage}: use strategy=single for it.")
    return [*found, *declaration.check(plan)]


def refuse(plan: Plan, declaration: Declaration) -> None:
    """Raise :class:`ConfigurationError` when ``plan`` holds something the strategy does not do."""
    found = conflicts(plan, declaration)
    if found:
        raise ConfigurationError("\n".join(str(conflict) for conflict in found))
