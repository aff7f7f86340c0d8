"""Checkpoints as one file: they move between Lightning and drivetrain both ways, and resume to the bit here."""

from __future__ import annotations

import argparse
import errno
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import drivetrain
import drivetrain.lightning as ours
from drivetrain import checkpoint
from drivetrain.checkpoint import layout, single
from drivetrain.checkpoint.kept_hyperparameters import read_hyperparameters, write_hyperparameters
from drivetrain.cli import export
from drivetrain.errors import CheckpointError, ConfigurationError
from tests.resume.test_optimizers import Counting, Slow
from tests.runs import QUIET, dataset, seeded

SIDES = {"lightning": lightning, "drivetrain": ours}
MOMENTS = ("batch", "validation", "epoch", "end")


def loader(samples: int = 27, size: int = 4) -> DataLoader[Any]:
    return DataLoader(dataset(samples), batch_size=size, shuffle=False)


class Body:
    """A module without a base: mixed with either library's."""

    def __init__(self: Any, width: int = 8, dropout: float = 0.0, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = seeded(
            lambda: nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4)).double()
        )
        self.dropout = nn.Dropout(dropout)
        self.seen: list[Any] = []
        self.hooked: list[str] = []

    def loss(self: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(self.dropout(batch[0])), batch[1])

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((self.current_epoch, self.global_step, batch_idx, loss.item(), lr))
        self.log("loss", loss)
        return loss

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": self.net[3].parameters(), "lr": 0.05}, {"params": self.net[:2].parameters()}], lr=0.02
        )
        step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": step, "interval": "step"}, torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [*checkpoint["state_dict"]]

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        self.hooked = checkpoint["mine"]


MODULES = {
    name: type("Module", (Body, side.LightningModule), {"__qualname__": "Module"}) for name, side in SIDES.items()
}


def saver(side: str, folder: Path) -> Any:
    """Saves at every moment of the second epoch."""

    class Saver(SIDES[side].callbacks.Checkpoint):  # type: ignore[name-defined, misc]
        def save(self, trainer: Any, moment: str) -> None:
            if trainer.current_epoch == 1 and not trainer.sanity_checking:
                trainer.save_checkpoint(folder / f"{moment}.ckpt")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.save(trainer, "batch")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.save(trainer, "validation")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.save(trainer, "epoch")

    return Saver()


def fit(side: str, epochs: int, resume: Any = None, callbacks: Any = (), module: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {**QUIET, "precision": "64-true", "max_epochs": epochs, "log_every_n_steps": 1}
    settings["enable_checkpointing"] = bool(callbacks)
    trainer = SIDES[side].Trainer(**{**settings, "callbacks": list(callbacks), **options})
    module = module or MODULES[side]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(), loader(7), ckpt_path=resume)
    return trainer, module


