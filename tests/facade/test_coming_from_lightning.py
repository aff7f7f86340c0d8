"""What docs/coming-from-lightning.md says of each case in which Lightning's figures are not kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import drivetrain.lightning as L
from tests.facade.recorder import QUIET, loader, net

SILENT: dict[str, Any] = {**QUIET, "logger": False}


class Linear(L.LightningModule):  # type: ignore[misc, name-defined]
    """One weight, whose gradient is the mean of the inputs."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.weight = nn.Parameter(torch.zeros(()))
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.weight * batch[0]).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def ones(samples: int, size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples)), batch_size=size)


def test_a_short_last_window_has_its_own_mean() -> None:
    module = Linear()
    L.Trainer(**SILENT, max_epochs=1, accumulate_grad_batches=4).fit(module, ones(10, 2))
    assert module.gradients == pytest.approx([1.0, 1.0])  # Lightning: 1.0, 0.25


def test_schedules_count_optimizer_steps() -> None:
    class Scheduled(Linear):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step", "frequency": 2}]

    module = Scheduled()
    L.Trainer(**SILENT, max_epochs=2, accumulate_grad_batches=2).fit(module, ones(10, 2))
    assert len(module.gradients) == 6 and module.scheduler.last_epoch == 2  # once an epoch


def test_clipping_under_manual_optimisation() -> None:
    class Manual(Linear):
        def __init__(self) -> None:
            super().__init__(lr=1.0)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(10.0 * super().training_step(batch, batch_idx))
            optimizer.step()

    module = Manual()
    L.Trainer(**SILENT, max_epochs=1, gradient_clip_val=0.5).fit(module, ones(2, 2))
    assert module.gradients == [10.0] and float(module.weight.detach()) == pytest.approx(-0.5)


