"""What the module's own hooks change at the end of a batch or of a validation is in the checkpoint made there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.callbacks import ModelCheckpoint
from tests.runs import Outcome, difference, loader, train
from tests.strategies.features import Teacher


class Taught(Teacher):
    """After validations its teacher is half forgotten."""

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            with torch.no_grad():
                for kept in self.teacher.parameters():
                    kept.mul_(0.5)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 3)])
@pytest.mark.parametrize("way", ["step", "validation"])
def test_a_run_that_goes_on_has_what_hooks_of_the_module_changed(
    tmp_path: Path, strategy: str, devices: int, way: str
) -> None:
    options = {"val_check_interval": 3, "validation": loader(20, 5, shuffle=False)}

    def run(**more: Any) -> Outcome:
        return train(Taught, strategy, devices, **options, **more)

    moments: dict[str, Any] = {
        "step": {"every_n_train_steps": 5},
        "validation": {"monitor": "val/loss"},
    }
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **moments[way])
    whole = run(callbacks=[saving], enable_checkpointing=True)
    step = {"step": 5, "validation": 3}[way]
    [saved] = tmp_path.glob(f"step={step}.ckpt")
    resumed = run(resume=saved)
    assert max(difference(whole, resumed).values()) == 0.0
