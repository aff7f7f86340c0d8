"""Metric objects in the check before training: on two ranks, too, hooks are shown what Lightning shows them.

Lightning asks an object when somebody looks, on all ranks at once. Here ranks may look alone, so they bring together
before what a hook of the project's may look at.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric

import drivetrain.lightning
from tests.distributed import run_ranks
from tests.facade.recorder import QUIET
from tests.lightning_parity.comparison import differences
from tests.ports import free_port

ALL = [
    *("on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_end", "on_train_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
]
OF_CHECK = [hook for hook in ALL if "batch" not in hook]


class FewSamples(Metric):  # type: ignore[misc]
    """Has no value of as few samples as a check has."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []  # with how many
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.seen += len(values)

    def compute(self) -> torch.Tensor:
        self.asked.append(int(self.seen))
        if self.seen <= 8:
            raise ValueError("too few")
        return self.seen.float()


def run(
    L: Any, folder: Path, ranks: int, hooks: list[str], several: bool, resets: bool = False, **how: Any
) -> list[Any]:
    """What the ``hooks`` of a fit are shown on this rank; ``resets``: whose module begins its metric anew by itself."""
    seen: list[Any] = []

    class Looks(L.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            for hook in hooks:
                setattr(self, hook, self.look(hook))

        def look(self, hook: str) -> Any:
            def looks(trainer: Any, *rest: Any) -> None:
                known = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
                shown = [{name: float(value) for name, value in one.items()} for one in known]
                seen.append((hook, trainer.sanity_checking, shown))

            return looks

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mean, self.most = nn.Linear(2, 1), MeanMetric(), MaxMetric()
            self.both = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()}, prefix="val_")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).mean()
            self.mean(loss.detach())
            self.log("train", self.mean, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            values = self.layer(batch).detach()
            self.most(values)
            self.both(values)
            self.log("most", self.most, prog_bar=True, **how)
            self.log_dict(self.both)
            self.log("plain", values.mean())
            self.log("synced", values.mean(), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            if resets:
                self.mean.reset()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(samples: int) -> Any:
        return DataLoader(torch.arange(2.0 * samples).view(samples, 2) / samples, batch_size=2)

    L.seed_everything(3)
    options = {**QUIET, "logger": False, "strategy": "ddp", "devices": ranks, "default_root_dir": folder}
    trainer = L.Trainer(**options, max_epochs=1, num_sanity_val_steps=2, callbacks=[Looks()])
    trainer.fit(Module(), loader(12), [loader(12), loader(8)] if several else loader(12))
    if hasattr(trainer, "close"):
        trainer.close()
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("hooks", "several", "how"),
    [
        (ALL, False, {}),
        (["on_validation_end"], False, {}),
        (["on_sanity_check_end"], False, {"on_step": True, "on_epoch": True}),
        (["on_validation_end", "on_sanity_check_end"], True, {}),
        (OF_CHECK, True, {"on_step": True, "on_epoch": True}),
    ],
    ids=["all hooks", "validation_end", "check_end", "loaders", "loaders and steps"],
)
def test_what_hooks_are_shown(hooks: list[str], several: bool, how: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    alike_under_both(ranks, tmp_path, hooks, several, how)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_looked_at_stays_when_the_module_begins_it_anew(ranks: int, tmp_path: Path) -> None:
    alike_under_both(ranks, tmp_path, ["on_train_epoch_end", "on_train_end"], False, {"resets": True})


def alike_under_both(ranks: int, tmp_path: Path, hooks: list[str], several: bool, how: dict[str, Any]) -> None:
    """Both libraries show the hooks the same, on each of the ``ranks``."""

    def both(rank: int, world_size: int) -> list[Any]:
        of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world_size}
        of_torchrun |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in of_torchrun.items()}, TORCHELASTIC_RUN_ID="test")
        for name in ("lightning.pytorch", "lightning.fabric", "drivetrain"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        theirs = run(lightning.pytorch, tmp_path, world_size, hooks, several, **how)
        dist.barrier()
        dist.destroy_process_group()  # Lightning takes the group that is there, drivetrain makes its own
        return [theirs, run(drivetrain.lightning, tmp_path, world_size, hooks, several, **how)]

    port = free_port()
    for theirs, ours in run_ranks(both, ranks):
        assert len(theirs) == len(ours) > 0
        assert not differences({"seen": theirs}, {"seen": ours})


class Measures(drivetrain.lightning.LightningModule):
    """Logs a metric that has no value in the check."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.few = nn.Linear(2, 1), FewSamples()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.few.update(batch)
        self.log("few", self.few)
        self.log("plain", 1.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(drivetrain.lightning.Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.file.with_suffix(f".{trainer.global_rank}").write_text(str(module.few.asked))


class Looks(Notes):
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        assert ("few" in trainer.callback_metrics) is not trainer.sanity_checking
        assert "plain" in trainer.callback_metrics


@pytest.mark.parametrize("callback", [Notes, Looks])
def test_of_metrics_without_a_value_only_the_projects_hooks_are_told(callback: type[Notes], tmp_path: Path) -> None:
    file = tmp_path / "asked"
    saves = drivetrain.lightning.callbacks.ModelCheckpoint(tmp_path, monitor="few")
    options = {**QUIET, "logger": False, "strategy": "ddp", "devices": 2, "enable_checkpointing": True}
    trainer = drivetrain.lightning.Trainer(**options, max_epochs=1, callbacks=[callback(file), saves])
    data = DataLoader(torch.ones(12, 2), batch_size=2)
    trainer.fit(Measures(), data, data)
    assert trainer.callback_metrics["few"] == 12
    asked = [4 * 2] if callback is Looks else []
    assert [file.with_suffix(f".{rank}").read_text() for rank in range(2)] == [str(asked)] * 2