def test_several_optimizers_count_each() -> None:
    class Two(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                with optimizer.toggle_model():
                    self.manual_backward((self.weight * batch[0]).mean())
                    optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    trainer = L.Trainer(**SILENT, max_steps=6, max_epochs=-1)
    trainer.fit(Two(), ones(10, 2))
    assert trainer.global_step == 6 and trainer.batches_stepped == 3


class Noisy(L.LightningModule):  # type: ignore[misc, name-defined]
    """Dropout and a shuffled loader: random numbers at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_a_run_resumed_in_mid_epoch_has_the_same_bits(tmp_path: Path) -> None:
    class Saving(L.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 8:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    with torch.random.fork_rng():
        torch.manual_seed(3)
        whole = Noisy()
        L.Trainer(**SILENT, max_epochs=3, callbacks=Saving()).fit(whole, loader(shuffle=True))
        torch.manual_seed(99)
        resumed = Noisy()
        L.Trainer(**SILENT, max_epochs=3).fit(resumed, loader(shuffle=True), ckpt_path=tmp_path / "middle.ckpt")
    pairs = zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_of_a_validation_within_a_window_has_the_window_ahead(tmp_path: Path) -> None:
    class Validated(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx).exp()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.weight)

    def fit(**resumed: Any) -> tuple[Any, Any]:
        module = Validated(lr=0.1)
        saver = L.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, monitor="weight")
        options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "callbacks": saver}
        trainer = L.Trainer(**{**SILENT, "enable_checkpointing": True}, max_epochs=1, **options)
        trainer.fit(module, ones(12, 2), ones(2, 2), **resumed)
        return trainer, module

    whole, module = fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=3.ckpt"]
    trainer, resumed = fit(ckpt_path=tmp_path / "step=1.ckpt")
    assert trainer.global_step == whole.global_step == 3 and len(resumed.gradients) == 2
    assert torch.equal(resumed.weight, module.weight)


def test_a_module_may_rebuild_itself_after_its_checkpoint(tmp_path: Path) -> None:
    class Growing(Linear):
        def __init__(self, size: int = 1) -> None:
            super().__init__(lr=0.1)
            self.layer = nn.Linear(1, size)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0].reshape(-1, 1)).pow(2).mean() + super().training_step(batch, batch_idx)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.layer = nn.Linear(1, len(checkpoint["state_dict"]["layer.bias"]))

    trainer = L.Trainer(**SILENT, max_epochs=1)
    trainer.fit(Growing(size=3), ones(4, 2))
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    module = Growing()
    trainer = L.Trainer(**SILENT, max_epochs=2)
    trainer.fit(module, ones(4, 2), ckpt_path=tmp_path / "three.ckpt")
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert module.layer.out_features == 3 and {id(p) for p in module.parameters()} == trained


# -- two workers ------------------------------------------------------------------------------------------------
class Values(IterableDataset[Any]):
    """Batches of other sizes on each rank: values 0, 0, 0, 0 and 1 on the first, 10, 10, 10, 10 on the second."""

    def __iter__(self) -> Any:
        first = torch.distributed.get_rank() == 0
        yield from [torch.zeros(4), torch.ones(1)] if first else [torch.full((4,), 10.0)]


class Noted(Linear):
    """Writes what each rank saw."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.seen: dict[str, Any] = {"rows": [], "messages": [], "tested": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        self.seen["rows"] += batch[0].tolist()
        self.seen["messages"].append(self.trainer.strategy.communicator.statistics.messages)
        self.log("own", float(self.global_rank), on_epoch=True)
        self.log("mean", float(self.global_rank), sync_dist=True, on_step=False, on_epoch=True)
        return None if batch_idx == 1 and self.global_rank == 1 else super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.seen["mean_at_end"] = float(self.trainer.callback_metrics["mean"])
        self.seen["own_at_end"] = float(self.trainer.callback_metrics["own_epoch"])

    def on_train_end(self) -> None:
        self.seen["reduced"] = float(self.trainer.strategy.reduce(torch.tensor(1.0 + self.global_rank)))
        self.seen["gathered"] = list(self.all_gather(torch.tensor([self.global_rank])).shape)
        rows = torch.full((3 - self.global_rank, 2), float(self.global_rank), requires_grad=True)
        with torch.enable_grad():
            filled = self.all_gather(rows, sync_grads=True)
            filled.sum().backward()
        assert rows.grad is not None and torch.equal(filled, self.all_gather(rows.detach()))
        self.seen["filled"], self.seen["back"] = filled[..., 0].tolist(), rows.grad[:, 0].tolist()
        self.seen["said"] = self.trainer.strategy.broadcast(["of", self.global_rank], src=1)
        self.seen["any"] = self.trainer.strategy.reduce_boolean_decision(self.global_rank == 1, all=False)
        self.seen["first"] = L.utilities.rank_zero_only(lambda: True)()
        (Path(self.folder) / f"{self.global_rank}.json").write_text(json.dumps(self.seen))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", batch.mean(), sync_dist=True, batch_size=len(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("count", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``(what each rank saw, rows of an unseeded run, results)`` of a fit, a validation and a test on two workers."""
    folder = tmp_path_factory.mktemp("ranks")
    data = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True)
    seen = {}
    for seed in (7, 8):
        module = Noted(str(folder))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            trainer = L.Trainer(**{**SILENT, "devices": 2}, max_epochs=1, log_every_n_steps=50)
            trainer.fit(module, data)
        seen[seed] = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    streams = trainer.validate(module, DataLoader(Values(), batch_size=None), verbose=False)
    counted = trainer.test(module, DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2), verbose=False)
    return seen, streams, counted


def test_what_is_logged_without_sync_dist_is_each_ranks_own(two_ranks: Any) -> None:
    for rank, seen in enumerate(two_ranks[0][7]):
        assert seen["own_at_end"] == float(rank) and seen["mean_at_end"] == 0.5
        assert seen["reduced"] == 1.5 and seen["gathered"] == [2, 1]
        # The row that the second rank lacks is the first rank's first.
        assert seen["filled"] == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
        assert seen["back"] == ([4.0, 2.0, 2.0] if rank == 0 else [2.0, 2.0])
        assert seen["said"] == ["of", 1] and seen["any"] is True
        assert seen["first"] is (True if rank == 0 else None)


def test_no_message_but_gradients_between_boundaries(two_ranks: Any) -> None:
    for seen in two_ranks[0][7]:
        assert len(seen["messages"]) == 3 and len(set(seen["messages"])) == 1


def test_the_shuffle_is_the_seeds_and_a_distributed_samplers(two_ranks: Any) -> None:
    runs = two_ranks[0]
    assert runs[7][0]["rows"] != runs[8][0]["rows"]  # Lightning: the same in every run that seeds nothing
    for rank in (0, 1):
        sampler = DistributedSampler(range(24), num_replicas=2, rank=rank, shuffle=True, seed=7)  # type: ignore[arg-type]
        assert runs[7][rank]["rows"] == [float(i) for i in sampler]


def test_synced_means_are_over_samples(two_ranks: Any) -> None:
    assert two_ranks[1][0]["value"] == pytest.approx((0 * 4 + 1 + 10 * 4) / 9)  # Lightning: 5.125


