"""An encoder-decoder with teacher forcing, label smoothing, an inverse-root schedule, generation in prediction."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, BOS, EOS = 0, 1, 2


class Reverse(Dataset[Any]):
    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.items = [
            torch.randint(3, 9, (int(torch.randint(2, 6, (1,), generator=g)),), generator=g) for _ in range(n)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.items[i], torch.cat([torch.tensor([BOS]), self.items[i].flip(0), torch.tensor([EOS])])


def collate(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    source, target = zip(*batch, strict=True)
    return pad_sequence(list(source), batch_first=True), pad_sequence(list(target), batch_first=True)


def project(L: Any) -> Any:
    class Seq2Seq(L.LightningModule):
        def __init__(self, vocab: int = 9, dim: int = 8, teacher_forcing: float = 0.5, warmup: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
            self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRUCell(dim, dim)
            self.out = nn.Linear(dim, vocab)
            self.criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)

        def forward(self, source: torch.Tensor, length: int, target: torch.Tensor | None = None) -> torch.Tensor:
            _, h = self.encoder(self.embed(source))
            h, token, outputs = h[0], source.new_full((len(source),), BOS), []
            for t in range(1, length):
                h = self.decoder(self.embed(token), h)
                outputs.append(self.out(h))
                force = target is not None and random.random() < self.hparams.teacher_forcing
                token = target[:, t] if force else outputs[-1].argmax(-1)
            return torch.stack(outputs, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            source, target = batch
            logits = self(source, target.size(1), target if self.training else None)
            loss = self.criterion(logits.flatten(0, 1), target[:, 1:].flatten())
            self.log("train_loss", loss, batch_size=len(source))
            self.log("tokens", (target != PAD).sum().float(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            source, target = batch
            loss = nn.functional.cross_entropy(
                self(source, target.size(1)).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD
            )
            self.log("val_loss", loss, batch_size=len(source))
            self.log("val_ppl", torch.exp(loss), prog_bar=True, batch_size=int((target != PAD).sum()))
            return loss

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            return self(batch[0], 6).argmax(-1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9)
            warm = self.hparams.warmup
            rate = lambda step: min((step + 1) ** -0.5, (step + 1) * warm**-1.5) * warm**0.5
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
                    "interval": "step",
                    "name": "noam",
                },
            }

    def script(lab: Any) -> None:
        L.seed_everything(5)
        model = Seq2Seq()
        train = DataLoader(Reverse(30, 0), batch_size=6, shuffle=True, collate_fn=collate)
        val = DataLoader(Reverse(9, 1), batch_size=4, collate_fn=collate)
        trainer = lab.trainer(
            max_epochs=2, gradient_clip_val=1.0, log_every_n_steps=2, callbacks=L.callbacks.LearningRateMonitor()
        )
        trainer.fit(model, train, val)
        trainer.predict(model, val)

    return script