def state(trainer: Any, module: Any) -> dict[str, Any]:
    packed = trainer.optimizers[0].state_dict()
    return {
        "weights": [*module.state_dict().values()],
        "moments": [value for one in packed["state"].values() for value in one.values()],
        "rates": [group["lr"] for group in packed["param_groups"]],
        "counters": (trainer.current_epoch, trainer.global_step),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both libraries saved at each moment of the second epoch."""
    root = tmp_path_factory.mktemp("files")
    for side in SIDES:
        folder = root / side
        trainer, _ = fit(side, 2, callbacks=[saver(side, folder)])
        trainer.save_checkpoint(folder / "end.ckpt")
    return root


@pytest.fixture(scope="module")
def straight() -> tuple[Any, list[Any]]:
    trainer, module = fit("lightning", 3)
    return state(trainer, module), module.seen


@pytest.mark.parametrize("moment", MOMENTS)
def test_goes_on_as_lightning_would(files: Path, straight: tuple[Any, list[Any]], moment: str) -> None:
    """Each side goes on from each side's file; losses, rates, weights and optimizer states are Lightning's own."""
    for writer in SIDES:
        trainer, module = fit("drivetrain", 3, resume=files / writer / f"{moment}.ckpt")
        assert module.seen == straight[1][10 if moment == "batch" else 14 :], writer
        assert equal(state(trainer, module), straight[0]), writer
        assert module.hooked == [*module.state_dict()]
    # Lightning reads an epoch's data from its start again, also where it goes on in the midst of the epoch.
    (first, one), (second, two) = (fit("lightning", 3, resume=files / side / f"{moment}.ckpt") for side in SIDES)
    assert one.seen == two.seen
    assert equal(state(first, one), state(second, two))


def test_the_dictionary_is_lightnings(files: Path) -> None:
    """The same keys, counters and states under them; one key more, of ours."""
    for moment in MOMENTS:
        theirs = torch.load(files / "lightning" / f"{moment}.ckpt", weights_only=True)
        mine = torch.load(files / "drivetrain" / f"{moment}.ckpt", weights_only=True)
        assert mine.keys() - theirs.keys() == {layout.OURS}
        assert not theirs.keys() - mine.keys()
        for key in (
            "epoch",
            "global_step",
            "state_dict",
            "optimizer_states",
            "hyper_parameters",
            "hparams_name",
            "mine",
        ):
            assert equal(mine[key], theirs[key]), (moment, key)
        schedulers = [[s["last_epoch"] for s in content["lr_schedulers"]] for content in (mine, theirs)]
        assert schedulers[0] == schedulers[1]
        assert mine["loops"].keys() == theirs["loops"].keys()
        ours_fit, theirs_fit = mine["loops"]["fit_loop"], theirs["loops"]["fit_loop"]
        assert ours_fit.keys() == theirs_fit.keys()
        for key in theirs_fit.keys() - {"epoch_loop.scheduler_progress"}:  # counts that nothing reads
            assert ours_fit[key] == theirs_fit[key], (moment, key)


def test_resumes_to_the_bit_with_random_numbers(tmp_path: Path) -> None:
    """Dropout goes on where it was, which Lightning's own files cannot do."""
    torch.manual_seed(3)
    trainer, module = fit(
        "drivetrain", 3, callbacks=[saver("drivetrain", tmp_path)], module=MODULES["drivetrain"](8, 0.5)
    )
    torch.manual_seed(99)
    resumed, again = fit("drivetrain", 3, resume=tmp_path / "batch.ckpt", module=MODULES["drivetrain"](8, 0.5))
    assert again.seen == module.seen[10:]
    assert equal(state(resumed, again), state(trainer, module))


def test_directory_becomes_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both formats hold the same run; what is exported from the one loads under Lightning."""
    stopping = drivetrain.Trainer(**{**QUIET, "precision": "64-true", "max_epochs": 2, "log_every_n_steps": 1})
    module = MODULES["drivetrain"]()
    stopping.fit(module, loader(), loader(7))
    stopping.save_checkpoint(tmp_path / "run.ckpt")
    assert export.main([str(tmp_path / "run.ckpt"), "--to", str(tmp_path / "file.ckpt")]) == 0
    assert "file.ckpt" in capsys.readouterr().out
    expected, _ = fit("lightning", 3, resume=tmp_path / "file.ckpt")
    trainer, again = fit("drivetrain", 3, resume=tmp_path / "file.ckpt")
    assert equal(state(trainer, again)["weights"], [*expected.lightning_module.state_dict().values()])
    assert export.main([str(tmp_path / "file.ckpt"), "--to", str(tmp_path / "more.ckpt")]) == 2
    assert "is one file already" in capsys.readouterr().err
    assert checkpoint.consolidate(tmp_path / "file.ckpt").keys() == module.state_dict().keys()


def test_evaluates_from_files(files: Path) -> None:
    path = files / "lightning" / "end.ckpt"
    theirs, there = fit("lightning", 0)
    mine, here = fit("drivetrain", 0)
    for stage in ("validate", "test"):
        results = [
            getattr(t, stage)(m, loader(7), ckpt_path=path, verbose=False)[0]
            for t, m in ((theirs, there), (mine, here))
        ]
        assert results[0] == pytest.approx(results[1], rel=1e-12)
    predictions = [t.predict(m, loader(7), ckpt_path=path) for t, m in ((theirs, there), (mine, here))]
    assert all(map(torch.equal, *predictions))


@pytest.mark.parametrize("side", SIDES)
def test_evaluation_gives_states_back(side: str, tmp_path: Path) -> None:
    """Callbacks (averages of weights, say) and the data module are as saved when a file is evaluated."""
    library = SIDES[side]

    class Counter(library.Callback):  # type: ignore[name-defined, misc]
        batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    class Data(library.LightningDataModule):  # type: ignore[name-defined, misc]
        read = 0

        def train_dataloader(self) -> Any:
            return loader()

        def test_dataloader(self) -> Any:
            return loader(7)

        predict_dataloader = test_dataloader

        def state_dict(self) -> dict[str, Any]:
            return {"read": 27}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read += state["read"]

    def trainer(counter: Any) -> Any:
        options = {**QUIET, "precision": "64-true", "enable_checkpointing": False}
        return library.Trainer(**options, max_epochs=1, callbacks=[counter])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = trainer(Counter())
        fitted.fit(MODULES[side](), datamodule=Data())
        fitted.save_checkpoint(tmp_path / "one.ckpt")
        counter, data = Counter(), Data()
        trainer(counter).test(MODULES[side](), datamodule=data, ckpt_path=tmp_path / "one.ckpt", verbose=False)
        assert (counter.batches, data.read) == (7, 27)
        trainer(counter).predict(MODULES[side](), datamodule=data, ckpt_path=tmp_path / "one.ckpt")
        assert data.read == 54


def test_load_from_checkpoint(files: Path, tmp_path: Path) -> None:
    for writer in SIDES:
        for reader in SIDES:
            module = MODULES[reader].load_from_checkpoint(files / writer / "end.ckpt")
            assert module.hparams.width == 8 and module.training
            assert equal(
                [*module.state_dict().values()], [*checkpoint.consolidate(files / writer / "end.ckpt").values()]
            )
    path = files / "lightning" / "end.ckpt"
    kind = MODULES["drivetrain"]
    assert kind.load_from_checkpoint(path, dropout=0.25).hparams.dropout == 0.25
    with open(path, "rb") as stream:
        assert kind.load_from_checkpoint(stream, map_location="cpu").hparams.width == 8
    (tmp_path / "hparams.yaml").write_text("width: 8\ndropout: 0.125\n")
    assert kind.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml").hparams.dropout == 0.125
    for side in SIDES:  # a file that is missing has none, and what the checkpoint holds does not take its place
        with pytest.warns(RuntimeWarning, match=r"absent\.yaml"):
            found = MODULES[side].load_from_checkpoint(path, hparams_file=tmp_path / "absent.yaml", width=8)
        assert (found.hparams.width, found.hparams.dropout) == (8, MODULES[side]().hparams.dropout)
    with pytest.raises(CheckpointError, match="do not fit Module"):
        kind.load_from_checkpoint(path, width=9)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        kind.load_from_checkpoint(tmp_path / "absent.ckpt")
    with pytest.raises(CheckpointError, match="download it"):
        kind.load_from_checkpoint("https://example.org/a.ckpt")
    narrow = torch.load(path, weights_only=True)
    del narrow["state_dict"]["net.3.bias"]
    single.write(narrow, tmp_path / "narrow.ckpt")
    with pytest.warns(UserWarning, match=r"missing in the checkpoint \['net.3.bias'\]"):
        kind.load_from_checkpoint(tmp_path / "narrow.ckpt", strict=False)


class Configured(ours.LightningModule):  # type: ignore[misc, name-defined]
    """Made with one configuration."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)
        self.net = nn.Linear(cfg.model["width"], 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Given(Configured):
    """Made with a network and a path."""

    def __init__(self, net: nn.Module, folder: Path, size: int = 3) -> None:
        ours.LightningModule.__init__(self)
        self.save_hyperparameters()
        self.net = net


def saved(module: Any, path: Path) -> Path:
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 6)), batch_size=2)
    trainer = ours.Trainer(**{**QUIET, "max_epochs": 1})
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    return path


