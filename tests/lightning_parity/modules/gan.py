"""A GAN with manual optimisation, toggled optimizers and images of a fixed noise at each epoch's end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Generator(nn.Module):
    def __init__(self, latent_dim: int, img_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.img_shape = img_shape
        size = img_shape[0] * img_shape[1] * img_shape[2]

        def block(in_feat: int, out_feat: int, normalize: bool = True) -> list[nn.Module]:
            layers: list[nn.Module] = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            return [*layers, nn.LeakyReLU(0.2)]

        self.model = nn.Sequential(
            *block(latent_dim, 16, normalize=False), *block(16, 32), nn.Linear(32, size), nn.Tanh()
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.model(z).view(z.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape: tuple[int, ...]) -> None:
        super().__init__()
        size = img_shape[0] * img_shape[1] * img_shape[2]
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return self.model(img)


def project(L: Any) -> Any:
    class MNISTDataModule(L.LightningDataModule):
        def __init__(self, batch_size: int = 8, num_workers: int = 0) -> None:
            super().__init__()
            self.batch_size, self.num_workers = batch_size, num_workers
            self.dims = (1, 6, 6)

        def setup(self, stage: str | None = None) -> None:
            if stage == "fit" or stage is None:
                self.mnist_train = TensorDataset(torch.rand(40, *self.dims) * 2 - 1, torch.randint(10, (40,)))

        def train_dataloader(self) -> Any:
            return DataLoader(self.mnist_train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    class GAN(L.LightningModule):
        def __init__(
            self,
            channels: int,
            width: int,
            height: int,
            latent_dim: int = 8,
            lr: float = 0.002,
            b1: float = 0.5,
            b2: float = 0.999,
            batch_size: int = 8,
            **kwargs: Any,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            data_shape = (channels, width, height)
            self.generator = Generator(latent_dim=self.hparams.latent_dim, img_shape=data_shape)
            self.discriminator = Discriminator(img_shape=data_shape)
            self.validation_z = torch.randn(4, self.hparams.latent_dim)
            self.example_input_array = torch.zeros(2, self.hparams.latent_dim)
            self.images: list[float] = []

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.generator(z)

        def adversarial_loss(self, y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.binary_cross_entropy(y_hat, y)

        def training_step(self, batch: Any) -> None:
            imgs, _ = batch
            optimizer_g, optimizer_d = self.optimizers()
            z = torch.randn(imgs.shape[0], self.hparams.latent_dim)
            z = z.type_as(imgs)

            self.toggle_optimizer(optimizer_g)
            self.generated_imgs = self(z)
            valid = torch.ones(imgs.size(0), 1).type_as(imgs)
            g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
            self.log("g_loss", g_loss, prog_bar=True)
            self.manual_backward(g_loss)
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)

            self.toggle_optimizer(optimizer_d)
            real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
            fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
            fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
            d_loss = (real_loss + fake_loss) / 2
            self.log("d_loss", d_loss, prog_bar=True)
            self.manual_backward(d_loss)
            optimizer_d.step()
            optimizer_d.zero_grad()
            self.untoggle_optimizer(optimizer_d)

        def configure_optimizers(self) -> Any:
            lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
            opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
            opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
            return [opt_g, opt_d], []

        def on_train_epoch_end(self) -> None:
            z = self.validation_z.type_as(self.generator.model[0].weight)
            self.images.append(float(self(z).mean()))
            self.log("images", self.images[-1])

    def script(lab: Any) -> None:
        dm = MNISTDataModule()
        model = GAN(*dm.dims, comment="kept among the rest")
        trainer = lab.trainer(max_epochs=2, log_every_n_steps=3)
        trainer.fit(model, dm)
        lab.note("images", model.images)
        lab.note("hparams", dict(model.hparams))

    return script
