"""What drivetrain imports while a run goes on draws none of the user's random numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import random, sys, torch
import drivetrain.lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

assert "rich" not in sys.modules, "this test shows nothing once it is there"
random.seed(3)
before = random.getstate()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
trainer = L.Trainer(max_epochs=1, enable_checkpointing=False, {options})
trainer.{call}
assert "rich" in sys.modules
assert random.getstate() == before, "Python's generator moved"
"""


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ("logger=False", "fit(Module(), loader)"),
        ("logger=False, enable_progress_bar=False, enable_model_summary=False", "test(Module(), loader)"),
    ],
    ids=["a progress bar", "a table of results"],
)
def test_pythons_generator_stays_where_it_was(tmp_path: Path, options: str, call: str) -> None:
    program = RUN.format(options=options, call=call)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)