def test_hyperparameters_of_any_kind(tmp_path: Path) -> None:
    """A file always loads with plain loading; objects of classes are made where the caller trusts the file."""
    path = saved(Configured(argparse.Namespace(model={"width": 6})), tmp_path / "a.ckpt")
    assert Configured.load_from_checkpoint(path).hparams.model["width"] == 6
    assert torch.load(path, weights_only=True)["hparams_name"] == "cfg"

    class Theirs(lightning.LightningModule):
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.net = nn.Linear(cfg.model["width"], 1)

    assert Theirs.load_from_checkpoint(path).net.weight.shape == (1, 6)
    path = saved(Given(nn.Linear(6, 1), Path("/data/x")), tmp_path / "b.ckpt")
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"] == {"folder": "/data/x", "size": 3}
    with pytest.raises(CheckpointError, match=r"Given needs net, .* pass net=\.\.\., or weights_only=False"):
        Given.load_from_checkpoint(path)
    module = Given.load_from_checkpoint(path, net=nn.Linear(6, 1))
    assert module.hparams.folder == Path("/data/x")
    trusted = Given.load_from_checkpoint(path, weights_only=False)
    assert torch.equal(trusted.net.weight, content["state_dict"]["net.weight"])


class Odd:
    """What plain loading must not make."""


