"""What cannot work is told in one sentence of the right class, before anything starts where it can be known then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Trainer, TrainModule
from drivetrain.errors import CheckpointError, ConfigurationError, DrivetrainError, TrainingError
from tests.runs import QUIET, Classifier, dataset, loader, train


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 0}, "devices=0: at least one worker"),
        ({"devices": -3}, "devices=-3: at least one worker"),
        ({"devices": "two"}, "devices='two': give a number"),
        ({"devices": 1.5}, "devices=1.5: give a whole number"),
        ({"devices": []}, r"devices=\[\]: at least one worker"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"limit_train_batches": float("nan")}, "limit_train_batches=nan: give a number of batches"),
        ({"val_check_interval": float("nan")}, "val_check_interval=nan"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan"),
        ({"limit_train_batches": -1}, "limit_train_batches=-1: give a number of batches"),
        ({"limit_val_batches": -0.5}, "limit_val_batches=-0.5"),
        ({"limit_test_batches": 1.5}, "limit_test_batches=1.5"),
        ({"limit_predict_batches": True}, "limit_predict_batches=True"),
        ({"overfit_batches": -1}, "overfit_batches=-1"),
        ({"max_epochs": -2}, "max_epochs=-2: give a whole number of at least 0, or -1"),
        ({"max_steps": 1.5}, "max_steps=1.5"),
        ({"min_epochs": -1}, "min_epochs=-1"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps=-2"),
        ({"log_every_n_steps": 0}, "log_every_n_steps=0"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch=0"),
        ({"val_check_interval": 0}, "val_check_interval=0"),
        ({"val_check_interval": 1.5}, "val_check_interval=1.5"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val=-1.0"),
        ({"gradient_clip_algorithm": "nrom"}, "did you mean 'norm'"),
        ({"fast_dev_run": -1}, "fast_dev_run=-1"),
        ({"strategy": "rign"}, "did you mean 'ring'"),
        ({"strategy": {"name": "ddp", "bucket_cap": 1}}, "no option 'bucket_cap': did you mean 'bucket_cap_mb'"),
        ({"strategy": {"name": "single", "x": 1}}, "no option 'x'"),
        ({"strategy": {"name": "ddp", "bucket_cap_mb": "big"}}, "strategy.bucket_cap_mb=big must be a number"),
        ({"strategy": {"name": "ddp", "bucket_cap_mb": float("nan")}}, "strategy.bucket_cap_mb=nan must be finite"),
        ({"strategy": {"name": "ddp", "static_graph": "perhaps"}}, "strategy.static_graph=perhaps must be true or"),
        (  # torch's own words for it: INTERNAL ASSERT FAILED, please report a bug
            {"strategy": {"name": "ddp", "static_graph": True}, "devices": 2, "accumulate_grad_batches": 2},
            "accumulate_grad_batches=2 begins with a pass that is not synchronised",
        ),
        ({"strategy": {"name": "local_sgd", "period": 2.5}, "devices": 2}, "strategy.period=2.5 must be a whole"),
        ({"strategy": {"name": "federated", "clients": "ten"}}, "strategy.clients=ten must be a whole number"),
        ({"strategy": "single", "devices": 2}, "set devices=1 or use strategy=ddp"),
        ({"precision": "bf16-mixd"}, "did you mean 'bf16-mixed'"),
        ({"accelerator": "tpu"}, "accelerator='tpu'"),
        ({"batch": "globl"}, "did you mean 'global'"),
        ({"nonfinite": "rise"}, "did you mean 'raise'"),
        ({"backend": "mpi"}, "backend='mpi'"),
        ({"seed": -1}, "seed=-1"),
        ({"benchmark": "no"}, "benchmark='no': give True or False"),
        ({"deterministic": "always"}, "deterministic='always': give True, False or 'warn'"),
        ({"callbacks": [3]}, "int is no Callback"),
        ({"logger": 3}, "int is no Logger"),
    ],
)
def test_arguments_of_the_trainer(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        Trainer(**{**QUIET, **options})
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_numbers_of_other_libraries_and_flags_as_numbers() -> None:
    limits = {"limit_val_batches": np.int64(3), "limit_train_batches": np.float32(0.5), "max_epochs": torch.tensor(2)}
    trainer = Trainer(**{**QUIET, "enable_progress_bar": 0}, **limits, devices=[np.int64(0)], benchmark=0)
    found = (trainer.limit_val_batches, trainer.limit_train_batches, trainer.max_epochs, trainer.benchmark)
    assert found == (3, 0.5, 2, False) and [*map(type, found)] == [int, float, int, bool]
    assert not trainer.enable_progress_bar
    train(benchmark=0, max_epochs=1)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.handover.in_workers", None)
    (tmp_path / "file").touch()
    for folder, said in ((tmp_path / "file", "file is a file"), (Path("/proc/nowhere"), "cannot be written: /proc")):
        options = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder}
        with pytest.raises(ConfigurationError, match=f"^the folder of checkpoints {folder}.*{said}"):
            Trainer(**options, devices=2).fit(Complete(), loader())


class Bare(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)


class NoOptimizer(Bare):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).sum()


class Complete(NoOptimizer):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.fit(Bare(), loader()), "Bare has no training_step"),
        (lambda t: t.fit(NoOptimizer(), loader()), "NoOptimizer has no configure_optimizers"),
        (lambda t: t.fit(nn.Linear(6, 4), loader()), "needs a TrainModule, not a Linear"),
        (lambda t: t.fit(Complete()), "there is no data to fit with.*train_dataloader"),
        (lambda t: t.fit(Complete(), datamodule=[1]), "datamodule is a list, not a DataModule"),
        (lambda t: t.validate(Bare(), loader()), "Bare has no validation_step"),
        (lambda t: t.test(Bare(), loader()), "Bare has no test_step"),
        (lambda t: t.predict(Bare()), "there is no data to predict with"),
        (lambda t: t.fit(Complete(), loader(), ckpt_path=3), "ckpt_path=3: give a path"),
        (lambda t: t.fit(Complete(), loader(), ckpt_path=""), "ckpt_path='': give a path"),
        (lambda t: t.fit(Complete(), loader(), ckpt_path="x" * 5000), "ckpt_path='x+' cannot be read: file name too"),
        (lambda t: t.fit(Complete(), "train.csv"), "train_dataloaders: a loader must be iterable, this one is a str"),
        (lambda t: t.fit(Complete(), loader(), 0.5), "val_dataloaders: a loader must be iterable, this one is a float"),
        (lambda t: t.fit(Complete(), DataLoader), "train_dataloaders: DataLoader is a class, which gives no batches"),
        (lambda t: t.predict(Complete(), [DataLoader]), "dataloaders: DataLoader is a class, which gives no batches"),
        (lambda t: t.test(), "there is no module"),
        (lambda t: t.save_checkpoint("x"), "needs a module"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(
    call: Callable[[Trainer], Any], said: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr("drivetrain.session.run", lambda *a: started.append(1))
    monkeypatch.setattr("drivetrain.handover.in_workers", lambda *a: started.append(1))
    trainer = Trainer(**QUIET, devices=devices)
    with pytest.raises(ConfigurationError, match=said) as caught:
        call(trainer)
    assert not started and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (DataLoader(TensorDataset(torch.zeros(0, 6), torch.zeros(0))), "the train data is empty"),
        ([], "the train data is empty"),
        (iter([]), "the train data is empty"),
        (3, "a loader must be iterable, this one is a int"),
    ],
)
def test_data_that_cannot_be_trained_on(data: Any, said: str) -> None:
    with pytest.raises((ConfigurationError, TrainingError), match=said):
        train(data=data, max_epochs=1)


class EmptyStream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_an_empty_stream_is_told() -> None:
    with pytest.raises(DrivetrainError, match="the train data is empty"):
        train(data=DataLoader(EmptyStream()), max_epochs=3)


@pytest.mark.parametrize("data", [[], DataLoader(EmptyStream())], ids=["sized", "stream"])
@pytest.mark.parametrize("devices", [1, 2])
def test_empty_data_for_an_evaluation(devices: int, data: Any) -> None:
    class Told(Classifier):
        """Looks at the end whether the first rank was warned, once: where it runs, be that a fork or not."""

        def setup(self, stage: str) -> None:
            self._catching = warnings.catch_warnings(record=True)
            self._caught: Any = self._catching.__enter__()
            warnings.simplefilter("always")

        def teardown(self, stage: str) -> None:
            self._catching.__exit__(None, None, None)
            told = [str(w.message) for w in self._caught if "data is empty" in str(w.message)]
            assert len(told) == (self.trainer.global_rank == 0), told

    options: dict[str, Any] = {"strategy": "ddp" if devices > 1 else "single", "devices": devices, "max_epochs": 2}
    trainer = Trainer(**QUIET, **options, precision="64-true")
    trainer.fit(Told(), loader(), data)
    assert trainer.global_step == 14
    assert trainer.test(Told(), data, verbose=False) == [{}]


@pytest.mark.parametrize("callback", ["early_stopping", "model_checkpoint"])
def test_a_monitor_that_is_never_logged(callback: str, tmp_path: Path) -> None:
    from drivetrain_plugins.callbacks.early_stopping import EarlyStopping
    from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint

    made = EarlyStopping("val/los") if callback == "early_stopping" else ModelCheckpoint(tmp_path, monitor="val/los")
    options = {"enable_checkpointing": None} if callback == "model_checkpoint" else {}
    with pytest.raises(TrainingError, match=r"monitor='val/los'.*did you mean 'val/loss'"):
        train(validation=loader(10), callbacks=[made], max_epochs=1, **options)


def test_callbacks_with_one_key() -> None:
    class Counting(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    Trainer(**QUIET, callbacks=[Callback(), Callback()])  # they have no state to confuse
    with pytest.raises(ConfigurationError, match=r"two callbacks have the state key '\S*Counting'"):
        Trainer(**QUIET, callbacks=[Counting(), Counting()])


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_checkpoint_that_is_not_there(stage: str, tmp_path: Path) -> None:
    trainer = Trainer(**QUIET, max_epochs=1, precision="64-true", default_root_dir=tmp_path)
    with pytest.raises((CheckpointError, ConfigurationError), match="missing"):
        getattr(trainer, stage)(Classifier(), loader(), ckpt_path=tmp_path / "missing")
    for spec in ("best", "last"):
        with pytest.raises((CheckpointError, ConfigurationError), match=r"there is no (complete|best) checkpoint|best"):
            trainer.test(Classifier(), loader(), ckpt_path=spec, verbose=False)


class Wider(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class OtherShape(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.Linear(6, 8)
        self.net[2] = nn.Linear(8, 16)


class Other(Classifier):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Wider, r"does not fit Wider: missing \['more.bias', 'more.weight'\]"),
        (OtherShape, "does not fit OtherShape.*net.0.weight"),
        (Other, "the checkpoint has 1 optimizers, the module configures 2"),
    ],
)
def test_a_checkpoint_that_does_not_fit(make: type[Classifier], said: str, tmp_path: Path) -> None:
    outcome = train(max_epochs=1)
    outcome.trainer.save_checkpoint(tmp_path / "saved")
    trainer = Trainer(**QUIET, max_epochs=2, precision="64-true")
    with pytest.raises(CheckpointError, match=said):
        trainer.fit(make(), loader(), ckpt_path=tmp_path / "saved")


def test_weights_alone_cannot_be_gone_on_from(tmp_path: Path) -> None:
    outcome = train(max_epochs=1)
    outcome.trainer.save_checkpoint(tmp_path / "saved", weights_only=True)
    trainer = Trainer(**QUIET, max_epochs=2, precision="64-true")
    with pytest.raises(CheckpointError, match="holds weights only"):
        trainer.fit(Classifier(), loader(), ckpt_path=tmp_path / "saved")
    trainer.validate(Classifier(), loader(), ckpt_path=tmp_path / "saved", verbose=False)


def test_the_rank_that_fails_is_named() -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1 and batch_idx == 2:
                raise ValueError("a fault of the model")
            return self.loss(batch)

    with pytest.raises(DrivetrainError, match=r"rank 1[\s\S]*a fault of the model") as caught:
        train(Fails, "ddp", 2, max_epochs=1)
    assert caught.value.exit_code == 1


def test_a_loss_without_parameters_on_two_ranks() -> None:
    class Unused(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            skips = batch_idx == 3 and self.global_rank == 1
            return None if skips else self.loss(batch)

    with pytest.raises(DrivetrainError, match=r"parameters without a gradient on rank .*: never.weight, never.bias"):
        train(Unused, "ddp", 2, max_epochs=1)
    assert train(Unused, {"name": "ddp", "find_unused_parameters": True}, 2, max_epochs=1).steps == 7


def test_the_batches_of_ranks_must_be_of_one_stream() -> None:
    class Random(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            import torch.distributed as dist

            x, y = dataset(51).tensors
            for i in range(20 + 5 * dist.get_rank()):
                yield x[i], y[i]

    with pytest.raises(DrivetrainError, match="the ranks read different streams"):
        train(strategy="ddp", devices=2, data=DataLoader(Random(), batch_size=8), max_epochs=1)
