"""fsdp, tensor_parallel and mesh: what is cut, other options and meshes, refusals, odd losses."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _remove_worker_pids, _set_worker_pids
from torch.distributed.tensor import DTensor
from torch.utils.data._utils import signal_handling

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain.lightning.utilities import grad_norm
from drivetrain_plugins.strategies.fsdp import blocks_of
from drivetrain_plugins.strategies.tensor_plan import plan_of
from recipes.char_lm.model import Attention
from recipes.mnist.module import MnistClassifier
from tests.runs import QUIET, Classifier, Gan, dataset, difference, loader, seeded, train
from tests.strategies.gpt import TinyGPT, tiny_gpt, token_loader
from tests.strategies.parity import check_parity


# -- fsdp -------------------------------------------------------------------------------------------------------
def test_blocks_are_found() -> None:
    module = tiny_gpt()
    assert blocks_of(module, "auto") == [*module.model.blocks][::-1]
    assert [type(one).__name__ for one in blocks_of(module, "Mlp, LayerNorm")].count("Mlp") == 4
    assert blocks_of(MnistClassifier(), "auto") == []  # layers are no blocks: the whole is gathered at once


def test_a_class_that_there_is_not() -> None:
    with pytest.raises(ConfigurationError, match=r"strategy.wrap=Blok: .*'Block'"):
        blocks_of(tiny_gpt(), "Blok")


@pytest.mark.parametrize(
    "options", [{"wrap": "Mlp,Attention", "reshard_after_forward": False}, {"reduce_every_micro_batch": False}]
)
def test_fsdp_with_other_options(options: dict[str, Any]) -> None:
    check_parity({"name": "fsdp", **options}, 2, max_steps=8)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel", {"name": "mesh", "tensor": 1}])
def test_clipping(strategy: Any, algorithm: str) -> None:
    bound = 0.01 if algorithm == "value" else 0.3
    options = {"gradient_clip_val": bound, "gradient_clip_algorithm": algorithm, "max_steps": 6}
    check_parity(strategy, 2, **options)


@pytest.mark.parametrize("strategy", [{"name": "fsdp", "wrap": "Linear,Embedding"}, {"name": "mesh", "tensor": 1}])
def test_tied_weights(strategy: Any) -> None:
    check_parity(strategy, 2, make=tied, max_steps=8)


def test_modules_that_share_a_weight_are_gathered_with_what_both_are_in() -> None:
    module = tied()
    found = blocks_of(module, "Linear,Embedding")
    assert module.model.position in found
    assert module.model.token not in found
    assert module.model.head not in found


class Adafactored(TinyGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_an_optimizer_that_cannot_step_parts(strategy: str) -> None:
    with pytest.raises(WorkerError, match=r"Adafactor cannot step parameters of which each rank holds a part .*AdamW"):
        train(Adafactored, strategy, 2, data=token_loader(), max_steps=1)


class LooksAtGroups(TinyGPT):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        [group] = optimizer.param_groups
        assert len(group["params"]) == len(list(self.parameters()))


def test_hooks_see_the_optimizers_own_groups() -> None:
    train(LooksAtGroups, "tensor_parallel", 2, data=token_loader(), max_steps=2)


def tied() -> TinyGPT:
    return TinyGPT(tied=True)


def test_tied_weights_under_tensor_parallelism() -> None:
    check_parity("tensor_parallel", 2, make=tied, max_steps=8)


def test_fsdp_trains_other_modules() -> None:
    options: dict[str, Any] = {"validation": loader(23, 5, False), "accumulate_grad_batches": 2}
    assert max(difference(train(**options), train(strategy="fsdp", devices=3, **options)).values()) < 1e-10


class Weighted(Classifier):
    """Gives its loss's weight itself: the samples of class 0 count twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weights = 1.0 + (y == 0).double()
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum(), "weight": weights.sum()}