class Options:
    """A configuration of a project's own kind: no plain data."""

    def __init__(self, width: int) -> None:
        self.width = width


class Made:
    """A module without a base, made with a configuration and, perhaps, with something else."""

    def __init__(self, options: Any, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()  # type: ignore[attr-defined]
        self.net = nn.Linear(options.width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)  # type: ignore[attr-defined]


MADE = {side: type("Made", (Made, library.LightningModule), {}) for side, library in SIDES.items()}


@pytest.mark.parametrize("side", SIDES)
def test_what_the_user_allowed_is_made(side: str, tmp_path: Path) -> None:
    """``torch.serialization.safe_globals`` names a class: an object of it comes back without trust in the file."""
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 6)), batch_size=2)
    cls = MADE[side]
    trainer = SIDES[side].Trainer(**{**QUIET, "max_epochs": 1})
    trainer.fit(cls(Options(6)), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with torch.serialization.safe_globals([Options]):
        module = cls.load_from_checkpoint(tmp_path / "a.ckpt")
    assert type(module.hparams.options) is Options
    assert module.hparams.options.width == 6
    assert torch.equal(module.net.weight, trainer.lightning_module.net.weight)
    with pytest.raises(Exception, match=r"weights_only"):  # where it is allowed no longer
        cls.load_from_checkpoint(tmp_path / "a.ckpt")


def test_what_the_user_did_not_allow_is_not_made(tmp_path: Path) -> None:
    path = saved(MADE["drivetrain"](Options(6), Odd()), tmp_path / "a.ckpt")
    with torch.serialization.safe_globals([Options]), pytest.warns(UserWarning, match="with the defaults of extra"):
        module = MADE["drivetrain"].load_from_checkpoint(path)
    assert (module.hparams.options.width, module.hparams.extra) == (6, None)
    with torch.serialization.safe_globals([Odd]), pytest.raises(CheckpointError, match="needs options, which"):
        MADE["drivetrain"].load_from_checkpoint(path)


def test_trust_is_asked_for(files: Path, tmp_path: Path) -> None:
    content = torch.load(files / "lightning" / "end.ckpt", weights_only=True)
    path = single.write({**content, "odd": Odd()}, tmp_path / "odd.ckpt")
    sentence = r"odd.ckpt holds an object of \S*test_lightning_file.Odd, .* pass weights_only=False if you trust"
    for call in (
        lambda: MODULES["drivetrain"].load_from_checkpoint(path),
        lambda: fit("drivetrain", 3, resume=path),
        lambda: fit("drivetrain", 0)[0].validate(MODULES["drivetrain"](), loader(7), ckpt_path=path),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            call()
    MODULES["drivetrain"].load_from_checkpoint(path, weights_only=False)
    trainer, module = fit("drivetrain", 0)
    assert trainer.validate(module, loader(7), ckpt_path=path, weights_only=False, verbose=False)[0]["val"] > 0


def test_damage_is_seen(files: Path, tmp_path: Path) -> None:
    whole = (files / "drivetrain" / "end.ckpt").read_bytes()
    with zipfile.ZipFile(files / "drivetrain" / "end.ckpt") as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
    inside = record.header_offset + record.file_size // 2 + 100
    path = tmp_path / "end.ckpt"
    for name, data in (
        ("changed", whole[:inside] + bytes([whole[inside] ^ 1]) + whole[inside + 1 :]),
        ("cut", whole[: len(whole) // 2]),
    ):
        path.write_bytes(data)
        for call in (
            lambda: MODULES["drivetrain"].load_from_checkpoint(path),
            lambda: fit("drivetrain", 3, resume=path),
        ):
            with pytest.raises(CheckpointError, match=r"the checkpoint \S*end.ckpt is damaged"):
                call()
        assert name
    older = single.write({"state_dict": {}}, tmp_path / "older.ckpt")
    os.utime(older, (1, 1))
    with pytest.warns(UserWarning, match="going back to the checkpoint before it"):
        assert checkpoint.resolve("last", tmp_path) == older


def test_absent_or_complete(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = single.write({"a": 1}, tmp_path / "a.ckpt")

    def full(content: Any, stream: Any) -> None:
        stream.write(b"PK and no more")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"a.ckpt was not saved: No space left .* free space"):
        single.write({"a": 2}, path)
    monkeypatch.undo()
    assert single.read(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.ckpt"]
    for name in ("a.ckpt", "loss[mean]=1.ckpt"):
        (tmp_path / f".{name}.999999999-0123456789ab.writing").write_bytes(b"left by a writer that was killed")
        single.write({"a": 3}, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "loss[mean]=1.ckpt"]


def test_another_optimizer_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files / "lightning" / "end.ckpt"
    monkeypatch.setattr(Body, "configure_optimizers", lambda self: torch.optim.AdamW(self.net[3].parameters()))
    with pytest.raises(CheckpointError, match=r"optimizer has 6 parameters, this one has 2"):
        fit("drivetrain", 3, resume=path)
    weights = {key: torch.load(path, weights_only=True)[key] for key in ("state_dict", "epoch", "global_step", "mine")}
    with pytest.raises(CheckpointError, match="holds weights only"):
        fit("drivetrain", 3, resume=single.write(weights, path.parent / "weights.ckpt"))


def gan(library: Any) -> tuple[Any, Any]:
    """Two optimizers that the module steps, each with a schedule, and data with a state."""

    class Gan(library.LightningModule):  # type: ignore[name-defined, misc]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.maker, self.critic = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 1))
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            softplus, x = nn.functional.softplus, batch[0]
            self.toggle_optimizer(first)
            loss = softplus(-self.critic(self.maker(x))).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
            other = (softplus(self.critic(self.maker(x).detach())) + softplus(-self.critic(x))).mean()
            second.zero_grad()
            self.manual_backward(other)
            second.step()
            self.seen.append((self.current_epoch, self.global_step, batch_idx, loss.item(), other.item()))
            if batch_idx % 2:
                for schedule in self.lr_schedulers():
                    schedule.step()

        def configure_optimizers(self) -> Any:
            one = torch.optim.Adam(self.maker.parameters(), lr=0.01)
            two = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
            schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9), torch.optim.lr_scheduler.StepLR(two, 2)]
            return [one, two], schedules

    class Data(library.LightningDataModule):  # type: ignore[name-defined, misc]
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.read = 0

        def train_dataloader(self) -> Any:
            x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
            return DataLoader(torch.utils.data.TensorDataset(x), batch_size=self.hparams.size)

        def state_dict(self) -> dict[str, Any]:
            return {"read": 7}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read = state["read"]

    return Gan(), Data


def test_several_optimizers_and_data_with_a_state(tmp_path: Path) -> None:
    """Optimized by hand: every optimizer step counts, and each side goes on from each side's files."""

    def run(side: str, epochs: int, resume: Any = None, callbacks: Any = ()) -> Any:
        module, data = gan(SIDES[side])
        loaded = data()
        settings: dict[str, Any] = {**QUIET, "max_epochs": epochs, "enable_checkpointing": bool(callbacks)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = SIDES[side].Trainer(**settings, callbacks=list(callbacks))
            trainer.fit(module, datamodule=loaded, ckpt_path=resume)
        return trainer.global_step, module.seen, [*module.state_dict().values()], loaded.read

    steps, seen, weights, _ = run("lightning", 3)
    assert steps == 30
    for writer, side in SIDES.items():
        folder = tmp_path / writer
        kind = side.callbacks.ModelCheckpoint
        by_step, by_epoch = kind(folder, every_n_train_steps=8), kind(folder, filename="{epoch}")
        run(writer, 2, callbacks=[by_step, by_epoch])
        assert sorted(os.listdir(folder)) == ["epoch=1-step=16.ckpt", "epoch=1.ckpt"]
        for name in os.listdir(folder):
            found = run("drivetrain", 3, folder / name)
            assert found[:1] + found[3:] == (30, 7)
            assert found[1] == seen[-len(found[1]) :] and equal(found[2], weights)
        found = run("lightning", 3, folder / "epoch=1.ckpt")
        assert found == (30, seen[10:], found[2], 7) and equal(found[2], weights)
        _, data = gan(ours)
        theirs = torch.load(folder / "epoch=1.ckpt", weights_only=True)
        assert theirs[layout.DATA_HPARAMS] == {"size": 4}
        assert data.load_from_checkpoint(folder / "epoch=1.ckpt", size=5).hparams.size == 5


def test_the_loss_scale_travels() -> None:
    """A scaler's state lies where Lightning keeps its own."""
    scaler = {"scale": 1024.0, "_growth_tracker": 3}
    shared: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "state_dict": {},
        "loops": dict.fromkeys(("epoch", "batch", "global_step", "batches_seen"), 0)
        | dict.fromkeys(("ended", "validated", "is_last_batch"), False),
        "run": {"automatic": True, "length": 1, "validation": 0, "window": 1},
        "optimizer_states": [],
        "callbacks": {},
        "lr_schedulers": [],
        "precision": {"scaler": scaler},
        "metrics": {},
    }
    assert layout.compose(shared, [], "single")["MixedPrecision"] == scaler


class Halves(MODULES["drivetrain"]):  # type: ignore[misc, valid-type]
    """In single precision and without running statistics, which are another test's matter."""

    def __init__(self) -> None:
        super().__init__(8, 0.5)
        self.net[1] = nn.Identity()
        self.float()

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0].float(), batch[1]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_workers(strategy: str, tmp_path: Path) -> None:
    """One whole file under replicas and under shards; on as many workers it resumes to the bit."""
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "precision": "32-true"}
    torch.manual_seed(5)
    straight, first = fit("drivetrain", 3, callbacks=[saver("drivetrain", tmp_path)], module=Halves(), **options)
    torch.manual_seed(77)
    resumed, again = fit("drivetrain", 3, resume=tmp_path / "batch.ckpt", module=Halves(), **options)
    assert equal([*again.state_dict().values()], [*first.state_dict().values()])
    assert resumed.loss_curve == straight.loss_curve
    content = torch.load(tmp_path / "epoch.ckpt", weights_only=True)
    assert content["state_dict"]["net.0.weight"].shape == (8, 6)
    assert content[layout.OURS]["world_size"] == 2 == len(content[layout.OURS]["own"])
    moments = content["optimizer_states"][0]["state"]
    assert sorted(tuple(one["exp_avg"].shape) for one in moments.values()) == [(4,), (4, 8), (8,), (8, 6)]


class Holder(ours.LightningModule):  # type: ignore[misc, name-defined]
    """Its hyper-parameters are no plain data, nor is the state of its callback."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Keeper(ours.Callback):  # type: ignore[misc, name-defined]
    def state_dict(self) -> dict[str, Any]:
        return {"odd": Odd()}


def test_saved_by_the_caller_once_sharded_workers_are_gone(tmp_path: Path) -> None:
    """The weights are with the caller; an object that is no plain data does not end a run that is done."""
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6)), batch_size=2)
    settings: dict[str, Any] = {**QUIET, "max_epochs": 1, "strategy": "fsdp", "devices": 2}
    trainer = ours.Trainer(**settings, callbacks=[Keeper()])
    module = Holder(nn.Linear(6, 1))
    trainer.fit(module, data)
    with pytest.warns(UserWarning, match="holds the weights and no states of optimizers"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Holder.load_from_checkpoint(tmp_path / "a.ckpt", net=nn.Linear(6, 1))
    assert equal([*again.state_dict().values()], [*module.state_dict().values()])
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert (content["epoch"], content["global_step"]) == (1, 2)
    with pytest.raises(CheckpointError, match="holds weights only"):
        ours.Trainer(**{**QUIET, "max_epochs": 2}).fit(module, data, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("side", ["drivetrain", "directory"])
def test_saved_by_the_caller_once_replicas_are_gone(side: str, tmp_path: Path) -> None:
    """What replicas had at the end of a fit is with the caller: training goes on from its checkpoint to the bit, where
    a directory holds the random states of the first worker, on as many workers anew."""
    common: dict[str, Any] = {**QUIET, "strategy": "ddp", "devices": 2, "precision": "32-true"}
    common |= {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    library = ours if side == "drivetrain" else drivetrain

    def run(epochs: int, **options: Any) -> tuple[Any, Halves]:
        torch.manual_seed(5)
        keeper, module = Counter(), Halves()
        if side == "directory":
            module.dropout = nn.Dropout(0.0)
        trainer = library.Trainer(**common, max_epochs=epochs, callbacks=[keeper], **options.pop("more", {}))
        trainer.fit(module, loader(), loader(9), **options)
        return trainer, module

    more = {} if side == "drivetrain" else {"seed": 3}
    straight, whole = run(3, more=more)
    half, trained = run(2, more=more)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half.save_checkpoint(tmp_path / "a.ckpt")
        half.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    resumed, again = run(3, more=more, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.callbacks[0].batches == straight.callbacks[0].batches == half.callbacks[0].batches * 3 // 2
    assert resumed.global_step == straight.global_step and resumed.loss_curve == straight.loss_curve
    assert equal([*again.state_dict().values()], [*whole.state_dict().values()])
    if side == "drivetrain":
        content = torch.load(tmp_path / "a.ckpt", weights_only=True)
        light = torch.load(tmp_path / "weights.ckpt", weights_only=True)
        assert content["loops"] == light["loops"] and "optimizer_states" not in light
        assert equal([*content["state_dict"].values()], [*trained.state_dict().values()])
        assert content["mine"] == [*content["state_dict"]] and len(content[layout.OURS]["own"]) == 2


class Counter(ours.Callback):  # type: ignore[misc, name-defined]
    batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def test_replicas_whose_callback_keeps_an_object(tmp_path: Path) -> None:
    """Its state stays with the workers; training goes on from the rest."""
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6)), batch_size=2)
    settings: dict[str, Any] = {**QUIET, "strategy": "ddp", "devices": 2}
    trainer, module = ours.Trainer(**settings, max_epochs=1, callbacks=[Keeper()]), Holder(nn.Linear(6, 1))
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"] == {}
    trainer = ours.Trainer(**settings, max_epochs=2)
    trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt")
    assert trainer.global_step == 4


class OnlyWhileItLasts(ours.LightningDataModule):  # type: ignore[misc, name-defined]
    """Has its data, of which its state tells, from ``setup`` to ``teardown``."""

    def setup(self, stage: str) -> None:
        self.data = torch.utils.data.TensorDataset(torch.ones(8, 6))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=2)

    def teardown(self, stage: str) -> None:
        del self.data

    def state_dict(self) -> dict[str, Any]:
        return {"samples": len(self.data)}


def test_replicas_that_cannot_leave_their_state_have_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has no room for it, and a data module that is torn down, end no run that is done."""
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6)), batch_size=2)
    settings: dict[str, Any] = {**QUIET, "strategy": "ddp", "devices": 2, "max_epochs": 1}
    module = Holder(nn.Linear(6, 1))
    before = module.net.weight.clone()
    trainer = ours.Trainer(**settings)
    trainer.fit(module, datamodule=OnlyWhileItLasts())
    assert trainer.status == "completed" and not torch.equal(module.net.weight, before)
    save = torch.save

    def full(content: Any, file: Any) -> None:
        if Path(file).name == "left.pt":
            Path(file).write_bytes(b"PK and no more")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    before, trainer = module.net.weight.clone(), ours.Trainer(**settings)
    trainer.fit(module, data)
    monkeypatch.undo()
    assert trainer.status == "completed" and not torch.equal(module.net.weight, before)
    with pytest.warns(UserWarning, match="no states of optimizers"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")


def test_what_replicas_left_of_a_data_module_that_only_they_set_up(tmp_path: Path) -> None:
    class Kept(OnlyWhileItLasts):
        def teardown(self, stage: str) -> None:
            pass

    trainer = ours.Trainer(**{**QUIET, "strategy": "ddp", "devices": 2, "max_epochs": 1})
    trainer.fit(Holder(nn.Linear(6, 1)), datamodule=Kept())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)[Kept.__qualname__] == {"samples": 8}


