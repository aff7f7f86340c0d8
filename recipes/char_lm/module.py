"""A language model over bytes, as a module that any strategy trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from drivetrain.errors import ConfigurationError
from drivetrain.module import TrainModule
from recipes.char_lm.model import GPT


class CharLM(TrainModule):
    """A GPT that learns which byte comes next.

    Args:
        vocab, context, layers, heads, width, dropout, tied: as :class:`recipes.char_lm.model.GPT` takes them.
        warmup_steps: optimizer steps over which the learning rate rises to its value, where no scheduler is given.
        optimizer: called with the parameters, returns their optimizer (a ``_partial_`` in the config); AdamW with
            a learning rate of 1e-3 and weight decay of 0.1 if not given.
        scheduler: called with the optimizer, returns a learning-rate schedule that is stepped once a step.

    Raises:
        ConfigurationError: ``heads`` does not divide ``width``.
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
        warmup_steps: int = 20,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        try:
            self.model = GPT(vocab, context, layers, heads, width, dropout, tied)
        except ValueError as error:
            raise ConfigurationError(f"model: {error}.") from error
        self.warmup_steps = warmup_steps
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores ``(B, T, vocab)`` of what follows each of ``tokens (B, T)``."""
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.judge(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.judge(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The likeliest byte after each of the batch's, ``(B, T)``."""
        return self.model(batch[0]).argmax(-1)

    def judge(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        loss = self.loss(batch)
        self.log(f"{stage}/loss", loss)
        # The geometric mean over batches is the exponential of the mean loss: the perplexity of the whole text.
        self.log(f"{stage}/perplexity", loss.exp(), prog_bar=True, reduce_fx="gmean")

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy in nats a byte."""
        tokens, following = batch
        if tokens.shape[1] > self.model.context:
            raise ConfigurationError(
                f"model.context={self.model.context} is shorter than the data's {tokens.shape[1]} tokens:"
                " make it equal to data.context."
            )
        return functional.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is None:
            optimizer: Optimizer = AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        else:
            optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            scheduler: LRScheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup_steps + 1)))
        else:
            scheduler = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