class Rare(Classifier):
    """Learns from the samples of one class alone, of which a rank has none in some steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weights = (y == 3).double()
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum().clamp(min=1), "weight": weights.sum()}


SHARDS = {"name": "mesh", "data": 1, "shard": 2, "tensor": 1}
REPLICAS = {"name": "mesh", "tensor": 1}


@pytest.mark.parametrize("make", [Weighted, Rare])
@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 3), (REPLICAS, 2), (SHARDS, 2), ("ddp", 2), ("ring", 3)])
def test_losses_with_weights(strategy: Any, devices: int, make: Any) -> None:
    if isinstance(strategy, dict):
        make = planned(make)
    reference, run = train(make), train(make, strategy, devices)
    assert difference(reference, run)["weights"] < 1e-10


class SilentWorker(Rare):
    """The first of several ranks has no loss where it learnt nothing: it does not know yet that losses have weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        silent = self.trainer.world_size > 1 and self.trainer.global_rank == 0
        return None if silent and found["weight"] == 0 else found


@pytest.mark.parametrize("make", [Rare, SilentWorker])
@pytest.mark.parametrize("strategy", ["ddp", {"name": "local_sgd", "period": 1}])
def test_losses_with_weights_that_a_rank_has_none_of(strategy: Any, make: Any) -> None:
    """In every other batch the first rank's samples count for nothing, in the rest the second's, in the last all."""
    x, y = dataset(48).tensors
    data = []
    for i, (inputs, labels) in enumerate(zip(x.split(8), y.clone().split(8), strict=True)):
        mine, others = labels.split(4)[:: -1 if i % 2 else 1]
        mine[:3], others[others == 3] = 3, 0
        if i == 5:
            labels[:] = 0
        data.append((inputs, labels))
    reference, run = train(make, data=data), train(make, strategy, 2, data=data)
    assert difference(reference, run)["weights"] < 1e-10


def planned(make: type[Classifier]) -> type[Classifier]:
    """``make`` with a tensor-parallel plan, which a mesh asks for."""
    plan = {"net.0": "columns", "net.2": "rows"}
    return type(make.__name__, (make,), {"tensor_parallel_plan": lambda self: plan})