def test_a_hook_that_changes_the_callers_checkpoint_changes_that_one_only(tmp_path: Path) -> None:
    """Of what the replicas have left the next one is made as well."""

    class Changes(Halves):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            super().on_save_checkpoint(checkpoint)
            checkpoint["optimizer_states"].clear()
            checkpoint["loops"].clear()

    torch.manual_seed(5)
    module = Changes()
    trainer = drivetrain.Trainer(**{**QUIET, "strategy": "ddp", "devices": 2}, precision="32-true", max_epochs=1)
    trainer.fit(module, loader(), loader(9))
    trainer.save_checkpoint(tmp_path / "changed")
    module.on_save_checkpoint = lambda checkpoint: None  # type: ignore[method-assign]
    trainer.save_checkpoint(tmp_path / "whole")
    shared = checkpoint.load(tmp_path / "whole").shared
    assert len(shared["optimizer_states"]) == 1 and shared["loops"]


def test_the_callers_file_holds_what_lightnings_holds(tmp_path: Path) -> None:
    """Of a fit by replicas, whose parts of each batch make up the batch of Lightning's one process."""
    contents = {}
    for side, options in (("lightning", {}), ("drivetrain", {"strategy": "ddp", "devices": 2, "batch": "global"})):
        torch.manual_seed(5)
        module = MODULES[side]()
        module.net[1] = nn.Identity()
        settings = {**QUIET, "accelerator": "cpu", "devices": 1, "max_epochs": 2, "precision": "64-true", **options}
        trainer = SIDES[side].Trainer(**settings)
        trainer.fit(module, loader(24), loader(8))
        trainer.save_checkpoint(tmp_path / side)
        contents[side] = torch.load(tmp_path / side, weights_only=False)
    expected, found = contents["lightning"], contents["drivetrain"]
    assert {*found} - {layout.OURS} == {*expected}
    for key in ("epoch", "global_step", "lr_schedulers", "hyper_parameters", "mine"):
        assert found[key] == expected[key], key
    assert found["loops"]["fit_loop"]["epoch_progress"] == expected["loops"]["fit_loop"]["epoch_progress"]
    for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert [group["params"] for group in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]
        assert [group["lr"] for group in mine["param_groups"]] == [g["lr"] for g in theirs["param_groups"]]
        assert mine["state"].keys() == theirs["state"].keys()
        for place, moments in theirs["state"].items():
            for name, value in moments.items():
                torch.testing.assert_close(mine["state"][place][name], value, rtol=1e-9, atol=1e-12)
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-9, atol=1e-12)


