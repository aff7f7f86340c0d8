"""The summary of a module as an object is Lightning's, figure by figure and letter by letter."""

from __future__ import annotations

from typing import Any

import lightning.pytorch.utilities.model_summary as their_module
import pytest
import torch
from torch import nn

import drivetrain.lightning.utilities.model_summary as our_module
from tests.facade.recorder import ours, theirs

FIGURES = (
    "layer_names",
    "layer_types",
    "in_sizes",
    "out_sizes",
    "param_nums",
    "training_modes",
    "total_training_modes",
    "total_parameters",
    "trainable_parameters",
    "total_layer_params",
    "model_size",
    "total_flops",
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 40)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.inner(input), [input, input]


def model(L: Any, example: Any) -> Any:
    class Net(L.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.Dropout()))
            self.memory = Two()
            self.head = nn.Linear(40, 1000)
            self.unused = nn.Linear(2, 2)
            self.head.bias.requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(3))
            self.example_input_array = example
            self.body[1].eval()

        def forward(self, x: torch.Tensor, shift: Any = 0.0) -> torch.Tensor:
            hidden = self.body(x).reshape(len(x), 4, -1)
            return self.head(self.memory(input=hidden)[0]) + shift

    return Net()


EXAMPLES = [None, torch.ones(2, 1, 8, 8), [torch.ones(3, 1, 8, 8), torch.ones(())], {"x": torch.ones(1, 1, 8, 8)}]


@pytest.mark.parametrize("depth", [-1, 0, 1, 2])
@pytest.mark.parametrize("example", EXAMPLES, ids=["none", "tensor", "list", "dict"])
def test_same_summary(example: Any, depth: int) -> None:
    there = their_module.summarize(model(theirs, example), max_depth=depth)
    here = our_module.summarize(model(ours, example), max_depth=depth)
    for name in FIGURES:
        assert getattr(here, name) == getattr(there, name), name
    assert str(here) == str(there) and isinstance(here, our_module.ModelSummary)


def test_numbers_and_refusals() -> None:
    for number in (0, 7, 999, 1000, 99_949, 99_999, 123_456, 1_199_882, 3 * 10**9, 4 * 10**14, 5 * 10**15):
        there = their_module.model_summary.get_human_readable_count(number)
        assert our_module.get_human_readable_count(number) == there, number
    with pytest.raises(ValueError, match="-1 for all levels"):
        our_module.summarize(model(ours, None), max_depth=-2)
    assert our_module.LayerSummary(nn.Linear(2, 3)).num_parameters == 9


@pytest.mark.parametrize("depth", [-1, 1])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_takes_no_hooks(depth: int) -> None:
    def scripted(L: Any) -> Any:
        class Net(L.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.scripted, self.head = torch.jit.script(Two()), nn.Linear(40, 2)
                self.example_input_array = torch.ones(2, 36)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.scripted(x)[0])

        return Net()

    there, here = (
        one.summarize(scripted(L), max_depth=depth) for one, L in ((their_module, theirs), (our_module, ours))
    )
    for name in FIGURES:
        assert getattr(here, name) == getattr(there, name), name
    assert here.in_sizes[0] == "?" and here.in_sizes[-1] == [2, 40]
