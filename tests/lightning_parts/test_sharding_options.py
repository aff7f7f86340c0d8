"""What projects give Lightning's FSDPStrategy, and what becomes of it."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

import drivetrain.lightning as L
from drivetrain.errors import ConfigurationError
from tests.facade.recorder import QUIET, loader

FSDPStrategy = L.strategies.FSDPStrategy
QUIETLY = {**QUIET, "logger": False, "max_epochs": 2, "precision": "64-true", "gradient_clip_val": 0.3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.second(self.first(batch[0].double()))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def options_of(strategy: Any) -> Any:
    return L.Trainer(**{**QUIETLY, "devices": 2}, strategy=strategy).strategy_options


@pytest.mark.parametrize(
    ("policy", "wrap"),
    [
        ({Block}, "Block"),
        (ModuleWrapPolicy({Block, nn.Linear}), "Block,Linear"),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), "Block"),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=10), "auto"),
        (size_based_auto_wrap_policy, "auto"),
        (None, "auto"),
    ],
)
def test_classes_that_a_policy_names_are_gathered_one_at_a_time(policy: Any, wrap: str) -> None:
    assert options_of(FSDPStrategy(auto_wrap_policy=policy)).wrap == wrap


def test_what_changes_no_figure_is_passed_over() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp1 = {"use_orig_params": True, "limit_all_gathers": True, "sync_module_states": True}
        options = options_of(FSDPStrategy(cpu_offload=False, state_dict_type="sharded", **fsdp1))
        assert options.reshard_after_forward
        for kind in ("SHARD_GRAD_OP", ShardingStrategy.SHARD_GRAD_OP):
            assert not options_of(FSDPStrategy(sharding_strategy=kind)).reshard_after_forward
    for name in ("activation_checkpointing", "activation_checkpointing_policy"):
        with pytest.warns(UserWarning, match="activations are kept, which takes more memory"):
            FSDPStrategy(**{name: {Block}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cpu_offload": True}, "cpu_offload=True"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16'"),
        ({"device_mesh": (1, 2)}, "device_mesh="),
        ({"sharding_strategy": "NO_SHARD"}, "strategy='ddp' for no shards"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "'HYBRID_SHARD'"),
        ({"state_dict_type": "local"}, "use 'full' or 'sharded'"),
    ],
)
def test_what_is_not_offered_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        FSDPStrategy(**given)


def test_what_is_trained_so_is_what_one_process_trains() -> None:
    found = []
    for devices, strategy in ((1, "auto"), (2, FSDPStrategy(auto_wrap_policy={Block}, limit_all_gathers=True))):
        module = Module()
        trainer = L.Trainer(**{**QUIETLY, "devices": devices}, strategy=strategy, batch="global")
        trainer.fit(module, loader(23))
        found.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.allclose(*found, rtol=0, atol=1e-10)