def test_in_the_midst_of_a_window(tmp_path: Path) -> None:
    """A file may be asked for among the micro-batches of a step: their window is trained anew."""

    class Early(ours.callbacks.Checkpoint):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (trainer.current_epoch, batch_idx) == (1, 3):
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    trainer, module = fit("drivetrain", 2, callbacks=[Early()], accumulate_grad_batches=3)
    content = torch.load(tmp_path / "early.ckpt", weights_only=True)
    assert content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 3
    resumed, again = fit("drivetrain", 2, resume=tmp_path / "early.ckpt", accumulate_grad_batches=3)
    assert again.seen == module.seen[10:]
    weights, expected = (state(*run)["moments"] for run in ((resumed, again), (trainer, module)))
    assert equal(weights, expected)


def test_last_where_there_is_none(tmp_path: Path) -> None:
    """As in Lightning a run that is to go on from its last checkpoint begins where there is none yet."""
    trainer = ours.Trainer(**{**QUIET, "max_epochs": 1}, default_root_dir=tmp_path)
    data = DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 6)), batch_size=2)
    with pytest.warns(UserWarning, match="no checkpoint in .* it starts anew"):
        trainer.fit(Holder(nn.Linear(6, 1)), data, ckpt_path="last")
    assert trainer.global_step == 4
    with pytest.raises(ConfigurationError, match="local files"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options={})


