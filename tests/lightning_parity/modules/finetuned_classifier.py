"""Transfer learning: a frozen backbone thawed at an epoch, in milestones of one's own and with the callback for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def project(L: Any) -> Any:
    class MilestonesFinetuning(L.callbacks.BaseFinetuning):
        def __init__(self, milestones: tuple[int, int] = (1, 2), train_bn: bool = False) -> None:
            super().__init__()
            self.milestones, self.train_bn = milestones, train_bn

        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == self.milestones[0]:
                self.unfreeze_and_add_param_group(
                    modules=pl_module.feature_extractor[-3:], optimizer=optimizer, train_bn=self.train_bn
                )
            elif epoch == self.milestones[1]:
                self.unfreeze_and_add_param_group(
                    modules=pl_module.feature_extractor[:-3], optimizer=optimizer, train_bn=self.train_bn
                )

    class TransferLearningModel(L.LightningModule):
        def __init__(
            self,
            backbone: str = "small",
            milestones: tuple[int, int] = (1, 2),
            lr: float = 0.1,
            lr_scheduler_gamma: float = 0.5,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.__build_model()
            self.trainable: list[int] = []

        def __build_model(self) -> None:
            layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
            self.feature_extractor = nn.Sequential(*layers)
            self.fc = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))

        @property
        def backbone(self) -> nn.Module:
            return self.feature_extractor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.feature_extractor(x)).squeeze(-1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            self.trainable.append(
                sum(p.requires_grad for p in self.parameters()) + 100 * self.feature_extractor[1].training
            )
            logits = self(x)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, y.float())
            self.log("train_acc", ((logits > 0) == y).float().mean(), prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_acc", ((self(x) > 0) == y).float().mean(), prog_bar=True)

        def configure_optimizers(self) -> Any:
            parameters = list(self.parameters())
            trainable = list(filter(lambda p: p.requires_grad, parameters))
            optimizer = torch.optim.Adam(trainable, lr=self.hparams.lr)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(
                optimizer, milestones=self.hparams.milestones, gamma=self.hparams.lr_scheduler_gamma
            )
            return [optimizer], [scheduler]

    def script(lab: Any) -> None:
        x = torch.randn(40, 6)
        data = TensorDataset(x, x.sum(1) > 0)
        train, val = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=20)
        callbacks = {
            "milestones": MilestonesFinetuning(),
            "backbone": L.callbacks.BackboneFinetuning(
                unfreeze_backbone_at_epoch=1,
                lambda_func=lambda epoch: 1.5,
                backbone_initial_ratio_lr=0.1,
                verbose=False,
            ),
        }
        for name, callback in callbacks.items():
            model = TransferLearningModel()
            logger = L.loggers.CSVLogger(str(lab.folder), name=name)
            trainer = lab.trainer(max_epochs=4, callbacks=[callback], logger=logger, log_every_n_steps=2)
            trainer.fit(model, train, val)
            lab.note(f"trainable {name}", model.trainable)
            lab.note(f"groups {name}", [len(g["params"]) for g in trainer.optimizers[0].param_groups])

    return script
