"""bf16-mixed and 16-mixed: autocast, loss scale, skipped steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain_plugins.precision.mixed import MixedPrecision


def connected(name: str, loss_scale: float | str | None = None) -> MixedPrecision:
    precision = MixedPrecision(name, loss_scale)
    precision.connect(torch.device("cpu"))
    return precision


def half(loss_scale: float | str | None = None) -> MixedPrecision:
    return connected("16-mixed", loss_scale)


def train_step(
    precision: MixedPrecision, weight: nn.Parameter, optimizer: torch.optim.Optimizer, factor: float
) -> bool:
    optimizer.zero_grad()
    precision.scale(weight.sum() * factor).backward()
    precision.unscale(optimizer)
    return precision.step(optimizer, None)


@pytest.mark.parametrize(("name", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    precision, layer = connected(name), nn.Linear(4, 4)
    assert precision.convert_module(layer).weight.dtype == torch.float32
    with precision.forward_context():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert precision.convert_input([torch.ones(1, dtype=torch.float64)])[0].dtype == torch.float32
    assert precision.scales == (name == "16-mixed")


def test_a_pass_without_gradients_takes_none_from_the_next() -> None:
    layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    with MixedPrecision("bf16-mixed").forward_context():
        with torch.no_grad():
            target = layer(x)
        (layer(x) - 2 * target).square().mean().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0


def test_inf_skips_the_step_and_halves_the_scale_then_training_goes_on() -> None:
    precision, weight = half(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    assert train_step(precision, weight, optimizer, 1.0) is True
    assert weight.tolist() == [0.5] * 3, "the gradient was unscaled before the step"
    before = precision.state_dict()["scaler"]["scale"]
    assert train_step(precision, weight, optimizer, float("inf")) is False
    assert weight.tolist() == [0.5] * 3
    assert precision.state_dict()["scaler"]["scale"] == before / 2
    assert train_step(precision, weight, optimizer, 0.0) is True
    assert weight.tolist() == pytest.approx([0.05] * 3), "momentum of the skipped step is untouched"
    assert precision.current_scale == before / 2


def test_scale_grows_after_enough_good_steps() -> None:
    precision, weight = half(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    precision.load_state_dict({"scaler": {**precision.state_dict()["scaler"], "growth_interval": 2, "scale": 4.0}})
    for _ in range(2):
        train_step(precision, weight, optimizer, 1.0)
    assert precision.state_dict()["scaler"]["scale"] == 8.0


def test_static_scale_never_moves() -> None:
    precision, weight = half(128.0), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert precision.scale(torch.ones(())).item() == 128.0
    for factor in (float("nan"), 1.0, float("inf")):
        assert train_step(precision, weight, optimizer, factor) is (factor == 1.0)
        assert precision.state_dict()["scaler"]["scale"] == 128.0
    assert weight.item() == pytest.approx(0.9)


def test_accumulated_window_equals_one_large_batch() -> None:
    precision, weight = half(64), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for share in (0.25, 0.75):
        precision.scale(weight.sum() * share).backward()
    precision.unscale(optimizer)
    precision.unscale(optimizer)
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0], "unscaled once, though asked twice"
    assert precision.step(optimizer, None)
    assert weight.tolist() == [-1.0, -1.0]


def test_gradients_may_be_missing() -> None:
    precision, used, unused = half(), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    both = torch.optim.SGD([used, unused], lr=1.0)
    none = torch.optim.SGD([unused], lr=1.0)
    assert precision.step(none, None), "before any loss"
    for _ in range(2):
        precision.scale(torch.ones(()))
        precision.unscale(none)
        assert precision.step(none, None), "nor a step that a gradient came to"
    for _ in range(2):
        assert train_step(precision, unused, both, 0.0)
        both.zero_grad()
        precision.scale(used.sum() * 0.0).backward()
        precision.unscale(none)
        assert precision.step(none, None), "no parameter has a gradient"
    assert train_step(precision, used, both, 1.0)
    assert (used.item(), unused.item()) == (0.0, 1.0)


def test_optimizers_scaled_together_are_unscaled_by_the_same_number() -> None:
    precision, a, b = half(), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    of_a, of_b = torch.optim.SGD([a], lr=1.0), torch.optim.SGD([b], lr=1.0)
    before = precision.current_scale
    precision.scale(a.sum() * float("inf")).backward()
    precision.scale(b.sum() * 0.5).backward()
    precision.unscale(of_a)
    assert precision.step(of_a, None) is False
    precision.unscale(of_b)
    assert precision.step(of_b, None) is True
    assert b.item() == 0.5, "the scale that a's inf halves is not yet in use for b's gradient"
    precision.scale(torch.ones(()))
    assert precision.current_scale == before / 2


def test_state_travels_to_a_fresh_process() -> None:
    precision, weight = half(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (float("inf"), float("inf"), 1.0):
        train_step(precision, weight, optimizer, factor)
    state = precision.state_dict()
    again = MixedPrecision("16-mixed", None)
    again.load_state_dict(state)
    again.connect(torch.device("cpu"))
    assert again.state_dict() == state
    assert state["scaler"]["scale"] == 2.0**14
    again.load_state_dict({})
    assert again.state_dict() == state, "a checkpoint of another precision says nothing about the scale"
    assert connected("bf16-mixed").state_dict() == {}


def test_fused_optimizer_reports_its_skips() -> None:
    precision, weight = half(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    assert train_step(precision, weight, optimizer, float("inf")) is False
    assert weight.tolist() == [1.0, 1.0]
    assert train_step(precision, weight, optimizer, 1.0) is True
    assert weight.tolist() == pytest.approx([0.9, 0.9])


def test_what_cannot_be_is_refused() -> None:
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match="cannot step LBFGS with a closure"):
        half().step(torch.optim.LBFGS([weight]), weight.sum)
    for scale in (-1.0, 0, "fast", float("inf")):
        with pytest.raises(ConfigurationError, match="positive number or 'dynamic'"):
            MixedPrecision("16-mixed", scale)
    with pytest.raises(ConfigurationError, match="does not scale losses"):
        MixedPrecision("bf16-mixed", 2.0)
    with pytest.raises(ConfigurationError, match="did you mean '16-mixed'"):
        MixedPrecision("16mixed")
