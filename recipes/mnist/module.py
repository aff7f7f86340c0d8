"""A small convolutional network that reads digits, as a module that any strategy trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.errors import ConfigurationError
from drivetrain.module import TrainModule


class MnistClassifier(TrainModule):
    """Two 3x3 convolutions (32 and 64 channels), max-pool, 9216-128-10; 1,199,882 parameters.

    Args:
        dropout: probabilities after the pooling and before the last layer; one number sets both, 0 drops nothing.
        optimizer: called with the parameters, returns their optimizer (a ``_partial_`` in the config);
            Adam with a learning rate of 1e-3 if not given.
        scheduler: called with the optimizer, returns a learning-rate schedule that is stepped once an epoch.

    Raises:
        ConfigurationError: ``dropout`` is not one or two numbers from 0 up to but without 1.
    """

    def __init__(
        self,
        dropout: float | Sequence[float] = (0.25, 0.5),
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("dropout")
        after_pooling, before_last = both(dropout)
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(after_pooling),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(before_last),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits, ``(B, 10)``, for images ``(B, 1, 28, 28)``."""
        return self.classifier(self.features(images))

    def pipeline_stages(self) -> list[nn.Module]:
        """The network as modules that, applied one after the other, are its ``forward``."""
        return [*self.features, *self.classifier]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, accuracy = self.judge(batch)
        self.log("train/loss", loss)
        self.log("train/accuracy", accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, accuracy = self.judge(batch)
        self.log("val/loss", loss)
        self.log("val/accuracy", accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, accuracy = self.judge(batch)
        self.log("test/loss", loss)
        self.log("test/accuracy", accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The digit read in each image, ``(B,)``."""
        images, _ = batch
        return self(images).argmax(dim=1)

    def judge(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean cross entropy and share of digits read right, both scalars."""
        images, labels = batch
        scores = self(images)
        loss = functional.cross_entropy(scores, labels)
        # Counted in fp64, so that the figure is the same however the batches were cut.
        return loss, (scores.argmax(dim=1) == labels).double().mean()

    def configure_optimizers(self) -> Any:
        optimizer = (
            Adam(self.parameters(), lr=1e-3) if self.make_optimizer is None else self.make_optimizer(self.parameters())
        )
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


def both(dropout: float | Sequence[float]) -> tuple[float, float]:
    """The two dropout probabilities that one or two numbers stand for."""
    given = [dropout] * 2 if isinstance(dropout, int | float) else list(dropout)
    if len(given) != 2 or not all(isinstance(p, int | float) and 0 <= p < 1 for p in given):
        raise ConfigurationError(
            f"model.dropout={dropout!r} must be one number from 0 up to but without 1, or a list of two such numbers."
        )
    return float(given[0]), float(given[1])
