"""Cutting a network into consecutive stages that take about as long as each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError

METHOD = "pipeline_stages"


class Stage(nn.Module):
    """Consecutive blocks of the network, applied one after another under the precision's context.

    A schedule runs backward passes among the forward ones, so the context is entered here and not around all of it.
    """

    def __init__(self, blocks: Sequence[nn.Module], context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.context():
            for block in self.blocks:
                output = block(*args, **kwargs)
                args, kwargs = output if isinstance(output, tuple) else (output,), {}
        # What is sent must lie in memory as the receiver's buffer does.
        return tuple(part.contiguous() for part in output) if isinstance(output, tuple) else output.contiguous()


def find_network(module: nn.Module, path: str | None) -> tuple[str, nn.Module]:
    """The sub-module that is cut and its path: the one named, else ``module`` itself (``""``) where it gives its own
    ``pipeline_stages``, else the one child that has parameters.

    Raises:
        ConfigurationError: there is no such, there are several, or parameters lie outside of it.
    """
    kind = type(module).__name__
    if path is None and hasattr(module, METHOD):
        return "", module
    if path is None:
        owners = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
        if len(owners) != 1:
            found = ", ".join(owners) or "none"
            raise ConfigurationError(
                f"{kind} has {len(owners)} children with parameters ({found}) and a pipeline cuts one network: hold all"
                f" of them in one network, or define {METHOD}(self) in {kind} and call self(...) in its steps."
            )
        path = owners[0]
    try:
        network = module.get_submodule(path)
    except AttributeError:
        raise ConfigurationError(
            f"strategy.network={path}: {kind} has no such sub-module; its children are"
            f" {', '.join(name for name, _ in module.named_children()) or 'none'}."
        ) from None
    inside = {id(p) for p in network.parameters()}
    outside = [name for name, p in module.named_parameters() if id(p) not in inside]
    if outside:
        raise ConfigurationError(
            f"{kind} has parameters outside of its network {path} ({', '.join(outside[:5])}), which no stage of a"
            f" pipeline would hold: move them into {path}."
        )
    return path, network


def blocks_of(path: str, network: nn.Module) -> list[nn.Module]:
    """The modules that give the network's forward when they are applied one after another.

    Raises:
        ConfigurationError: the network has no such order, or the blocks miss some of its parameters.
    """
    if hasattr(network, METHOD):
        blocks = list(network.pipeline_stages())  # type: ignore[operator]
        strangers = [b for b in blocks if not isinstance(b, nn.Module)]
        if not blocks or strangers:
            raise ConfigurationError(
                f"{type(network).__name__}.{METHOD}() must return a list of modules that give its forward one after"
                f" another; it has {type(strangers[0]).__name__ + ' in it' if strangers else 'none'}."
            )
    elif isinstance(network, nn.Sequential):
        blocks = _flat(network)
    else:
        raise ConfigurationError(
            f"a pipeline does not know where to cut {path}, a {type(network).__name__}: make it an nn.Sequential"
            f" or define {METHOD}(self), which returns the list of modules that give its forward one after another."
        )
    held = {id(p) for block in blocks for p in block.parameters()}
    missing = [name for name, p in network.named_parameters() if id(p) not in held]
    if missing:
        raise ConfigurationError(
            f"{type(network).__name__}.{METHOD}() misses the parameters {', '.join(missing[:5])}: every parameter of"
            f" {path or 'the module'} must be in one of the modules that it returns."
        )
    return blocks


def _flat(network: nn.Sequential) -> list[nn.Module]:
    """The modules of a Sequential, those of Sequentials within it one by one."""
    blocks: list[nn.Module] = []
    for child in network:
        blocks += _flat(child) if type(child) is nn.Sequential else [child]
    return blocks


def balance(costs: Sequence[int], parts: int) -> list[range]:
    """Cut ``costs`` into ``parts`` consecutive non-empty ranges with the smallest possible largest sum.

    The classic linear partition by dynamic programming, O(n^2 * parts); of equally good cuts the one that is more even
    (smaller sum of squares) is taken.
    """
    n = len(costs)
    if not 1 <= parts <= n:
        raise ValueError(f"{n} costs cannot be cut into {parts} non-empty ranges")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[tuple[int, int, tuple[int, ...]]] = [(sums[i], sums[i] ** 2, ()) for i in range(n + 1)]
    for part in range(2, parts + 1):
        following = list(best)
        for end in range(part, n + 1):
            options = []
            for cut in range(part - 1, end):
                last = sums[end] - sums[cut]
                largest, squares, cuts = best[cut]
                options.append((max(largest, last), squares + last**2, (*cuts, cut)))
            following[end] = min(options)
        best = following
    edges = [0, *best[n][2], n]
    return [range(a, b) for a, b in pairwise(edges)]


def cost(block: nn.Module) -> int:
    """How long ``block`` takes, relative to others: the number of parameters that every sample is multiplied by, which
    for linear layers is half of their operations. Embeddings are looked up, so theirs take next to no time; a weight
    that an embedding shares with a layer of another kind counts there."""
    lookups = (nn.Embedding, nn.EmbeddingBag)
    owners = [one for one in block.modules() if not isinstance(one, lookups)]
    return sum({id(p): p.numel() for one in owners for p in one.parameters(recurse=False)}.values())


def cut(
    path: str, network: nn.Module, stages: int, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[Stage]:
    """The network's stages, in order; their forward passes run in ``context()``.

    Raises:
        ConfigurationError: the network cannot be cut, or has fewer blocks than ``stages``.
    """
    blocks = blocks_of(path, network)
    if len(blocks) < stages:
        name = path or type(network).__name__
        raise ConfigurationError(
            f"a pipeline on these workers needs {stages} stages and {name} has {len(blocks)} blocks: use at most"
            f" {len(blocks)} workers in it, fewer strategy.virtual_stages, or cut the network finer."
        )
    ranges = balance([cost(block) for block in blocks], stages)
    return [Stage([blocks[i] for i in part], context) for part in ranges]
