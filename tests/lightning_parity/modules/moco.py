"""MoCo: a queue in buffers, a momentum encoder, the online probe's metric, checkpoints by epoch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class Moco(L.LightningModule):
        def __init__(
            self,
            emb_dim: int = 4,
            num_negatives: int = 16,
            momentum: float = 0.9,
            temperature: float = 0.2,
            learning_rate: float = 0.1,
            use_mlp: bool = True,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.encoder_q = self.init_encoder()
            self.encoder_k = copy.deepcopy(self.encoder_q)
            for param_k in self.encoder_k.parameters():
                param_k.requires_grad = False
            self.register_buffer("queue", F.normalize(torch.randn(emb_dim, num_negatives), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
            self.queue: torch.Tensor
            self.queue_ptr: torch.Tensor

        def init_encoder(self) -> nn.Module:
            layers: list[nn.Module] = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
            if self.hparams.use_mlp:
                layers += [nn.Linear(8, 8), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(8, self.hparams.emb_dim))

        @torch.no_grad()
        def _momentum_update_key_encoder(self) -> None:
            em = self.hparams.momentum
            for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                param_k.data = param_k.data * em + param_q.data * (1.0 - em)

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: torch.Tensor) -> None:
            ptr, size = int(self.queue_ptr), keys.shape[0]
            assert self.hparams.num_negatives % size == 0
            self.queue[:, ptr : ptr + size] = keys.T
            self.queue_ptr[0] = (ptr + size) % self.hparams.num_negatives

        def forward(self, img_q: torch.Tensor, img_k: torch.Tensor) -> Any:
            q = F.normalize(self.encoder_q(img_q), dim=1)
            with torch.no_grad():
                self._momentum_update_key_encoder()
                k = F.normalize(self.encoder_k(img_k), dim=1)
            l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
            logits = torch.cat([l_pos, l_neg], dim=1) / self.hparams.temperature
            return logits, torch.zeros(logits.shape[0], dtype=torch.long), k

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            (x,) = batch
            output, target, keys = self(x + 0.05 * torch.randn_like(x), x + 0.05 * torch.randn_like(x))
            self._dequeue_and_enqueue(keys)
            loss = F.cross_entropy(output.float(), target.long())
            acc1 = (output.argmax(1) == 0).float().mean()
            self.log_dict({"train_loss": loss, "train_acc1": acc1}, prog_bar=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            params = self.encoder_q.parameters()
            return torch.optim.SGD(params, self.hparams.learning_rate, momentum=0.9, weight_decay=1e-4)

    def script(lab: Any) -> None:
        L.seed_everything(9)
        loader = DataLoader(TensorDataset(torch.randn(44, 8)), batch_size=8, shuffle=True, drop_last=True)
        checkpoint = L.callbacks.ModelCheckpoint(
            every_n_epochs=2, save_top_k=-1, filename="moco-{epoch:02d}-{train_loss_epoch:.2f}"
        )
        trainer = lab.trainer(max_epochs=4, callbacks=[checkpoint], log_every_n_steps=4)
        trainer.fit(Moco(), loader)

    return script
