"""What the model writes: a sample of text when training has ended."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.callback import Callback
from recipes.char_lm.model import GPT


class SampleText(Callback):
    """Prints what the trained model makes of ``prompt``; drawn on the CPU from a fixed seed, so that runs compare.

    Args:
        prompt: the text to go on from.
        length: bytes to add.
        seed: of the draws.
    """

    def __init__(self, prompt: str = "def ", length: int = 200, seed: int = 0) -> None:
        self.prompt, self.length, self.seed = prompt, length, seed
        self.text: str | None = None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        weights = trainer.full_weights()  # every rank takes part: a strategy may hold the model in parts
        if not trainer.is_global_zero:
            return
        names = ("vocab", "context", "layers", "heads", "width")
        with torch.random.fork_rng(devices=[]):  # random weights first, which must not move the run's generator
            model = GPT(**{name: module.hparams[name] for name in names})
        own = {name.removeprefix("model."): tensor.detach().cpu() for name, tensor in weights.items()}
        model.load_state_dict(own)
        start = torch.tensor([list(self.prompt.encode())])
        drawn = model.eval().generate(start, self.length, torch.Generator().manual_seed(self.seed))
        self.text = bytes(drawn[0].tolist()).decode(errors="replace")
        print(f"--- sample ---\n{self.text}\n--------------", flush=True)
