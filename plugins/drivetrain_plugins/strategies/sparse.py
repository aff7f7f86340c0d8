"""Sparse gradients, which ``nn.Embedding(sparse=True)`` makes: what sums gradients as flat numbers cannot take them."""

from __future__ import annotations

from torch import nn

from drivetrain.errors import ConfigurationError


def refuse_sparse(module: nn.Module, way: str) -> None:
    """Refuse a trained embedding whose gradients are sparse.

    Args:
        way: what cannot take them, as a user chose it.
    """
    for name, one in module.named_modules():
        sparse = isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse
        if sparse and any(p.requires_grad for p in one.parameters(recurse=False)):
            raise ConfigurationError(
                f"{name or type(module).__name__} has sparse gradients (sparse=True), which {way} cannot reduce: make"
                " it with sparse=False, or use strategy=ddp."
            )