def test_arrays_of_words_are_lists_for_who_reads_the_file_by_himself() -> None:
    """As RecTools does, which takes its items from there: text would be cut short, and no list."""
    words = np.array(["PAD", *map(str, range(2000))])
    mixed = np.array([["PAD", 1], [2.5, None]], dtype=object)
    plain, rest = write_hyperparameters({"words": words, "mixed": mixed}, "hyper_parameters")
    assert plain == {"words": words.tolist(), "mixed": [["PAD", 1], [2.5, None]]}
    for kept in (plain, {"words": str(words), "mixed": str(mixed)}):  # older files had text
        values, _ = read_hyperparameters(kept, rest, True)
        assert np.array_equal(values["words"], words)
        assert np.array_equal(values["mixed"], mixed)


@pytest.mark.parametrize("kind", [Counting, Slow])
@pytest.mark.parametrize("writer", sorted(SIDES))
def test_what_an_optimizer_keeps_beside_the_states_of_parameters_moves_both_ways(
    writer: str, kind: type[torch.optim.SGD], tmp_path: Path
) -> None:
    quiet = {**QUIET, "accelerator": "cpu", "devices": 1, "logger": False}

    def module(side: Any) -> Any:
        class Module(Body, side.LightningModule):  # type: ignore[misc, name-defined]
            def configure_optimizers(self) -> Any:
                return kind(self.parameters(), lr=0.1, momentum=0.9)

        return Module()

    saved: dict[str, Any] = {}
    for name, side in SIDES.items():
        trainer = side.Trainer(**quiet, max_epochs=1)
        trainer.fit(module(side), loader())
        trainer.save_checkpoint(tmp_path / name)
        (state,) = torch.load(tmp_path / name, weights_only=False)["optimizer_states"]
        saved[name] = repr(
            [sorted(state), sorted(state["state"].items(), key=str), state["param_groups"], state.get("slow")]
        )
    assert saved["drivetrain"] == saved["lightning"]
    ends = []
    for side in SIDES.values():
        further = module(side)
        side.Trainer(**quiet, max_epochs=2).fit(further, loader(), ckpt_path=tmp_path / writer, weights_only=False)
        ends.append(repr([further.state_dict(), further.seen]))
    assert ends[0] == ends[1]
