"""The digest of weights sees every bit, name, dtype and shape, and nothing else."""

from __future__ import annotations

import torch

from drivetrain.checkpoint import weights_digest

STATE = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(()), "n": torch.tensor(3)}


def test_order_layout_and_integers_do_not_count() -> None:
    same = {"n": torch.tensor(4), "a": STATE["a"].clone(), "b": STATE["b"].t().contiguous().t(), "x": "text"}
    assert weights_digest(same) == weights_digest(STATE)
    assert len(weights_digest(STATE)) == 64


def test_every_change_counts() -> None:
    changed = [
        {**STATE, "a": torch.nextafter(torch.ones(()), torch.tensor(2.0))},
        {**STATE, "a": torch.ones((), dtype=torch.float64)},
        {**STATE, "a": torch.ones(1)},
        {**STATE, "b": STATE["b"].reshape(3, 2)},
        {**STATE, "b": STATE["b"].clone().mul_(-1)},
        {"b": STATE["b"], "c": STATE["a"]},
        {"b": STATE["b"]},
        {**STATE, "c": torch.empty(0)},
    ]
    digests = {weights_digest(state) for state in [STATE, *changed]}
    assert len(digests) == len(changed) + 1


def test_bfloat16_and_complex() -> None:
    state = {"w": torch.randn(4).bfloat16(), "z": torch.randn(2, dtype=torch.complex64)}
    assert weights_digest(state) == weights_digest({name: value.clone() for name, value in state.items()})
    assert weights_digest(state) != weights_digest({**state, "z": state["z"].conj()})