class ReturnsNothing(TinyGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.trainer.global_rank == 1 and batch_idx == 2 else loss


class Skips(TinyGPT):
    """No rank has a loss of the batches 1 and 4, of the first of which it was not even asked for scores."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 4 else loss


@pytest.mark.parametrize("strategy", ["fsdp", SHARDS])
@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 3}], ids=["", "windows"])
def test_a_batch_of_which_no_rank_has_a_loss_is_left_out(strategy: Any, more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"data": token_loader(), "max_epochs": 2, **more}
    reference, run = train(Skips, **options), train(Skips, strategy, 2, **options)
    assert reference.steps == run.steps > 0
    assert max(difference(reference, run).values()) < 1e-10


class SkipsTheLast(TinyGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.skipped else loss

    skipped: tuple[int, ...] = (1,)


class SkipsALaterLast(SkipsTheLast):
    skipped = (3,)


def test_the_last_batch_of_the_first_window_is_not_left_out_where_the_window_is_reduced_in_it() -> None:
    options: dict[str, Any] = {"data": token_loader(), "max_epochs": 1, "accumulate_grad_batches": 2}
    late = {"name": "fsdp", "reduce_every_micro_batch": False}
    with pytest.raises(WorkerError, match=r"None for the last batch of an accumulation window.*reduce_every_micro"):
        train(SkipsTheLast, late, 2, **options)
    for make, strategy in ((SkipsTheLast, "fsdp"), (SkipsALaterLast, late)):
        reference, run = train(make, **options), train(make, strategy, 2, **options)
        assert max(difference(reference, run).values()) < 1e-10


def test_no_loss_on_one_replica_is_left_out() -> None:
    """As ddp does it: the others' gradients count, and nobody waits."""
    options: dict[str, Any] = {"data": token_loader(), "max_epochs": 1}
    reference, run = train(ReturnsNothing, "ddp", 2, **options), train(ReturnsNothing, REPLICAS, 2, **options)
    assert max(difference(reference, run).values()) < 1e-10


class LooksBeforeTheStep(TinyGPT):
    """Goes forward between a backward pass and the step, as one does who logs what the network gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self(self.batch[0])


@pytest.mark.parametrize("strategy", ["fsdp", SHARDS])
def test_a_forward_pass_before_the_step_is_of_no_consequence(strategy: Any) -> None:
    options: dict[str, Any] = {"data": token_loader(), "max_epochs": 1}
    reference, run = train(LooksBeforeTheStep, **options), train(LooksBeforeTheStep, strategy, 2, **options)
    assert max(difference(reference, run).values()) < 1e-10


class Counts(TinyGPT):
    """Writes down what its strategy says it sent."""

    def on_train_end(self) -> None:
        self.trainer.callback_metrics.update(
            {name: torch.tensor(float(value)) for name, value in self.trainer.strategy.traffic().items()}
        )


@pytest.mark.parametrize("strategy", ["fsdp", SHARDS, REPLICAS])
def test_traffic_of_gradients(strategy: Any) -> None:
    run = train(Counts, strategy, 2, data=token_loader(), max_steps=3)
    size = 8 * sum(p.numel() for p in run.module.parameters())
    # Half of the gradients goes to the other rank once where they are reduced into shards, twice where both keep all.
    least = 3 * size * (1.0 if strategy is REPLICAS else 0.5)
    assert least <= run.metrics["bytes_sent"] < 1.01 * least


class Renamed(Classifier):
    """The hooks are free in how they name their arguments."""

    def training_step(self, batch: Any, i: int) -> Any:
        return super().training_step(batch, i)

    def validation_step(self, batch: Any, i: int) -> None:
        super().validation_step(batch, i)


def test_arguments_of_any_name() -> None:
    options: dict[str, Any] = {"validation": loader(23, 5, False)}
    assert max(difference(train(Renamed, **options), train(Renamed, "fsdp", 2, **options)).values()) < 1e-10


class Manual(TinyGPT):
    """Steps its optimizer itself, after two backward passes through one network; clips, and skips every third batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.manual_backward(0.5 * self.loss(batch))
        self.clip_gradients(optimizer, 0.5, "norm")
        if batch_idx % 3:
            optimizer.step()
        self.log("train/manual", loss, on_epoch=True)


def test_manual_optimisation_under_fsdp() -> None:
    options: dict[str, Any] = {"data": token_loader(), "validation": token_loader(23, 5, False), "max_epochs": 2}
    assert max(difference(train(Manual, **options), train(Manual, "fsdp", 2, **options)).values()) < 1e-10


class DeepGan(Gan):
    """The critic has blocks, is first called while it is toggled off, and once more without a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, n), nn.Tanh()) for n in (6, 6, 1))))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.log("looked", self.critic(batch[0]).mean(), on_epoch=True)


@pytest.mark.parametrize(("precision", "bound"), [("64-true", 1e-10), ("bf16-mixed", 3e-2)])
def test_optimizers_that_take_turns_under_fsdp(precision: str, bound: float) -> None:
    options: dict[str, Any] = {"precision": precision, "max_steps": 8, "gradient_clip_val": 0.5}
    assert max(difference(train(DeepGan, **options), train(DeepGan, "fsdp", 2, **options)).values()) < bound


class Loose(Classifier):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_manual_optimisation_that_is_refused_before_launch() -> None:
    trainer = Trainer(strategy="fsdp", devices=2, max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match=r"Loose steps its optimizer itself, .* scale belongs to none of them"):
        trainer.fit(Loose(), loader())
    trainer = Trainer(strategy="tensor_parallel", devices=2, max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match="cannot train a module with automatic_optimization=False"):
        trainer.fit(Manual(), loader())


class LooksAtDtypes(TinyGPT):
    """Matrices of blocks are gathered in bf16; what autocast leaves in fp32 is not."""

    matrices = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].mlp.register_forward_hook(self._look)

    def _look(self, *rest: Any) -> None:
        if self.trainer.world_size > 1:
            block = self.model.blocks[0]
            assert block.mlp.up.weight.dtype == block.attention.key.weight.dtype == self.matrices
            assert block.norm1.weight.dtype == self.model.token.weight.dtype == torch.float32


class LooksAtWhole(LooksAtDtypes):
    """All are gathered as they are kept."""

    matrices = torch.float32


@pytest.mark.parametrize(
    ("chosen", "devices", "narrow", "make"),
    [
        ({"name": "fsdp"}, 2, True, LooksAtDtypes),
        ({"name": "fsdp"}, 2, False, LooksAtWhole),
        ({"name": "mesh", "shard": 2, "tensor": 2}, 4, True, LooksAtDtypes),
    ],
)
def test_under_bf16_mixed_matrices_are_gathered_in_bf16_where_that_is_asked_for(
    chosen: dict[str, Any], devices: int, narrow: bool, make: Any
) -> None:
    """As near to single as ddp is; in fp32 the losses are 0.005 apart."""
    strategy = {**chosen, "narrow_gather": narrow}
    check_parity(strategy, devices, 3e-3, make=make, precision="bf16-mixed", max_steps=8)


# -- tensor parallelism -----------------------------------------------------------------------------------------
def test_the_usual_names_are_found() -> None:
    plan = plan_of(tiny_gpt())
    assert len(plan) == 4 * 6
    assert plan["model.blocks.3.attention.value"] == "columns"
    assert plan["model.blocks.0.mlp.down"] == "rows"


class Planned(Classifier):
    """Names nobody would guess, and a plan."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net.0": "columns", "net.2": "rows"}


