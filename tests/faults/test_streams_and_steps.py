"""Ranks that differ: in the number of batches, in what a step returns, in what is logged, in which parameters count."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Trainer, TrainModule
from drivetrain.errors import WorkerError
from tests.runs import QUIET, seeded, train

TWO = pytest.mark.parametrize("strategy", ["ddp", "ring"])


def own_rank(module: TrainModule) -> int:
    return module.trainer.global_rank


class Line(TrainModule):
    """One weight per feature; ``special(rank, batch_idx)`` may change what a step returns."""

    def __init__(self, special: Any = None, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = seeded(lambda: nn.Linear(3, 1))
        self.special, self.lr = special, lr
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch) ** 2).mean()
        return loss if self.special is None else self.special(own_rank(self), batch_idx, loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batches(count: int, size: int = 2) -> DataLoader[Any]:
    return DataLoader(rows(count * size), batch_size=size)  # type: ignore[arg-type]


def expected(gradients: list[list[torch.Tensor]], lr: float = 0.1) -> dict[str, torch.Tensor]:
    """Plain SGD: ``gradients[step]`` are the batches whose mean loss a step descends; None of them adds a zero."""
    layer = seeded(lambda: nn.Linear(3, 1)).double()
    for step in gradients:
        layer.zero_grad()
        torch.stack([(layer(batch) ** 2).sum() / total for batch, total in step]).sum().backward()
        with torch.no_grad():
            for p in layer.parameters():
                p -= lr * p.grad
    return {f"layer.{name}": value.detach() for name, value in layer.named_parameters()}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(float((a[k] - b[k]).abs().max()) < 1e-12 for k in a)


# -- a step without a loss on one rank --------------------------------------------------------------------------
def none_on_rank_1(rank: int, index: int, loss: torch.Tensor) -> Any:
    return None if rank == 1 and index == 1 else loss


def none_everywhere(rank: int, index: int, loss: torch.Tensor) -> Any:
    return None if index == 1 else loss


def zero_on_rank_1(rank: int, index: int, loss: torch.Tensor) -> Any:
    return torch.zeros((), requires_grad=True) if rank == 1 and index == 1 else loss


@TWO
def test_none_on_one_rank_is_a_zero_gradient(strategy: str) -> None:
    data = rows(6)
    run = train(lambda: Line(none_on_rank_1), strategy, 2, data=batches(3), max_epochs=1)
    assert run.steps == 3
    parts = [[(data[2 * i : 2 * i + 2], 2)] for i in range(3)]
    parts[1] = [(data[2:3], 2)]
    assert close(run.weights, expected(parts))


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("ring", 2)])
def test_none_on_all_ranks_is_no_step(strategy: str, devices: int) -> None:
    data = rows(6)
    run = train(lambda: Line(none_everywhere), strategy, devices, data=batches(3), max_epochs=1)
    assert run.steps == 2
    assert close(run.weights, expected([[(data[:2], 2)], [(data[4:], 2)]]))


@TWO
def test_a_loss_that_depends_on_nothing(strategy: str) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1.*depends on no parameter.*find_unused_parameters=true"):
        train(lambda: Line(zero_on_rank_1), strategy, 2, data=batches(3), max_epochs=1)
    data = rows(6)
    options = {"name": strategy, "find_unused_parameters": True}
    run = train(lambda: Line(zero_on_rank_1), options, 2, data=batches(3), max_epochs=1)
    assert close(run.weights, expected([[(data[:2], 2)], [(data[2:3], 2)], [(data[4:], 2)]]))


# -- streams of different lengths -------------------------------------------------------------------------------
class Stream(IterableDataset[Any]):
    """5 batches of 2 rows on rank 0, 7 on rank 1; each rank its own rows, or all the same."""

    def __init__(self, lengths: tuple[int, ...] = (5, 7)) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        yield from rows(2 * self.lengths[rank % len(self.lengths)], seed=rank)


class Validated(Line):
    """Logs the batch's mean number, 2 batches against 4."""

    def __init__(self, on_step: bool) -> None:
        super().__init__()
        self.on_step = on_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", batch.mean(), on_step=self.on_step, on_epoch=True)


