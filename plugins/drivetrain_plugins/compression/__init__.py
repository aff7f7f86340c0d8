"""The built-in compressors as the registry knows them. No torch here: implementations are imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.cli.schema import option
from drivetrain.compressor import CompressorDeclaration
from drivetrain.declaration import Plan
from drivetrain.dependent_options import Dependent


@dataclass(frozen=True)
class CastOptions:
    """Options of the casts.

    Attributes:
        error_feedback: add what rounding took to the next step's gradients.
    """

    error_feedback: bool = True


@dataclass(frozen=True)
class Int8Options:
    """Options of ``int8``.

    Attributes:
        block_size: so many entries share a scale.
        error_feedback: add what rounding took to the next step's gradients.
    """

    block_size: int = option(256, at_least=1)
    error_feedback: bool = True


@dataclass(frozen=True)
class TopKOptions:
    """Options of ``topk``.

    Attributes:
        ratio: part of each bucket's entries that is sent.
        warmup_steps: optimizer steps over which the part sent falls from all to ``ratio``, geometrically.
        error_feedback: add what was not sent to the next step's gradients.
    """

    ratio: float = option(0.01, above=0, at_most=1)
    warmup_steps: int = option(0, at_least=0)
    error_feedback: bool = True


@dataclass(frozen=True)
class PowerSGDOptions:
    """Options of ``powersgd``.

    Attributes:
        rank: of the approximation; at most the smaller side of a matrix is used.
        min_compression_rate: matrices are sent whole where their factors are not this many times smaller; so are
            vectors.
        warmup_steps: optimizer steps before anything is compressed.
        error_feedback: add what the approximation lacks to the next step's gradients.
    """

    rank: int = option(2, at_least=1)
    min_compression_rate: float = option(1.0, at_least=0)
    warmup_steps: int = option(0, at_least=0)
    error_feedback: bool = True


def _leaves_out(plan: Plan, own: Mapping[str, Any]) -> bool:
    return bool(own["ratio"] < 1)


_CASTING = "drivetrain_plugins.compression.casting"
_SMALL = "largest difference per step half a unit in the last place of the format, made up for in later steps"

NONE = CompressorDeclaration(
    name="none", summary="gradients travel as they are", implementation=None, exact_with={}, fidelity="exact"
)
FP16 = CompressorDeclaration(
    name="fp16",
    summary="gradients are rounded to fp16 and summed in it",
    implementation=f"{_CASTING}:Fp16",
    options=CastOptions,
    fidelity=_SMALL,
)
BF16 = CompressorDeclaration(
    name="bf16",
    summary="gradients are rounded to bfloat16 and summed in it",
    implementation=f"{_CASTING}:Bf16",
    options=CastOptions,
    fidelity=_SMALL,
)
INT8 = CompressorDeclaration(
    name="int8",
    summary="one byte an entry and a scale for each block; gathered by all ranks",
    implementation="drivetrain_plugins.compression.int8:Int8",
    options=Int8Options,
    transport="all_gather",
    fidelity="1/254 of a block's largest entry per step, made up for in later steps",
)
TOPK = CompressorDeclaration(
    name="topk",
    summary="the largest entries of each bucket only; gathered by all ranks",
    implementation="drivetrain_plugins.compression.topk:TopK",
    options=TopKOptions,
    transport="all_gather",
    fidelity="the sum of all gradients, each entry late",
    exact_with={"ratio": 1.0},
    dependents=tuple(Dependent(option, {".ratio": 0.01}, _leaves_out) for option in ("warmup_steps", "error_feedback")),
)
POWERSGD = CompressorDeclaration(
    name="powersgd",
    summary="a low-rank approximation of each matrix",
    implementation="drivetrain_plugins.compression.powersgd:PowerSGD",
    options=PowerSGDOptions,
    fidelity="the sum of all gradients, each direction late",
    # The factors of a matrix of full rank are larger than the matrix: it is then sent whole.
    exact_with={"rank": 2**20},
)