@pytest.mark.parametrize("devices", [2, 4])
def test_a_plan_of_the_module(devices: int) -> None:
    options: dict[str, Any] = {"validation": loader(23, 5, False), "accumulate_grad_batches": 2}
    reference = train(Planned, **options)
    assert max(difference(reference, train(Planned, "tensor_parallel", devices, **options)).values()) < 1e-10


class Wrong(Planned):
    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net.9": "columns"}


class CountsHeads(Attention):
    """Cuts whatever channels it has into the number of all heads."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__(16, heads, 0.0)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).view(*x.shape[:2], self.heads, -1) for part in (self.query, self.key, self.value))
        return self.output(nn.functional.scaled_dot_product_attention(query, key, value).flatten(2))


class FewKeys(Attention):
    """Fewer heads of keys and values than of queries."""

    def __init__(self) -> None:
        super().__init__(16, 4, 0.0)
        del self.head_width
        self.num_heads, self.num_key_value_heads = 4, 2
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)


def with_attention(make: Callable[[], nn.Module]) -> TinyGPT:
    module = TinyGPT()
    for block in module.model.blocks:
        block.attention = make()
    return module


class Dropping(TinyGPT):
    """Drops channels at random, and compares what each rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3

    def on_train_end(self) -> None:
        whole = [p.detach().flatten() for p in self.parameters() if not isinstance(p, DTensor)]
        assert len(whole) == 2 + 2 * 4 * 2 + 2 + 1  # embeddings, norms, head
        first, *others = self.trainer.strategy.communicator.all_gather(torch.cat(whole))
        assert all(torch.equal(first, other) for other in others)


