"""Arguments of the Trainer in all the forms in which Lightning takes them."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from omegaconf import OmegaConf

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError, PossibleUserWarning
from drivetrain.launch import Job
from drivetrain.strategy import Strategy
from drivetrain_plugins.strategies import SINGLE
from tests.facade.recorder import QUIET

BARS = ["TQDMProgressBar", "RichProgressBar"]
both = pytest.mark.parametrize("L", [theirs, ours], ids=["lightning", "drivetrain"])


@both
def test_a_number_of_batches_may_be_written_with_a_point(L: Any) -> None:
    limits = {f"limit_{kind}_batches": 10.0 for kind in ("train", "val", "test", "predict")}
    trainer = L.Trainer(**{**QUIET, **limits})
    assert [getattr(trainer, name) for name in limits] == [10, 10, 10, 10]
    assert all(isinstance(getattr(trainer, name), int) for name in limits)
    assert L.Trainer(**{**QUIET, "limit_train_batches": 1.0}).limit_train_batches == 1.0


@both
def test_a_folder_may_begin_at_home(L: Any) -> None:
    home = os.path.expanduser("~")
    assert L.Trainer(**{**QUIET, "default_root_dir": "~/runs"}).default_root_dir == f"{home}/runs"
    assert L.Trainer(**{**QUIET, "default_root_dir": Path("~/runs")}).default_root_dir == f"{home}/runs"


def test_lists_and_mappings_may_be_of_a_configuration() -> None:
    given = OmegaConf.create({"devices": [0], "interval": {"minutes": 2}})
    trainer = ours.Trainer(
        **{**QUIET, "accelerator": "cpu", "devices": given.devices, "val_check_interval": given.interval}
    )
    assert (trainer.num_devices, trainer.val_check_seconds) == (1, 120.0)


@both
@pytest.mark.parametrize("name", ["DDP", "ddp_Find_Unused_Parameters_True", "single_device"])
def test_names_of_strategies(L: Any, name: str) -> None:
    strategies = __import__(f"{L.__name__}.strategies", fromlist=["DDPStrategy"])
    devices = 1 if name.startswith("single") else 2
    trainer = L.Trainer(**{**QUIET, "accelerator": "cpu", "devices": devices, "strategy": name})
    kind = strategies.SingleDeviceStrategy if name.startswith("single") else strategies.DDPStrategy
    assert isinstance(trainer.strategy, kind)


@both
def test_one_progress_bar(L: Any) -> None:
    callbacks = __import__(f"{L.__name__}.callbacks", fromlist=BARS)
    mistake = __import__(f"{L.__name__}.utilities.exceptions", fromlist=["x"]).MisconfigurationException
    two = [getattr(callbacks, name)() for name in BARS]
    with pytest.raises(mistake):
        L.Trainer(**{**QUIET, "enable_progress_bar": True, "callbacks": two})
    with pytest.raises(mistake):
        L.Trainer(**{**QUIET, "enable_progress_bar": False, "callbacks": two[:1]})


def test_a_trainer_can_be_pickled() -> None:
    trainer = pickle.loads(pickle.dumps(ours.Trainer(**{**QUIET, "max_epochs": 7})))
    assert trainer.max_epochs == 7


# -- which GPUs -------------------------------------------------------------------------------------------------
@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("devices", "numbers"),
    [(1, [0]), ("2", [0, 1]), ([2], [2]), ("2,", [2]), ([0, 2], [0, 2]), ("3, 1", [3, 1]), (-1, [0, 1, 2, 3])],
)
def test_gpus_are_the_ones_that_were_named(devices: Any, numbers: list[int]) -> None:
    trainer = ours.Trainer(**{**QUIET, "accelerator": "gpu", "devices": devices})
    assert trainer.device_ids == numbers
    assert trainer.num_devices == len(numbers)
    assert trainer.strategy.root_device == torch.device("cuda", numbers[0]), "known before anything is put there"
    workers = [Job(local_rank=rank, gpus=trainer.gpus) for rank in range(len(numbers))]
    assert [Job(**worker.as_dict()).gpu for worker in workers] == numbers
    with pytest.raises(ConfigurationError, match="twice"):
        ours.Trainer(**{**QUIET, "accelerator": "gpu", "devices": [1, 1]})


@pytest.mark.usefixtures("four_gpus")
def test_a_strategy_computes_on_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    trainer = ours.Trainer(**{**QUIET, "accelerator": "gpu", "devices": [2]})
    assert trainer.strategy_name == "single", "one GPU is one worker, whatever its number"
    strategy = Strategy(None, SINGLE.support)
    strategy.precision = trainer.precision_plugin
    strategy.connect(Job(accelerator="cuda", backend="nccl", gpus=trainer.gpus))
    assert [strategy.device, *chosen] == [torch.device("cuda", 2)] * 2


@pytest.mark.parametrize("name", ["tpu", "hpu", "mps", "xpu"])
def test_accelerators_that_are_not_supported_are_said_to_be_none(name: str) -> None:
    kind = ours.utilities.exceptions.MisconfigurationException
    with pytest.raises(kind, match=f"accelerator='{name}': .* are not supported: use accelerator='gpu'"):
        ours.Trainer(accelerator=name, logger=False)


def test_a_gpu_that_nothing_uses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.Trainer(**{**QUIET, "accelerator": "cpu"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.warns(PossibleUserWarning, match="accelerator='cpu', and there are 2 GPUs here that nothing uses"):
        ours.Trainer(**{**QUIET, "accelerator": "cpu"})
