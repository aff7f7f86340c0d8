"""A text classifier with a data module that validates on two loaders, as for matched and mismatched sentence pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset[Any]):
    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 20, (n, 7), generator=g)
        self.mask = (torch.rand(n, 7, generator=g) > 0.2).long()
        self.mask[:, 0] = 1
        self.labels = (self.ids[:, 0] > 10).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


def get_linear_schedule_with_warmup(optimizer: Any, num_warmup_steps: int, num_training_steps: int) -> Any:
    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def project(L: Any) -> Any:
    class GLUEDataModule(L.LightningDataModule):
        def __init__(
            self, task_name: str = "mnli", train_batch_size: int = 8, eval_batch_size: int = 5, **kwargs: Any
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.task_name, self.train_batch_size, self.eval_batch_size = task_name, train_batch_size, eval_batch_size
            self.num_labels = 2

        def prepare_data(self) -> None:
            self.prepared = True

        def setup(self, stage: str) -> None:
            assert self.prepared
            self.dataset = {
                "train": Sentences(40, 0),
                "validation_matched": Sentences(11, 1),
                "validation_mismatched": Sentences(13, 2),
            }
            self.eval_splits = [x for x in self.dataset if "validation" in x]

        def train_dataloader(self) -> Any:
            return DataLoader(self.dataset["train"], batch_size=self.train_batch_size, shuffle=True)

        def val_dataloader(self) -> Any:
            return [DataLoader(self.dataset[x], batch_size=self.eval_batch_size) for x in self.eval_splits]

    class GLUETransformer(L.LightningModule):
        def __init__(
            self,
            num_labels: int,
            task_name: str,
            learning_rate: float = 2e-2,
            warmup_steps: int = 3,
            weight_decay: float = 0.01,
            eval_splits: list[str] | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.embed = nn.Embedding(20, 8, padding_idx=0)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
            self.LayerNorm = nn.LayerNorm(8)
            self.classifier = nn.Linear(8, num_labels)
            self.validation_step_outputs: dict[int, list[Any]] = {}

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
            hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
            logits = self.classifier(self.LayerNorm(hidden[:, 0]))
            return nn.functional.cross_entropy(logits, labels), logits

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(**batch)[0]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            val_loss, logits = self(**batch)
            outputs = self.validation_step_outputs.setdefault(dataloader_idx, [])
            outputs.append({"loss": val_loss, "preds": logits.argmax(axis=1), "labels": batch["labels"]})
            self.log("val_step_loss", val_loss)
            self.log("batches", 1.0, reduce_fx="sum", add_dataloader_idx=False) if dataloader_idx == 1 else None
            return outputs[-1]

        def on_validation_epoch_end(self) -> None:
            for i, output in self.validation_step_outputs.items():
                split = self.trainer.datamodule.eval_splits[i].split("_")[-1]
                preds = torch.cat([x["preds"] for x in output])
                labels = torch.cat([x["labels"] for x in output])
                loss = torch.stack([x["loss"] for x in output]).mean()
                self.log(f"val_loss_{split}", loss, prog_bar=True)
                self.log_dict(
                    {f"{k}_{split}": v for k, v in {"accuracy": (preds == labels).float().mean()}.items()},
                    prog_bar=True,
                )
            self.validation_step_outputs.clear()

        def configure_optimizers(self) -> Any:
            no_decay = ["bias", "LayerNorm.weight"]
            named = list(self.named_parameters())
            groups = [
                {
                    "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                    "weight_decay": self.hparams.weight_decay,
                },
                {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, eps=1e-8)
            scheduler = get_linear_schedule_with_warmup(
                optimizer, self.hparams.warmup_steps, self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]

    def script(lab: Any) -> None:
        L.seed_everything(42)
        dm = GLUEDataModule()
        dm.prepare_data()
        dm.setup("fit")
        model = GLUETransformer(num_labels=dm.num_labels, eval_splits=dm.eval_splits, task_name=dm.task_name)
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=4)
        trainer.fit(model, datamodule=dm)
        trainer.validate(model, datamodule=dm, verbose=False)

    return script
