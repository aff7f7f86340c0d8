"""Small modules that documentation and tests are written with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from drivetrain.data import DataModule
from drivetrain.lightning import deep_names
from drivetrain.module import TrainModule

__path__: list[str] = []


_STAGES_OF = {"train": ("fit",), "val": ("fit", "validate"), "test": ("test",), "predict": ("predict",)}
_ROWS_OF_STREAMS = {"train": 512, "val": 128, "test": 256, "predict": 64}


class RandomDataset(Dataset[Tensor]):
    """``length`` rows of ``size`` normal numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """Rows ``a``, and ``b``, which are greater by 2."""

    def __getitem__(self, index: int) -> Any:
        row = self.data[index]
        return {"a": row, "b": row + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of ``count`` rows of ``size`` normal numbers, new ones each time."""

    def __init__(self, size: int, count: int) -> None:
        self.count, self.size = count, size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return self.count


class BoringModel(TrainModule):
    """One linear layer from 32 numbers to 2, drawn towards ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Tensor) -> Tensor:
        return self.loss(self(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"x": self.step(batch)}

    def test_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class BoringDataModule(DataModule):
    """256 random rows, of which every stage has its own 64 once it is set up."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        for number, (part, stages) in enumerate(_STAGES_OF.items()):
            if stage in stages:
                setattr(self, f"random_{part}", Subset(self.random_full, range(64 * number, 64 * (number + 1))))

    def train_dataloader(self) -> Any:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.random_predict)


class BoringDataModuleNoLen(BoringDataModule):
    """Streams of random rows, whose length nobody knows; of each stage once it is set up."""

    def __init__(self) -> None:
        DataModule.__init__(self)

    def setup(self, stage: str) -> None:
        for part, stages in _STAGES_OF.items():
            if stage in stages:
                setattr(self, f"random_{part}", RandomIterableDataset(32, _ROWS_OF_STREAMS[part]))


class ManualOptimBoringModel(BoringModel):
    """A :class:`BoringModel` that steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(TrainModule):
    """One linear layer, whose positive outputs are drawn to nothing; it has no data."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.flatten(1)))

    def training_step(self, batch: Tensor, batch_nb: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


deep_names.name_below(__name__)
