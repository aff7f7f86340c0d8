"""Hyper-parameters in every form that projects save them in, and modules built again from checkpoints."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIFFERENCES = {
    f"checkpoint.{name}/*.keys": "the file says that its hyper-parameters are one argument, read by attribute or by key"
    for name in ("dict", "namespace")
}


def project(L: Any) -> Any:
    class Base(L.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            (x,) = batch
            loss = self.net(x).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Ignoring(Base):
        def __init__(self, net: nn.Module, width: int = 4, loss: str = "l2", **extra: Any) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["net"])
            self.net = net

    class Named(Base):
        def __init__(self, width: int, depth: int = 2, unused: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters("width", "depth")
            layers = [nn.Linear(4, self.hparams.width), *[nn.Linear(width, width) for _ in range(depth - 1)]]
            self.net = nn.Sequential(*layers)

    class Dict(Base):
        def __init__(self, hparams: Any) -> None:
            super().__init__()
            self.save_hyperparameters(hparams)
            self.net = nn.Linear(4, self.hparams["out"] if isinstance(hparams, dict) else self.hparams.out)

    class Child(Named):
        def __init__(self, extra: float = 0.5, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.save_hyperparameters()
            self.extra = self.hparams.extra

    class Lazy(Base):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = nn.Linear(4, self.hparams.width)

    def script(lab: Any) -> None:
        data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
        cases: dict[str, tuple[Any, dict[str, Any]]] = {
            "ignoring": (Ignoring(nn.Linear(4, 4), 3, note="kept"), {"net": nn.Linear(4, 4)}),
            "named": (Named(5, depth=3, unused=object()), {}),
            "dict": (Dict({"out": 3, "nested": {"a": [1, 2]}}), {}),
            "namespace": (Dict(Namespace(out=2, name="n")), {}),
            "child": (Child(extra=0.25, width=3), {"depth": 2}),
            "lazy": (Lazy(2), {}),
        }
        for name, (module, given) in cases.items():
            logger = L.loggers.CSVLogger(str(lab.folder), name=name)
            trainer = lab.trainer(max_epochs=1, logger=logger, log_every_n_steps=1)
            trainer.fit(module, data)
            lab.note(
                f"{name} hparams",
                {k: v if not isinstance(v, Namespace) else vars(v) for k, v in module.hparams.items()},
            )
            lab.note(f"{name} initial", sorted(module.hparams_initial))
            path = trainer.checkpoint_callback.best_model_path
            again = type(module).load_from_checkpoint(path, map_location="cpu", **given, weights_only=False)
            lab.note(f"{name} weights", dict(again.state_dict()))
            lab.note(f"{name} again", sorted(again.hparams))
            lab.note(f"{name} training", again.training)

    return script
