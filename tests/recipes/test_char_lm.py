"""The language model: its text, its network, its loss, its perplexity, its sample."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError
from recipes.char_lm.data import LibraryText, read
from recipes.char_lm.model import GPT
from recipes.char_lm.module import CharLM
from recipes.char_lm.sample import SampleText
from tests.runs import QUIET


def test_the_text_is_the_librarys_source() -> None:
    text = read(None, 50_000)
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert len(text) == 50_000
    own = first.read_bytes()[:50_000]
    assert text[: len(own)].tobytes() == own


def test_pieces_are_disjoint_and_the_target_is_the_next_byte() -> None:
    data = LibraryText(bytes=20_000, context=9, batch_size=7)
    data.setup("fit")
    assert data.train is not None
    assert len(data.train) + len(data.held_out) == 2_000
    assert len(data.held_out) == 200
    tokens, following = next(iter(data.val_dataloader()))
    whole = read(None, 20_000).reshape(-1, 10)
    assert np.array_equal(tokens.numpy(), whole[9::10][:64, :-1])
    assert torch.equal(tokens[:, 1:], following[:, :-1])


@pytest.mark.parametrize("key", ["bytes", "context", "batch_size", "eval_batch_size"])
def test_a_number_that_is_too_small(key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"data\.{key}=0"):
        LibraryText(**{key: 0})


def test_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no \*.py or \*.txt"):
        LibraryText(dir=tmp_path).setup("fit")
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigurationError, match="fewer than ten pieces"):
        LibraryText(dir=tmp_path).setup("fit")


def test_heads_divide_the_width() -> None:
    with pytest.raises(ConfigurationError, match="heads=3"):
        CharLM(heads=3, width=64)


def test_sequences_longer_than_the_model_allows() -> None:
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match=r"model\.context=8 is shorter than the data's 9"):
        CharLM(context=8).loss((tokens, tokens))


def test_no_place_sees_what_comes_after() -> None:
    model = GPT(vocab=11, context=8, layers=2, heads=2, width=8).double()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_are_the_network(tied: bool) -> None:
    model = GPT(vocab=11, context=8, layers=2, heads=2, width=8, tied=tied)
    tokens = torch.randint(11, (2, 8))
    x = tokens
    for stage in model.pipeline_stages():
        x = stage(x)
    assert torch.equal(x, model(tokens))


@pytest.mark.parametrize("devices", [1, 2])
def test_it_learns_and_writes(devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    data = LibraryText(bytes=4_000, context=15, batch_size=8)
    sample = SampleText(length=20)
    trainer = Trainer(strategy="ddp", devices=devices, max_epochs=2, seed=1, callbacks=[sample], **QUIET)
    module = CharLM(context=15, layers=1, heads=2, width=16, warmup_steps=2)
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]), rel=1e-6)
    assert metrics["val/loss"] < math.log(256) - 0.5
    out = capfd.readouterr().out
    assert out.count("--- sample ---\ndef ") == 1