class TiedPlan(Planned):
    """A layer of its plan shares its weight with another, which would go on alone with the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[4] = seeded(lambda: nn.Linear(16, 16))
        self.net[4].weight = self.net[2].weight


@pytest.mark.parametrize("sizes", [{"data": 1, "shard": 2}, {"data": 2, "shard": 1}], ids=str)
def test_weights_that_layers_share_stay_shared_where_a_part_is_the_whole(sizes: dict[str, int]) -> None:
    runs = [train(TiedPlan, place, n) for place, n in (("single", 1), ({"name": "mesh", "tensor": 1, **sizes}, 2))]
    assert max(difference(*runs).values()) < 1e-10


class Averaged(Planned):
    """Goes on with an average of its weights, which it gives to the parameters as they give theirs."""

    written = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        mean = vars(self).setdefault("mean", [p.data.clone() for p in self.parameters()])
        for index, parameter in enumerate(self.parameters()):
            mean[index] = mean[index] * 0.5 + parameter.data * 0.5
            if self.written:
                parameter.data.copy_(mean[index])
            else:
                parameter.data = mean[index].clone()


class AveragedElsewhere(Averaged):
    written = False


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("fsdp", 2), ("tensor_parallel", 2), ({"name": "mesh", "data": 1, "shard": 2, "tensor": 2}, 4)],
    ids=str,
)
def test_weights_that_a_hook_gives_in_the_place_of_their_data_are_not_lost(strategy: Any, devices: int) -> None:
    """They went to a tensor that nobody reads."""
    with pytest.raises(WorkerError, match=r"parameter\.data = \.\.\. does not reach the part"):
        train(AveragedElsewhere, strategy, devices)
    runs = [train(AveragedElsewhere), train(Averaged, strategy, devices)]
    assert max(difference(*runs).values()) < 1e-10


class ShrinksAfterValidation(Classifier):
    """What validation had gathered whole, with no backward pass to follow, was written to and given up."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


@pytest.mark.parametrize("strategy", ["fsdp", {"name": "mesh", "data": 1, "shard": 2, "tensor": 1}], ids=str)
def test_weights_that_a_hook_writes_to_after_a_validation_stay(strategy: Any) -> None:
    made = type("Shrinks", (ShrinksAfterValidation,), {"tensor_parallel_plan": Planned.tensor_parallel_plan})
    runs = [train(made, place, n, validation=loader(23), max_epochs=3) for place, n in (("single", 1), (strategy, 2))]
    assert max(difference(*runs).values()) < 1e-10


def test_what_refuses_new_data_goes_with_the_run() -> None:
    train(Classifier, "fsdp", 1)
    assert "data" not in vars(DTensor)


@pytest.mark.parametrize("strategy", ["tensor_parallel", {"name": "mesh", "tensor": 2}])
def test_what_every_rank_has_whole_stays_equal(strategy: Any) -> None:
    train(Dropping, strategy, 4, data=token_loader(), max_steps=5)


@pytest.mark.parametrize(
    ("make", "devices", "said"),
    [
        (lambda: with_attention(CountsHeads), 2, "CountsHeads.forward .* computes with heads, the number of all heads"),
        (lambda: with_attention(FewKeys), 4, "the 2 heads of model.blocks.0.attention cannot be divided among 4 ranks"),
        (tiny_gpt, 3, "the 4 heads of model.blocks.0.attention cannot be divided among 3 ranks"),
        (Planned, 3, "the 16 outputs of net.0 cannot be divided among 3 ranks"),
        (Classifier, 2, "Classifier has no layers that tensor parallelism would know how to cut"),
        (Wrong, 2, "names 'net.9', which Wrong does not have"),
        (TiedPlan, 2, "cuts net.2, whose weight is that of net.4, too: leave net.2 out of the plan"),
    ],
)
def test_refused_before_launch(make: Any, devices: int, said: str) -> None:
    trainer = Trainer(strategy="tensor_parallel", devices=devices, max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(make(), loader())


# -- meshes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"shard": 2, "data": 1, "tensor": 2, "wrap": "Mlp,Attention", "reduce_every_micro_batch": False},
        {"data": 4, "tensor": 1},
    ],
)
def test_other_meshes(options: dict[str, int]) -> None:
    check_parity({"name": "mesh", **options}, 4, max_steps=8)


