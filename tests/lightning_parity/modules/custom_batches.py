"""Batches of a class of one's own, hooks around their transfer, backward overridden, augmentation after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


@dataclass
class Graph:
    x: torch.Tensor
    edges: torch.Tensor
    y: torch.Tensor
    num_graphs: int

    def to(self, device: Any) -> Graph:
        return Graph(self.x.to(device), self.edges.to(device), self.y.to(device), self.num_graphs)


def collate(items: list[int]) -> Graph:
    g = torch.Generator().manual_seed(sum(items))
    n = len(items)
    x = torch.randn(3 * n, 4, generator=g)
    edges = torch.randint(0, 3 * n, (2, 5 * n), generator=g)
    return Graph(x, edges, x.view(n, 3, 4).sum((1, 2)), n)


def project(L: Any) -> Any:
    class GCN(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(4, 6), nn.Linear(6, 1)
            self.moved: list[str] = []
            self.retained = 0

        def forward(self, g: Graph) -> torch.Tensor:
            h = torch.relu(self.lin(g.x))
            h = h.index_add(0, g.edges[0], h[g.edges[1]])
            return self.out(h).view(g.num_graphs, 3).sum(1)

        def on_before_batch_transfer(self, batch: Graph, dataloader_idx: int) -> Graph:
            self.moved.append(f"before {dataloader_idx}")
            return batch

        def transfer_batch_to_device(self, batch: Graph, device: torch.device, dataloader_idx: int) -> Graph:
            self.moved.append(f"to {device}")
            return batch.to(device)

        def on_after_batch_transfer(self, batch: Graph, dataloader_idx: int) -> Graph:
            if self.trainer.training:
                batch.x = batch.x + 0.01 * torch.randn_like(batch.x)
            return batch

        def training_step(self, batch: Graph, batch_idx: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self(batch), batch.y)
            self.log("loss", loss, batch_size=batch.num_graphs, on_step=True, on_epoch=True)
            return loss

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.retained += 1
            loss.backward(retain_graph=True)

        def validation_step(self, batch: Graph, batch_idx: int) -> None:
            self.log("val", nn.functional.mse_loss(self(batch), batch.y), batch_size=batch.num_graphs)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=0.05)

    def script(lab: Any) -> None:
        loader = DataLoader(range(22), batch_size=6, collate_fn=collate, shuffle=True)
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=1)
        model = GCN()
        trainer.fit(model, loader, DataLoader(range(7), batch_size=4, collate_fn=collate))
        lab.note("moved", model.moved)
        lab.note("retained", model.retained)

    return script
