"""``training_step`` returns None on some ranks: what they skip is left out under shards as under replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from drivetrain import TrainModule
from drivetrain.agreement import Agreement
from drivetrain.announcements import Announcements
from drivetrain.errors import WorkerError
from tests.runs import Classifier, Gan, Outcome, dataset, difference, loader, seeded, train
from tests.strategies.gpt import TinyGPT, token_loader

BEFORE, AFTER, NAN = "before", "after", "nan"
SHARDS = {"name": "mesh", "data": 1, "shard": 2, "tensor": 1}
CROSSED = {"name": "mesh", "data": 1, "shard": 2, "tensor": 2}
WHOLE = {"name": "fsdp", "reduce_every_micro_batch": False}


def skipped(step: int, ranks: int) -> dict[int, str]:
    """The ranks without a loss of a batch, and when they find that out: before the forward pass or after."""
    first, last = 0, ranks - 1
    plan: dict[int, dict[int, str]] = {
        3: {last: BEFORE},
        4: {first: AFTER},
        5: {rank: (BEFORE, AFTER)[rank % 2] for rank in range(last)},
        6: {first: NAN},
        8: dict.fromkeys(range(ranks), BEFORE),
        9: {rank: (BEFORE, AFTER)[rank % 2] for rank in range(ranks)},
        13: {first: BEFORE},
    }
    return plan.get(step, {})


class Skips(TrainModule):
    """Mixed in before a module; in one process it leaves out what each of the ``replicas`` would."""

    replicas = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        replicas = self.replicas
        without = skipped(8 * self.trainer.current_epoch + batch_idx, replicas)
        if self.trainer.world_size > 1:
            return self.of_one(batch, without.get(self.trainer.strategy.data.rank))
        if len(without) == replicas:
            return None
        parts = zip(*(tensor.tensor_split(replicas) for tensor in batch), strict=True)
        kept = [part for rank, part in enumerate(parts) if rank not in without and len(part[0])]
        losses = [self.loss(part) * (len(part[0]) / len(batch[0])) for part in kept]
        return torch.stack(losses).sum()

    def of_one(self, batch: Any, found: str | None) -> Any:
        if found == BEFORE:
            return None
        if found == NAN:
            batch = self.spoilt(batch)
        loss = self.loss(batch)
        return loss if found is None else None

    def spoilt(self, batch: Any) -> Any:
        return batch

    def loss(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


class SkippingGPT(Skips, TinyGPT):
    def loss(self, batch: Any) -> torch.Tensor:
        return TinyGPT.loss(self, batch)


class SkippingClassifier(Skips, Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        return Classifier.loss(self, batch)

    def spoilt(self, batch: Any) -> Any:
        return batch[0] * float("nan"), batch[1]


class Blocks(SkippingClassifier):
    """Blocks that are gathered one at a time, one of them within another, called from here and there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = seeded(
            lambda: nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())) for _ in range(3))
        )
        self.unused = seeded(lambda: nn.Linear(2, 2))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        scores = self.net(x)
        for block in [*self.blocks, self.blocks[0]]:
            scores = scores + block(scores)
        with torch.no_grad():
            self.blocks[1](scores)  # is looked at and not trained
        return nn.functional.cross_entropy(scores * self.scale, y)


class Checkpointed(SkippingGPT):
    """Blocks are run forward again in the backward pass."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=self.reentrant)


def of(make: type[Skips], replicas: int) -> type[Skips]:
    return type(f"{make.__name__}{replicas}", (make,), {"replicas": replicas})


def data_of(make: type[Skips]) -> Any:
    if issubclass(make, SkippingGPT):
        return token_loader()
    return DataLoader(dataset(51), batch_size=7)


def asks(*rest: Any) -> None:
    raise AssertionError("a rank asks the others")


def test_where_all_ranks_have_a_loss_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "ask", asks)
    monkeypatch.setattr(Announcements, "ask", asks)
    train(TinyGPT, "fsdp", 2, data=token_loader(), max_epochs=1)


def tells(*rest: Any) -> None:
    raise AssertionError("a rank tells the others")


def test_of_passes_that_a_module_makes_itself_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Announcements, "tell", tells)
    train(Gan, "fsdp", 2, data=loader(), max_epochs=1)


def weights(a: Outcome, b: Outcome) -> float:
    return difference(a, b)["weights"]


def compare(make: type[Skips], strategy: Any, devices: int, replicas: int | None = None, **options: Any) -> Outcome:
    """Hold a run's weights to those of one process that leaves out the same samples."""
    made = of(make, replicas or devices)
    options = {"data": data_of(make), "max_epochs": 2, "timeout": 15, **options}
    run = train(made, strategy, devices, **options)
    assert weights(train(made, **options), run) < 1e-10
    return run


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), (SHARDS, 2)])
def test_batches_that_some_ranks_skip(strategy: Any, devices: int) -> None:
    compare(SkippingGPT, strategy, devices, gradient_clip_val=0.3)