@pytest.mark.parametrize("options", [{"data": 1, "shard": 2}, {"data": 2}])
def test_a_mesh_that_cuts_no_layer_asks_for_no_plan(options: dict[str, int]) -> None:
    single = train(Classifier, "single", 1)
    assert max(difference(single, train(Classifier, {"name": "mesh", "tensor": 1, **options}, 2)).values()) < 1e-10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor": 3}, "do not multiply to the 4 workers"),
        ({"data": 2, "shard": 2, "tensor": 1}, "a mesh has two dimensions"),
        ({"tensor": 0}, "sizes are at least 1"),
    ],
)
def test_meshes_that_cannot_be(options: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Trainer(strategy={"name": "mesh", **options}, devices=4, **QUIET)


def test_what_a_tensor_group_logs_counts_once() -> None:
    run = train(Planned, {"name": "mesh", "tensor": 2}, 4, validation=loader(23, 5, False))
    assert run.metrics["val/hits"] == train(Planned, validation=loader(23, 5, False)).metrics["val/hits"]


def test_predictions_come_once() -> None:
    module, data = Planned().double(), loader(23, 5, False)
    expected = torch.cat(Trainer(strategy="single", precision="64-true", **QUIET).predict(module, data))
    for strategy in ("tensor_parallel", {"name": "mesh", "tensor": 2}, "fsdp"):
        trainer = Trainer(strategy=strategy, devices=4, precision="64-true", **QUIET)
        found = torch.cat(trainer.predict(module, data))
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < 1e-12


class Interrupting(torch.optim.SGD):
    """As a loader's process that dies while a step is on its way: torch's handler of the signal raises in the midst."""

    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0]
        assert isinstance(weight, DTensor)
        process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
        process.start()
        _set_worker_pids(id(self), (process.pid,))
        signal_handling._set_SIGCHLD_handler()
        try:
            while True:
                weight + weight
        finally:
            _remove_worker_pids(id(self))
            process.join()


class Interrupted(Classifier):
    def configure_optimizers(self) -> Any:
        return Interrupting(self.parameters(), lr=0.1)


def test_a_loaders_process_that_dies_in_a_step_is_not_the_optimizers_fault() -> None:
    with pytest.raises(WorkerError, match=r"rank \d failed: RuntimeError: DataLoader worker \(pid \d+\)"):
        train(Interrupted, "fsdp", 2, max_epochs=1)


class LogsNorms(Planned):
    """Of weights and gradients, in all ways in which a value is shown."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("weight", self.net[0].weight.detach().norm(), on_epoch=True, prog_bar=True)
        self.log("first", self.net[0].weight.detach().norm(), rank_zero_only=True)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, 2), on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("largest", self.net[2].bias.max(), reduce_fx="max")


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("fsdp", 2), ("tensor_parallel", 2), ({"name": "mesh", "data": 1, "shard": 2, "tensor": 2}, 4)],
    ids=["fsdp", "tensor_parallel", "shard x tensor"],
)
def test_norms_of_parts_are_logged_as_those_of_the_whole(strategy: Any, devices: int) -> None:
    seen: dict[str, Any] = {"validation": loader(23, 5, False), "enable_progress_bar": True, "log_every_n_steps": 3}
    one, several = train(LogsNorms, **seen), train(LogsNorms, strategy, devices, timeout=10, **seen)
    assert max(difference(one, several).values()) < 1e-10


class Penalised(Planned):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0.01 * sum(weight.abs().sum() for weight in self.parameters())


class Borrows(Planned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/hidden", nn.functional.linear(batch[0], self.net[0].weight).norm())


@pytest.mark.parametrize(("make", "way_out"), [(Penalised, r"\(weight_decay\)"), (Borrows, "call the layer")])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ({"name": "fsdp", "wrap": "Linear"}, 2),
        ("tensor_parallel", 2),
        ({"name": "mesh", "data": 1, "shard": 2, "tensor": 2}, 4),
    ],
    ids=["fsdp", "tensor_parallel", "shard x tensor"],
)
def test_parameters_beside_their_layers_are_refused(make: Any, way_out: str, strategy: Any, devices: int) -> None:
    with pytest.raises(WorkerError, match=rf"Error: a step computes with parameters beside their layers' .*{way_out}"):
        train(make, strategy, devices, validation=loader(23, 5, False), max_epochs=1, timeout=10)


def test_a_penalty_where_parameters_are_gathered_for_the_whole_step() -> None:
    assert max(difference(train(Penalised), train(Penalised, "fsdp", 2)).values()) < 1e-10