def test_no_sample_is_evaluated_twice(two_ranks: Any) -> None:
    assert two_ranks[2][0]["count"] == 5.0  # Lightning: 6


@pytest.mark.parametrize(("samples", "size"), [(5, 3), (1, 2)])
def test_no_sample_is_trained_on_twice(samples: int, size: int) -> None:
    module = Linear(lr=1.0)
    data = DataLoader(TensorDataset(torch.arange(1.0, samples + 1)), batch_size=size)
    L.Trainer(**{**SILENT, "devices": 2}, max_epochs=1).fit(module, data)
    assert float(module.weight.detach()) == pytest.approx(-(samples + 1) / 2)  # Lightning: one twice


class Same(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8.0).reshape(4, 2, 1).unbind())


def _fit_stream(mode: str, folder: Path) -> str:
    """What two ranks say when they train on a stream that is not split."""

    class Streaming(Linear):
        def __init__(self) -> None:
            super().__init__(lr=0.1)
            self.folder = folder

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with (self.folder / f"{mode}{self.global_rank}").open("a") as file:
                file.write(f"{batch.reshape(-1).tolist()}\n")
            return (self.weight * batch).mean()

        def on_fit_start(self) -> None:
            import warnings

            warnings.showwarning = lambda message, *rest: (self.folder / "said").open("a").write(str(message))
            warnings.simplefilter("always")

    module = Streaming()
    trainer = L.Trainer(**{**SILENT, "devices": 2}, max_epochs=2, batch=mode)
    trainer.fit(module, DataLoader(Same(), batch_size=None))
    said = folder / "said"
    return said.read_text() if said.exists() else ""


def test_streams_that_are_not_split_are_told_once_or_split(tmp_path: Path) -> None:
    assert _fit_stream("per_process", tmp_path).count("every rank reads the same stream") == 1
    (tmp_path / "said").unlink()
    assert "same stream" not in _fit_stream("global", tmp_path)
    first, second = ((tmp_path / f"global{rank}").read_text() for rank in (0, 1))
    assert first.startswith("[0.0]") and second.startswith("[1.0]")


def test_a_loss_that_is_not_finite_is_told_and_training_goes_on() -> None:
    class Bad(Linear):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 1 else 1.0)

    trainer = L.Trainer(**SILENT, max_epochs=1)
    with pytest.warns(UserWarning, match="at step 2"):
        trainer.fit(Bad(), ones(6, 2))
    assert trainer.global_step == 3


class Combining(L.LightningModule):  # type: ignore[misc, name-defined]
    """Values of each step that ranks combine."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[list[dict[str, float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("both", float(batch_idx + 4 * self.global_rank), on_step=True, on_epoch=True, sync_dist=True)
        self.log("step", float(batch_idx + 4 * self.global_rank), on_step=True, prog_bar=True, sync_dist=True)
        return self.net(batch[0]).pow(2).mean()

    def look(self) -> None:
        trainer = self.trainer
        known = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
        self.seen.append([{name: float(value) for name, value in metrics.items()} for metrics in known])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()
        self.monitored = [self.trainer.monitored(name) for name in ("step", "both_step", "both", "absent")]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_what_ranks_combine_is_known_after_each_step_and_combined_after_the_epoch() -> None:
    """Between two boundaries it is the rank's own, for nothing is sent."""
    module = Combining()
    data = DataLoader(TensorDataset(torch.randn(12, 1)), batch_size=2)
    trainer = L.Trainer(**{**SILENT, "devices": 2, "max_epochs": 2, "log_every_n_steps": 4}, strategy="ddp")
    trainer.fit(module, data)
    callback = [known[0] for known in module.seen]
    own = [0.0, 1.0, 2.0]
    assert [known["both_step"] for known in callback] == [known["step"] for known in callback] == [*own, 3.0 + 1] * 2
    assert [known["both"] for known in callback] == [*own, 3.0] * 2, "after an epoch that of the epoch"
    assert [known["step"] for _, known, _ in module.seen] == [known["step"] for *_, known in module.seen]
    assert module.seen[-1][1] == {"step": 4.0, "both_step": 4.0, "both_epoch": 3.0}
    assert [None if value is None else float(value) for value in module.monitored] == [4.0, 4.0, 3.0, None]
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        **{"both_step": 4.0, "step": 4.0, "both": 3.0, "both_epoch": 3.0}
    }