@pytest.mark.parametrize("more", [{}, {"wrap": "Sequential,Linear"}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("make", [SkippingClassifier, Blocks])
def test_modules_of_other_shapes(make: type[Skips], more: dict[str, Any]) -> None:
    compare(make, {"name": "fsdp", **more}, 3)


@pytest.mark.parametrize("strategy", ["fsdp", WHOLE, {**SHARDS, "reduce_every_micro_batch": False}], ids=str)
@pytest.mark.parametrize("accumulate", [2, 3])
def test_windows(strategy: Any, accumulate: int) -> None:
    compare(SkippingGPT, strategy, 2, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_a_rank_without_a_loss_undoes_the_scale_of_the_others(strategy: str) -> None:
    options = {"data": DataLoader(dataset(51), batch_size=7), "max_epochs": 2, "precision": "16-mixed"}
    alone = train(of(SkippingClassifier, 2), **options)
    run = train(of(SkippingClassifier, 2), strategy, 2, **options)
    assert run.steps == alone.steps and weights(alone, run) < 1e-2


def test_groups_that_compute_together_skip_together() -> None:
    compare(SkippingGPT, CROSSED, 4, 2)


def test_blocks_that_run_again_in_the_backward_pass() -> None:
    compare(Checkpointed, "fsdp", 2)


class Drawing(SkippingClassifier):
    """Blocks that draw and keep statistics, of which a rank that skips before them does neither."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(
            lambda: nn.Sequential(
                *(nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3))) for _ in range(3)),
                nn.Linear(6, 4),
            )
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = [buffer.double().sum() for buffer in self.net.buffers()]
        drawn = torch.get_rng_state().double() @ torch.arange(5056, dtype=torch.float64)
        self.log("state", torch.stack([*state, drawn * 1e-6]).sum(), on_epoch=True, on_step=True)


@pytest.mark.parametrize("devices", [2, 3])
def test_random_numbers_and_buffers_of_a_rank_that_skips(devices: int) -> None:
    options: dict[str, Any] = {"data": DataLoader(dataset(48), batch_size=6 * devices // 2 * 2), "max_epochs": 4}
    made = of(Drawing, devices)
    runs = [
        train(made, {"name": name, **more}, devices, **options)
        for name, more in (("ddp", {}), ("fsdp", {"wrap": "Sequential"}))
    ]
    assert max(difference(*runs).values()) < 1e-10


class Weighing(SkippingClassifier):
    """Gives its loss's weight itself."""

    def of_one(self, batch: Any, found: str | None) -> Any:
        loss = super().of_one(batch, found)
        return None if loss is None else {"loss": loss, "weight": (1.0 + (batch[1] == 0).double()).sum()}


@pytest.mark.parametrize("strategy", ["fsdp", SHARDS], ids=str)
def test_losses_with_weights_of_their_own(strategy: Any) -> None:
    options: dict[str, Any] = {"data": data_of(Weighing), "max_epochs": 2}
    made = type("Weighing2", (Weighing,), {"tensor_parallel_plan": lambda self: {"net.0": "columns", "net.2": "rows"}})
    runs = [train(made, name, 2, **options) for name in ("ddp", strategy)]
    assert max(difference(*runs).values()) < 1e-10


class CalledInCheckpoints(SkippingGPT):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        model = self.model
        for name, block in list(model.blocks.named_children()):
            setattr(model.blocks, name, Again(block, self.reentrant))


class Again(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class CalledInReentrantCheckpoints(CalledInCheckpoints):
    reentrant = True


def test_blocks_within_checkpoints() -> None:
    compare(CalledInCheckpoints, {"name": "fsdp", "wrap": "Block"}, 2)


def refused(make: Any, strategy: Any, match: str, devices: int = 2, **options: Any) -> None:
    with pytest.raises(WorkerError, match=match):
        train(make, strategy, devices, **{"data": data_of(make), "max_epochs": 1, "timeout": 60, **options})


HAS_A_LOSS = r"training_step returned None on rank 1: with sharded parameters .* rank 0 has a loss"


def test_what_a_pass_goes_through_is_not_known_within_reentrant_checkpoints() -> None:
    refused(CalledInReentrantCheckpoints, {"name": "fsdp", "wrap": "Block"}, HAS_A_LOSS)


class SkipsAtOnce(SkippingGPT):
    found = BEFORE

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.of_one(batch, self.found if self.trainer.global_rank == 1 else None)


class LooksAndSkipsAtOnce(SkipsAtOnce):
    found = AFTER


@pytest.mark.parametrize("make", [SkipsAtOnce, LooksAndSkipsAtOnce])
@pytest.mark.parametrize("strategy", ["fsdp", SHARDS], ids=str)
def test_the_first_batch_of_a_rank_is_not_skipped_alone(strategy: Any, make: Any) -> None:
    refused(make, strategy, HAS_A_LOSS)


class InTurn(SkippingClassifier):
    """Uses its blocks in another order in each step, so that the last one says nothing of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = seeded(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            return None
        scores = self.net(batch[0])
        for number in self.used(batch_idx):
            scores = self.blocks[number](scores)
        return nn.functional.cross_entropy(scores, batch[1])

    def used(self, index: int) -> list[int]:
        return [(index + number) % 3 for number in range(3)]


class OneInTurn(InTurn):
    def used(self, index: int) -> list[int]:
        return [index % 3]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (InTurn, r"None on rank 1.* that of its last step .* rank 0 went through other parts"),
        (OneInTurn, r"depend on different parameters \(blocks"),
    ],
)
def test_other_ranks_that_go_through_other_parts_are_noticed(make: Any, sentence: str) -> None:
    refused(make, "fsdp", sentence)


class SkipsAlone(SkippingGPT):
    """One of two ranks that share each matrix has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.of_one(batch, AFTER if batch_idx == 1 and self.trainer.global_rank == 1 else None)


def test_ranks_of_one_tensor_group_have_a_loss_together() -> None:
    refused(SkipsAlone, CROSSED, r"None on rank 1 and a loss on rank 0, which compute the same batch together", 4)


def test_compiled() -> None:
    compare(SkippingGPT, "fsdp", 2, compile="eager")
