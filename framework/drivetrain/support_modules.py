"""What is trained to see what goes with what: a GPT of a few thousand parameters, in every way a module can step it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.errors import TrainingError
from drivetrain.folders import make_importable
from drivetrain.module import TrainModule

VOCAB, CONTEXT = 32, 12


def tokens(samples: int = 59) -> TensorDataset:
    """Random sequences ``(T,)`` and what follows each place ``(T,)``; 59 leave a tail under every batch size used."""
    drawn = torch.randint(VOCAB, (samples, CONTEXT + 1), generator=torch.Generator().manual_seed(5))
    return TensorDataset(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def token_loader(samples: int = 59, batch_size: int = 8, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(tokens(samples), batch_size=batch_size, shuffle=shuffle)


def small_gpt() -> nn.Module:
    """Two blocks of the recipe's GPT, from a fixed seed, with weights large enough for gradients to matter."""
    make_importable()
    from recipes.char_lm.model import GPT

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: nn.Module = GPT(VOCAB, CONTEXT, layers=2, heads=4, width=16)
    made.load_state_dict({name: value * 5 for name, value in made.state_dict().items()})
    return made


# What layers compute in.
FORMATS = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
}


class Automatic(TrainModule):
    """The loop steps: AdamW with weight decay, after a warm-up. Its layers fail when they compute in another format
    than ``precision`` says."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.model = small_gpt()

        def refuse_other_formats(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.dtype != FORMATS[precision]:
                raise TrainingError(f"{precision} computes in {output.dtype}")

        for name, layer in self.model.named_modules():
            if name.endswith("mlp.up"):
                layer.register_forward_hook(refuse_other_formats)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy over places."""
        return nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Closures(Automatic):
    """LBFGS, which evaluates the loss several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=2)


class Manual(Automatic):
    """The module steps its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        given = self.optimizers()
        optimizers = given if isinstance(given, list) else [given]
        loss = self.loss(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("loss", loss, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Several(Manual):
    """Two optimizers: of the blocks, and of the rest."""

    def configure_optimizers(self) -> Any:
        parts = {id(p) for name, p in self.named_parameters() if ".blocks." in name}
        groups = [[p for p in self.parameters() if (id(p) in parts) is inside] for inside in (True, False)]
        return [torch.optim.SGD(group, lr=0.01) for group in groups]


# By the choices of the axis "optimization".
MODULES: dict[str, type[Automatic]] = {
    "automatic": Automatic,
    "manual": Manual,
    "several": Several,
    "closures": Closures,
}
