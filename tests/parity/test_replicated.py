"""ddp and ring give the run of ``single``, whatever the number of workers and however the data divides."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.runs import Classifier, Gan, Outcome, difference, loader, train

STRATEGIES = ["ddp", "ring"]
SIZES = [1, 2, 3, 4]

CASES: dict[str, dict[str, Any]] = {
    # momentum, weight decay, clipping by norm, accumulation with a short last window, a tail of 3 samples
    "accumulation": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "validation": True},
    # 50 samples in batches of 7: a tail of one sample, fewer than the workers
    "tail_of_one": {"samples": 50, "batch_size": 7, "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "adamw": {"optimizer": "adamw", "validation": True},
}


def _run(case: str, strategy: str, devices: int) -> Outcome:
    options = dict(CASES[case])
    data = loader(options.pop("samples", 51), options.pop("batch_size", 8))
    optimizer = options.pop("optimizer", "sgd")
    validation = loader(23, 5, shuffle=False) if options.pop("validation", False) else None
    return train(lambda: Classifier(optimizer), strategy, devices, data=data, validation=validation, **options)


@cache
def _reference(case: str) -> Outcome:
    return _run(case, "single", 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("devices", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_is_that_of_single(case: str, devices: int, strategy: str) -> None:
    found = difference(_reference(case), _run(case, strategy, devices))
    assert found["curve"] < 1e-10
    assert found["weights"] < 1e-10
    assert found["metrics"] < 1e-12 * 10  # train metrics follow the weights; evaluation alone is checked tighter below


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gan_with_two_toggled_optimizers(devices: int, strategy: str) -> None:
    options = {"gradient_clip_val": 0.5}
    found = difference(train(Gan, **options), train(Gan, strategy, devices, **options))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lbfgs_reads_the_global_loss(devices: int, strategy: str) -> None:
    found = difference(train(lambda: Classifier("lbfgs")), train(lambda: Classifier("lbfgs"), strategy, devices))
    assert found["curve"] < 1e-8
    assert found["weights"] < 1e-8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_losses_in_fp32(strategy: str) -> None:
    options = {"precision": "32-true", "max_epochs": 2}
    found = difference(train(**options), train(strategy=strategy, devices=2, **options))
    assert found["curve"] < 1e-4


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_evaluation_sees_each_sample_once(devices: int) -> None:
    single, several = train(max_epochs=1), train(strategy="ring", devices=devices, max_epochs=1)
    several.module.load_state_dict(single.module.state_dict())
    for samples, size in [(7, 2), (3, 8), (2, 1)]:
        data = loader(samples, size, shuffle=False)
        one = single.trainer.validate(single.module, data, verbose=False)[0]
        many = several.trainer.validate(several.module, data, verbose=False)[0]
        assert one.keys() == many.keys() >= {"val/loss", "val/hits", "val/worst"}
        assert max(abs(one[name] - many[name]) for name in one) < 1e-12


def test_predictions_come_once_and_in_order() -> None:
    import torch

    single, several = train(max_epochs=1), train(strategy="ddp", devices=3, max_epochs=1)
    several.module.load_state_dict(single.module.state_dict())
    data = loader(7, 2, shuffle=False)
    one = torch.cat(single.trainer.predict(single.module, data))
    many = torch.cat(several.trainer.predict(several.module, data))
    assert one.shape == (7, 4)
    assert torch.equal(one, many) or float((one - many).abs().max()) < 1e-14
