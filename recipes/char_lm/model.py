"""A small GPT in plain PyTorch: nothing here knows that training may be distributed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal multi-head self-attention. The number of heads follows from the width of the projections, so that a
    tensor-parallel run may leave each rank some of the heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, T, width)`` to ``(B, T, width)``."""
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_width)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Embedding(nn.Module):
    """What a token is plus where it stands."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding) -> None:
        super().__init__()
        self.token, self.position = token, position

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(places)


class GPT(nn.Module):
    """Predicts the next token at every place (Radford et al., 2019).

    Args:
        vocab: number of different tokens.
        context: longest sequence.
        layers, heads, width: number of blocks, attention heads of each, channels.
        dropout: probability within the blocks.
        tied: whether the output layer is the token embedding.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """

    def __init__(
        self,
        vocab: int = 256,
        context: int = 64,
        layers: int = 4,
        heads: int = 4,
        width: int = 64,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} cannot be divided among heads={heads}: choose a multiple")
        self.context = context
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(B, T, vocab)`` of the token that follows each of ``tokens (B, T)`` int64."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def pipeline_stages(self) -> list[nn.Module]:
        """The network as modules that, applied one after the other, are its ``forward``."""
        return [Embedding(self.token, self.position), *self.blocks, self.norm, self.head]

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int, generator: torch.Generator | None = None) -> Tensor:
        """``tokens (B, T)`` followed by ``length`` tokens drawn one after the other, ``(B, T + length)``."""
        for _ in range(length):
            scores = self(tokens[:, -self.context :])[:, -1]
            chosen = torch.multinomial(scores.float().softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], 1)
        return tokens
