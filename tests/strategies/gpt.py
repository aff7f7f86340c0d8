"""A GPT of a few thousand parameters and its data: what every strategy is compared on."""

from __future__ import annotations

from drivetrain.support_modules import CONTEXT, VOCAB, token_loader, tokens
from recipes.char_lm.module import CharLM
from tests.runs import seeded

__all__ = ["CONTEXT", "VOCAB", "TinyGPT", "three_heads", "tiny_gpt", "token_loader", "tokens"]


class TinyGPT(CharLM):
    """Four blocks of width 16. Made from a fixed seed, with weights large enough for gradients to matter."""

    def __init__(self, tied: bool = False, layers: int = 4, heads: int = 4) -> None:
        width = 4 * heads
        super().__init__(
            vocab=VOCAB, context=CONTEXT, layers=layers, heads=heads, width=width, tied=tied, warmup_steps=5
        )
        self.hparams.clear()
        self.save_hyperparameters("tied", "layers", "heads")
        made = seeded(lambda: type(self.model)(VOCAB, CONTEXT, layers, heads, width, tied=tied))
        self.model.load_state_dict({name: value * 5 for name, value in made.state_dict().items()})


def tiny_gpt(tied: bool = False) -> TinyGPT:
    return TinyGPT(tied)


def three_heads() -> TinyGPT:
    """For three ranks that share the heads of every block."""
    return TinyGPT(heads=3)