class Numbers(IterableDataset[Any]):
    """0..3 on rank 0 and 10..17 on rank 1, in twos: the mean of all is 7.8333."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = torch.distributed.get_rank()
        numbers = range(4) if rank == 0 else range(10, 18)
        return (torch.full((3,), float(n), dtype=torch.float64) for n in numbers)


@TWO
@pytest.mark.parametrize("limit", [None, 6])
def test_training_ends_with_the_shortest_stream(limit: int | None, strategy: str) -> None:
    data = DataLoader(Stream(), batch_size=2)
    run = train(Line, strategy, 2, data=data, batch="per_process", max_epochs=2, limit_train_batches=limit)
    assert run.steps == 10
    pairs = [(rows(14, seed=1)[2 * i : 2 * i + 2], rows(10)[2 * i : 2 * i + 2]) for i in range(5)]
    assert close(run.weights, expected(2 * [[(a, 4), (b, 4)] for a, b in pairs]))


def test_different_streams_are_refused_where_they_should_be_one() -> None:
    with pytest.raises(WorkerError, match=r"read different streams.*batch=per_process"):
        train(Line, "ddp", 2, data=DataLoader(Stream(), batch_size=2))


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1), (2, 3)])
def test_a_stream_that_ends_early_on_one_rank_is_refused_before_its_end(lengths: tuple[int, int]) -> None:
    """That rank would validate while the other trains."""
    data, validation = DataLoader(Stream(lengths), batch_size=2), batches(1)
    with pytest.raises(WorkerError, match=r"read different streams.*2 samples, its last.*batch=per_process"):
        train(Validating, "ddp", 2, data=data, validation=validation)


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1), (2, 2), (0, 2)])
def test_streams_that_ranks_evaluate_together_end_with_the_shortest(lengths: tuple[int, int], tmp_path: Path) -> None:
    """Under sharded parameters the longer one waited for the other's forward pass in vain."""
    said = tmp_path / "said"
    loaders = [DataLoader(Stream(one), batch_size=2) for one in ((3, 3), lengths)]
    run = train(lambda: Told(said), "fsdp", 2, data=loaders[0], validation=loaders[1], batch="per_process")
    assert run.steps == 6 and ("v" in run.metrics) == (min(lengths) > 0)
    told = said.read_text() if said.exists() else ""
    assert ("the ranks' streams are not of one length" in told) == (lengths[0] != lengths[1])


class Own:
    """Batches of twos, ``lengths[rank]`` of them, and says so."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return self.lengths[torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([rows(2, seed=number) for number in range(len(self))])


@pytest.mark.parametrize("check", [0, 2])
def test_a_rank_without_validation_data_goes_along(check: int) -> None:
    """It trained on while the other validated."""
    options: Any = {"batch": "per_process", "use_distributed_sampler": False, "num_sanity_val_steps": check}
    run = train(Validating, "ddp", 2, data=Own(3, 3), validation=Own(2, 0), **options)
    expected = torch.stack([rows(2, seed=number) for number in range(2)]).mean()
    assert run.metrics["v"] == pytest.approx(float(expected), abs=1e-12)
    assert train(Validating, "ddp", 2, data=Own(3, 3), validation=Own(0, 0), **options).metrics == {}


class Validating(Line):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", batch.mean())


class Dealt(IterableDataset[Any]):
    """Of 24 rows every second, as data sets that split themselves give them; all of them where ``whole``."""

    def __init__(self, whole: bool, plain: bool) -> None:
        self.whole, self.plain = whole, plain

    def __iter__(self) -> Iterator[Any]:
        first, step = (0, 1) if self.whole else (torch.distributed.get_rank(), 2)
        return iter([row.numpy() if self.plain else row for row in rows(24)[first::step]])


class Counted(Dealt):
    def __len__(self) -> int:
        return 24 if self.whole else 12


class Told(Line):
    """Writes to a file what is warned of."""

    def __init__(self, said: Path) -> None:
        super().__init__()
        self.said = said

    def on_fit_start(self) -> None:
        warnings.showwarning = lambda message, *rest: print(message, file=self.said.open("a"))  # type: ignore[assignment]
        warnings.simplefilter("always")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", self.layer(batch).mean())


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", [Dealt, Counted])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_stream_that_splits_itself_is_told_where_it_should_be_one(
    strategy: str, kind: type[Dealt], plain: bool, tmp_path: Path
) -> None:
    """Each rank would train on a part of its part, and nobody would see."""
    for whole in (False, True):
        said = tmp_path / str(whole)
        loaders = [DataLoader(kind(whole, plain), batch_size=4) for _ in range(2)]
        train(lambda: Told(said), strategy, 2, data=loaders[0], validation=loaders[1], max_epochs=2)  # noqa: B023
        told = said.read_text() if said.exists() else ""
        for use in ("trains on", "evaluates"):
            assert told.count(f"the ranks read different streams, and each {use}") == (not whole)


@pytest.mark.parametrize("on_step", [False, True])
@pytest.mark.parametrize("interval", [1.0, 2])
def test_validation_of_uneven_streams(on_step: bool, interval: float) -> None:
    run = train(
        lambda: Validated(on_step),
        "ddp",
        2,
        data=DataLoader(Stream(), batch_size=2),
        validation=DataLoader(Numbers(), batch_size=2),
        batch="per_process",
        val_check_interval=interval,
    )
    mean = (sum(range(4)) + sum(range(10, 18))) / 12
    assert run.metrics["v_epoch" if on_step else "v"] == pytest.approx(mean, abs=1e-12)


# -- parameters that a step does not use ------------------------------------------------------------------------
class Heads(Line):
    def __init__(self, when: Any) -> None:
        super().__init__()
        self.extra = seeded(lambda: nn.Linear(3, 1), 7)
        self.when = when

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch) ** 2).mean()
        return loss + (self.extra(batch) ** 2).mean() if self.when(batch_idx) else loss


def never(index: int) -> bool:
    return False


def odd(index: int) -> bool:
    return index % 2 == 1


@TWO
@pytest.mark.parametrize("when", [never, odd])
def test_unused_parameters(strategy: str, when: Any) -> None:
    with pytest.raises(WorkerError, match=r"extra\.weight.*find_unused_parameters=true"):
        train(lambda: Heads(when), strategy, 2, data=batches(4), max_epochs=1)
    found = train(
        lambda: Heads(when), {"name": strategy, "find_unused_parameters": True}, 2, data=batches(4), max_epochs=1
    )
    alone = train(lambda: Heads(when), data=batches(4), max_epochs=1)
    assert close(found.weights, alone.weights)
    start = seeded(lambda: nn.Linear(3, 1), 7).weight.double()
    assert torch.equal(found.weights["extra.weight"], start) == (when is never)


# -- what ranks log ---------------------------------------------------------------------------------------------
class Logs(Line):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rank = own_rank(self)
        self.log("common", float(rank))
        self.log("even" if rank == 0 else "odd", 0.5 if rank == 0 else 0.7)
        if rank == 0:
            self.log("extra", 9.0)


class Sized(Line):
    """Rank 0 gets batches of 4 and 1 with values 0 and 1, rank 1 a batch of 4 with 10."""

    def __init__(self, explicit: bool) -> None:
        super().__init__()
        self.explicit = explicit

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = batch["x"].mean()
        self.log("value", value, batch_size=len(batch["x"]) if self.explicit else None)


class Uneven(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ({"x": torch.full((n,), v, dtype=torch.float64)} for n, v in self.parts())

    def parts(self) -> list[tuple[int, float]]:
        return [(4, 0.0), (1, 1.0)] if torch.distributed.get_rank() == 0 else [(4, 10.0)]


@TWO
def test_names_are_matched_across_ranks(strategy: str) -> None:
    run = train(Logs, strategy, 2, data=batches(2), validation=batches(2), max_epochs=1)
    assert run.metrics == {"common": 0.5, "even": 0.5, "odd": 0.7, "extra": 9.0}


@pytest.mark.parametrize("explicit", [False, True])
def test_means_weigh_samples(explicit: bool) -> None:
    data = DataLoader(Uneven(), batch_size=None)
    run = train(lambda: Sized(explicit), "ddp", 2, data=batches(2), validation=data, batch="per_process", max_epochs=1)
    assert run.metrics["value"] == pytest.approx(41 / 9, abs=1e-12)


# -- accumulation and schedules ---------------------------------------------------------------------------------
class Norms(Line):
    """Notes the norm of the gradient at each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm(), on_step=True, on_epoch=False)
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))


