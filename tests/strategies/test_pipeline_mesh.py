"""strategy=mesh with pipelines side by side: other shapes, odd losses, statistics, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # before the workers are forked
from torch import nn

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError
from tests.runs import QUIET, Classifier, difference, loader, train
from tests.strategies.gpt import tiny_gpt
from tests.strategies.parity import check_parity


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"data": 1, "pipeline": 2, "schedule": "1f1b"}, 2),
        ({"data": 2, "pipeline": 1, "schedule": "1f1b"}, 2),
        ({"data": 2, "pipeline": 2, "schedule": "interleaved_1f1b"}, 4),
    ],
)
def test_other_shapes_and_tied_weights(options: dict[str, Any], devices: int) -> None:
    outcome = check_parity({"name": "mesh", **options}, devices, make=partial(tiny_gpt, True), max_steps=6)
    assert torch.equal(outcome.weights["model.token.weight"], outcome.weights["model.head.weight"])


class Odd(Classifier):
    """Losses that weigh themselves; a batch that is skipped, and pieces of batches that are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses, kept = nn.functional.cross_entropy(self.net(x), y, reduction="none"), y != 0
        self.log("train/kept", kept.double().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx == 1 or not kept.any():
            return None
        return {"loss": (losses * kept).sum() / kept.sum(), "weight": float(kept.sum())}


def test_weighted_and_skipped_losses() -> None:
    options: dict[str, Any] = {"data": loader(51, 4), "gradient_clip_val": 0.3, "validation": loader(23, 5, False)}
    strategy = {"name": "mesh", "data": 2, "pipeline": 2, "microbatches": 2}
    found = difference(train(Odd, **options), train(Odd, strategy, 4, **options))
    assert max(found.values()) < 1e-10


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


def test_running_statistics_are_averaged_as_under_ddp() -> None:
    options: dict[str, Any] = {"data": loader(48), "validation": loader(23, 5, False), "max_epochs": 1}
    strategy = {"name": "mesh", "data": 2, "pipeline": 2, "microbatches": 1}
    expected = train(Normed, "ddp", 2, **options)
    assert max(difference(expected, train(Normed, strategy, 4, **options)).values()) < 1e-10
    assert max(difference(expected, train(Normed, "fsdp", 2, **options)).values()) < 1e-10


def test_predictions_come_once() -> None:
    module, data = Classifier().double(), loader(23, 5, False)
    expected = torch.cat(Trainer(strategy="single", precision="64-true", **QUIET).predict(module, data))
    trainer = Trainer(strategy={"name": "mesh", "pipeline": 2}, devices=4, precision="64-true", **QUIET)
    found = torch.cat(trainer.predict(module, data))
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pipeline": 3}, "do not multiply to the 4 workers"),
        ({"pipeline": 0}, "sizes are at least 1"),
        ({"pipeline": 2, "tensor": 2, "data": 1}, "strategy.pipeline=2 goes with strategy.data only"),
        ({"pipeline": 2, "shard": 2, "data": 1}, "strategy.pipeline=2 goes with strategy.data only"),
        ({"schedule": "1f1b"}, "strategy.schedule=1f1b has a meaning with strategy.pipeline only"),
        ({"pipeline": 2, "wrap": "Block"}, "strategy.wrap=Block has a meaning with strategy.shard above 1 only"),
        ({"pipeline": 1, "schedule": "interleaved_1f1b"}, "a pipeline of 1 has none"),
        ({"pipeline": 4, "schedule": "1f1b", "microbatches": 2}, "as many microbatches as the 4 stages"),
    ],
)
def test_meshes_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Trainer(strategy={"name": "mesh", **options}, devices=4, **QUIET)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"compile": "eager"}, "set compile=false"), ({"batch": "per_process"}, "set trainer.batch=global")],
)
def test_what_pipelines_do_not_do(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Trainer(strategy={"name": "mesh", "pipeline": 2}, devices=4, **given, **QUIET)


def test_too_few_blocks_are_refused_before_launch() -> None:
    trainer = Trainer(strategy={"name": "mesh", "data": 1, "pipeline": 6}, devices=6, max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match="6 stages and net has 5 blocks"):
        trainer.fit(Classifier(), loader())
