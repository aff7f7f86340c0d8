"""Scripts that put together the weights of a DeepSpeed run find them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain.lightning as L
from drivetrain.errors import CheckpointError
from drivetrain.lightning.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from tests.facade.recorder import QUIET, loader, net


class Model(L.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net()
        self.register_buffer("count", torch.tensor(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0].to(self.dtype)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.parametrize("same_file", [False, True])
def test_the_weights_are_in_fp32_in_a_file_to_load(tmp_path: Path, same_file: bool) -> None:
    model = Model(width=5)
    options: dict[str, Any] = {"max_epochs": 1, "precision": "bf16-true"}
    trainer = L.Trainer(**QUIET, **options, default_root_dir=str(tmp_path))
    trainer.fit(model, loader())
    saved = tmp_path / "a.ckpt"
    trainer.save_checkpoint(saved)
    before = torch.load(saved, weights_only=True)
    written = saved if same_file else tmp_path / "weights.pt"

    given = convert_zero_checkpoint_to_fp32_state_dict(f"{saved}/", written)

    content = torch.load(written, weights_only=True)
    assert before["state_dict"]["net.0.weight"].dtype is torch.bfloat16
    assert set(content) == set(given) == set(before) - {"optimizer_states"}
    for key, value in before["state_dict"].items():
        found = content["state_dict"][key]
        assert found.dtype is (torch.float32 if value.is_floating_point() else value.dtype)
        torch.testing.assert_close(found, value.to(found.dtype), rtol=0, atol=0)
    loaded = Model.load_from_checkpoint(written)
    assert loaded.hparams["width"] == 5
    assert loaded.dtype is torch.float32


def test_what_is_no_checkpoint_of_the_trainer_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "none.ckpt", tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="zero_to_fp32"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "x.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="state_dict"):
        convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "other.pt", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