def test_a_short_last_window_is_a_mean_over_itself() -> None:
    one = torch.ones(5, 3, dtype=torch.float64)
    run = train(lambda: Norms(lr=0.0), data=DataLoader(one, batch_size=1), accumulate_grad_batches=4, max_epochs=1)
    assert run.steps == 2
    first, second = run.module.norms
    assert first == pytest.approx(second, rel=1e-14)
    assert first > 0.1


@TWO
def test_accumulation_over_ranks_is_that_of_one(strategy: str) -> None:
    one = train(Line, data=batches(7, 4), accumulate_grad_batches=3)
    two = train(Line, strategy, 2, data=batches(7, 4), accumulate_grad_batches=3)
    own = train(Line, strategy, 2, data=batches(14, 2), accumulate_grad_batches=3, batch="per_process")
    assert one.steps == two.steps == own.steps == 6
    assert close(one.weights, two.weights)
    assert close(one.weights, own.weights)


class Linear(Line):
    """A schedule laid out for the estimated number of updates."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / self.total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=True)
        self.log("total", float(self.total))


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("ring", 4)])
@pytest.mark.parametrize("mode", ["global", "per_process"])
def test_a_schedule_ends_with_training(strategy: str, devices: int, mode: str) -> None:
    run = train(
        Linear, strategy, devices, data=batches(24, 4), batch=mode, accumulate_grad_batches=2, max_epochs=1,
        log_every_n_steps=1,
    )  # fmt: skip
    updates = 12 if mode == "global" else 12 // devices
    assert run.steps == run.metrics["total"] == updates
    assert run.metrics["lr"] == 0.0


# -- evaluation of what does not divide -------------------------------------------------------------------------
class Evaluated(Line):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch.mean())
        self.log("squared", (batch**2).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch[:, 0]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_padding_is_never_counted(devices: int) -> None:
    data = rows(7)
    trainer = Trainer(**QUIET, strategy="ddp" if devices > 1 else "single", devices=devices, precision="64-true")
    module = Evaluated()
    found = trainer.validate(module, DataLoader(data, batch_size=2), verbose=False)[0]  # type: ignore[arg-type]
    assert found["mean"] == pytest.approx(float(data.mean()), abs=1e-12)
    assert found["squared"] == pytest.approx(float((data**2).mean()), abs=1e-12)
    predictions = trainer.predict(module, DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    assert predictions is not None
    assert torch.equal(torch.cat(predictions), data[:, 0])
