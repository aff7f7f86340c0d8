"""A small transformer language model: AdamW groups without decay, OneCycle by step, clipping, perplexity."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

TEXT = "the quick brown fox jumps over the lazy dog and then the dog sleeps while the fox runs on " * 3


class CharDataset(Dataset[Any]):
    def __init__(self, data: str, block_size: int) -> None:
        chars = sorted(set(data))
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.block_size, self.vocab_size, self.data = block_size, len(chars), data

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.block_size

    def __getitem__(self, idx: int) -> Any:
        at = idx * self.block_size
        dix = [self.stoi[s] for s in self.data[at : at + self.block_size + 1]]
        return torch.tensor(dix[:-1], dtype=torch.long), torch.tensor(dix[1:], dtype=torch.long)


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 2 * n_embd), nn.GELU(), nn.Linear(2 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device), 1)
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


def project(L: Any) -> Any:
    class GPT(L.LightningModule):
        def __init__(
            self,
            vocab_size: int,
            block_size: int,
            weight_decay: float = 0.1,
            betas: Any = (0.9, 0.95),
            learning_rate: float = 3e-3,
            n_embd: int = 16,
            n_layer: int = 2,
            n_head: int = 2,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.tok_emb = nn.Embedding(vocab_size, n_embd)
            self.pos_emb = nn.Parameter(torch.zeros(1, block_size, n_embd))
            self.drop = nn.Dropout(0.1)
            self.blocks = nn.Sequential(*[Block(n_embd, n_head, 0.1) for _ in range(n_layer)])
            self.ln_f = nn.LayerNorm(n_embd)
            self.head = nn.Linear(n_embd, vocab_size, bias=False)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(mean=0.0, std=0.02)

        def configure_optimizers(self) -> Any:
            decay = [p for p in self.parameters() if p.dim() >= 2]
            no_decay = [p for p in self.parameters() if p.dim() < 2]
            groups = [
                {"params": decay, "weight_decay": self.hparams.weight_decay},
                {"params": no_decay, "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=self.hparams.betas)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=self.hparams.learning_rate, total_steps=self.trainer.estimated_stepping_batches
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def forward(self, idx: torch.Tensor) -> torch.Tensor:
            x = self.drop(self.tok_emb(idx) + self.pos_emb[:, : idx.size(1), :])
            return self.head(self.ln_f(self.blocks(x)))

        def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
            idx, targets = batch
            logits = self(idx)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
            self.log(f"{stage}/loss", loss, on_step=stage == "train", on_epoch=True, prog_bar=True)
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.shared_step(batch, "train")
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.shared_step(batch, "val")

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.log("val/ppl", math.exp(self.trainer.callback_metrics["val/loss"]), prog_bar=True)

    def script(lab: Any) -> None:
        L.seed_everything(42)
        data = CharDataset(TEXT, 8)
        train, val = torch.utils.data.random_split(data, [len(data) - 8, 8])
        model = GPT(data.vocab_size, 8)
        lr_monitor = L.callbacks.LearningRateMonitor(logging_interval="step")
        trainer = lab.trainer(max_epochs=3, gradient_clip_val=1.0, callbacks=[lr_monitor], log_every_n_steps=2)
        trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=4))

    return script
