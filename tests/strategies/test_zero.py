"""DeepSpeed's stages 0 to 3, held to the run on one process in fp32."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from drivetrain import Callback, Trainer
from drivetrain.declaration import Plan, conflicts
from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain_plugins.strategies.declared import zero as declared
from drivetrain_plugins.strategies.declared.zero import ZERO, ZeroOptions
from tests.distributed import run_ranks
from tests.ports import free_port
from tests.resume.runs import Everything, assert_same, end, fit
from tests.runs import QUIET, Classifier, Outcome, difference, loader, train
from tests.strategies import parity
from tests.strategies.gpt import TinyGPT
from tests.strategies.reads_weights import ReadsWeights
from tests.strategies.test_skipped_batches import SkippingClassifier, Weighing, of

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
    import deepspeed  # noqa: F401  # before the workers are forked: it takes seconds

OPTIONS: dict[str, Any] = {"precision": "32-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """Nothing is too small to be shared out in these tests."""
    return {"name": "zero", "stage": stage, "persistence_threshold": 0, **options}


def reference(make: Any = Classifier, **options: Any) -> Outcome:
    return train(make, validation=loader(23, 5, False), **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("stage", "devices"), [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]
)
def test_each_stage_trains_as_one_process(stage: int, devices: int) -> None:
    run = train(strategy=zero(stage), devices=devices, validation=loader(23, 5, False), **OPTIONS)
    assert max(difference(reference(), run).values()) < 1e-6


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gpt_has_the_losses_of_one_process(stage: int) -> None:
    """Weights are not compared: Adam makes steps of full size out of the rounding in gradients that are zero."""
    run = parity.run(zero(stage), 2, precision="32-true", max_steps=10)
    expected = parity.reference(precision="32-true", max_steps=10)
    assert len(run.curve) == 10
    assert max(abs(a - b) for (_, a), (_, b) in zip(run.curve, expected.curve, strict=True)) < 1e-6


class LooksAtWhole(TinyGPT):
    """Whether a matrix was gathered in bf16: it is widened again where it arrives."""

    narrow = False

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].mlp.up.register_forward_hook(self._look)

    def _look(self, layer: nn.Module, *rest: Any) -> None:
        if self.trainer.world_size > 1:
            assert torch.equal(layer.weight, layer.weight.bfloat16().float()) is self.narrow


class LooksAtNarrow(LooksAtWhole):
    narrow = True


@pytest.mark.parametrize(
    ("stage", "narrow", "make"),
    [(1, True, LooksAtWhole), (2, True, LooksAtWhole), (3, True, LooksAtNarrow), (3, False, LooksAtWhole)],
)
def test_under_bf16_mixed_matrices_go_from_rank_to_rank_in_bf16_where_that_is_asked_for(
    stage: int, narrow: bool, make: Any
) -> None:
    """DeepSpeed's third stage adds a layer's bias to a product that was rounded already."""
    strategy, tolerance = zero(stage, narrow_gather=narrow), 8e-3 if stage == 3 else 3e-3
    parity.check_parity(strategy, 2, tolerance, make=make, precision="bf16-mixed", max_steps=8)


def test_stage_0_sends_nothing_narrow() -> None:
    with pytest.raises(ConfigurationError, match=r"narrow_gather=true needs strategy\.stage=1 or more"):
        Trainer(strategy={"name": "zero", "stage": 0, "narrow_gather": True}, devices=2, **QUIET)


class Weighted(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        kept = (y != 0).float()
        loss = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (loss * kept).sum() / kept.sum().clamp(min=1), "weight": float(kept.sum())}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_that_weigh_themselves(stage: int) -> None:
    run = train(Weighted, zero(stage), 2, validation=loader(23, 5, False), **OPTIONS)
    assert max(difference(reference(Weighted), run).values()) < 1e-6


def test_evaluation_and_prediction(tmp_path: Path) -> None:
    trainer, module = (
        Trainer(strategy=zero(3), devices=2, max_epochs=1, precision="32-true", seed=3, **QUIET),
        Classifier(),
    )
    trainer.fit(module, loader())
    found = torch.cat(trainer.predict(module, loader(23, 5, False)) or [])
    with torch.no_grad():
        expected = torch.cat([module.net(x.float()) for x, _ in loader(23, 5, False)])
    # A batch comes in parts, one from each rank, in the order of the data.
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


# -- one worker --------------------------------------------------------------------------------------------------
class Breaks(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ArithmeticError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_lone_worker_gives_module_and_optimizer_back(stage: int, tmp_path: Path) -> None:
    """What it takes is a process group in the script's own process, and the fixtures see that nothing is left of it."""
    run = train(strategy=zero(stage), devices=1, validation=loader(23, 5, False), max_epochs=1, precision="32-true")
    run.trainer.validate(run.module, loader(23, 5, False), verbose=False)
    run.trainer.save_checkpoint(tmp_path / "after")
    assert not torch.distributed.is_initialized()
    further: dict[str, Any] = {"max_epochs": 2, "precision": "32-true", "seed": 3, **QUIET}
    module = Classifier()
    Trainer(devices=1, **further).fit(module, loader(), ckpt_path=tmp_path / "after")
    whole = train(devices=1, max_epochs=2, precision="32-true")
    assert max(float((module.state_dict()[k] - w).abs().max()) for k, w in whole.weights.items()) < 1e-6


def test_a_lone_worker_that_fails_leaves_nothing() -> None:
    with pytest.raises(ArithmeticError, match="on purpose"):
        train(Breaks, zero(2), 1, precision="32-true")
    gc.collect()  # the error's frames held the engine
    assert not torch.distributed.is_initialized()


class Collects(Callback):
    """Lets go of what was there before training, and keeps the optimizer's states of its end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        gc.collect()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.states = trainer.strategy.state_dict(trainer.optimizers)["optimizers"][0]["state"]


def test_an_engine_that_has_ended_takes_nothing_from_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job that goes on, as under torchrun, nothing else collects it before."""

    def twice(rank: int, world_size: int) -> list[float]:
        torch.distributed.destroy_process_group()  # the Trainer makes one
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        gc.disable()
        options: dict[str, Any] = {"strategy": zero(1), "devices": 2, "precision": "32-true", **QUIET}
        module, callback = Classifier(), Collects()
        trainer = Trainer(max_epochs=1, callbacks=[callback], **options)
        trainer.fit(module, loader())
        trainer.max_epochs = 2
        trainer.fit(module, loader())
        trainer.close()
        return [float(value.abs().max()) for state in callback.states.values() for value in state.values()]

    of_torchrun = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "MASTER_PORT": free_port()}
    for name, value in (of_torchrun | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}).items():
        monkeypatch.setenv(name, str(value))
    assert all(largest and min(largest) > 0 for largest in run_ranks(twice, 2))


# -- state ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((zero(1), 2), ("single", 1)),
        ((zero(3), 3), (zero(2), 2)),
        (("single", 1), (zero(3), 2)),
        ((zero(2), 1), (zero(3), 2)),
        ((zero(2), 2), ("ddp", 2)),
        (("ddp", 2), (zero(0), 2)),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy(before: Any, after: Any, tmp_path: Path) -> None:
    def run(folder: Path, place: Any, *moments: str, resume: Path | None = None) -> dict[str, Any]:
        options = {"strategy": place[0], "devices": place[1], "precision": "32-true"}
        module, data = Everything(dropout=0.0), loader(18, 4)
        fit(folder, *moments, module=module, data=data, resume=resume, **options)
        return end(folder, 0, place[1])

    whole = run(tmp_path / "whole", before, "batch")
    resumed = run(tmp_path / "resumed", after, resume=tmp_path / "whole" / "2-batch-0.ckpt")
    for (_, a), (_, b) in zip(*(state["loops"]["loss_curve"] for state in (whole, resumed)), strict=True):
        assert abs(a - b) < 1e-6
    for name, value in whole["state_dict"].items():
        assert float((value - resumed["state_dict"][name]).abs().max()) < 2e-6, name
    states = [state["optimizer_states"][0]["state"] for state in (whole, resumed)]
    for name, state in states[0].items():
        for key, value in state.items():
            other = torch.as_tensor(states[1][name][key])
            assert float((torch.as_tensor(value) - other).abs().max()) < 1e-6, (name, key)


@pytest.mark.parametrize("stage", [1, 3])
def test_resumed_in_mid_epoch_with_the_same_bits(stage: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": zero(stage), "devices": 2, "precision": "32-true"}
    whole = fit(tmp_path / "whole", "batch", **options)
    resumed = fit(tmp_path / "resumed", resume=whole / "4-batch-1.ckpt", **options)
    assert_same(whole, resumed, 2, best=False)


# -- refusals ---------------------------------------------------------------------------------------------------
class SkipsOnOne(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        skips = batch_idx == 1 and self.trainer.global_rank == 1
        return None if skips else super().training_step(batch, batch_idx)


class SkipsTheFirst(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.trainer.global_rank == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("stage", "make"), [(2, SkipsTheFirst), (3, SkipsOnOne)])
def test_no_batch_is_skipped_on_some_ranks_where_backward_is_everybodys(stage: int, make: Any) -> None:
    with pytest.raises(Exception, match=r"every rank takes part.*strategy\.stage=1"):
        train(make, zero(stage), 2, precision="32-true")


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}], ids=["", "windows"])
@pytest.mark.parametrize("size", [5_000, 40])
@pytest.mark.parametrize("make", [SkippingClassifier, Weighing])
def test_batches_that_some_ranks_skip(make: type[Any], size: int, more: dict[str, Any], devices: int) -> None:
    options: dict[str, Any] = {"precision": "32-true", "max_epochs": 2, "data": loader(51, 7, False), **more}
    made = of(make, devices)
    runs = [train(made, place, devices, **options) for place in ("ddp", zero(2) | {"bucket_size": size})]
    assert max(difference(*runs).values()) < 1e-6


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}], ids=["", "windows"])
@pytest.mark.parametrize("make", [of(SkippingClassifier, 3), of(Weighing, 3), SkipsTheFirst])
@pytest.mark.parametrize("stage", [0, 1])
def test_windows_without_a_loss_on_some_ranks(stage: int, make: type[Any], more: dict[str, Any]) -> None:
    """Nothing is reduced before the step, and there a rank without a loss in its whole window left the others alone."""
    options: dict[str, Any] = {"precision": "32-true", "max_epochs": 2, "data": loader(51, 7, False), **more}
    runs = [train(make, place, 3, timeout=15, **options) for place in ("ddp", zero(stage))]
    assert max(difference(*runs).values()) < 1e-6


class Watches(Classifier):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        found = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("found", float(len(found)), on_step=False, on_epoch=True)


@pytest.mark.parametrize(
    ("stage", "found", "said"), [(0, 6, "this rank's own"), (1, 6, "this rank's own"), (2, 0, "no"), (3, 0, "no")]
)
def test_a_hook_that_does_not_find_the_gradients_is_told_of(stage: int, found: int, said: str) -> None:
    options: dict[str, Any] = {"precision": "32-true", "max_epochs": 1}
    assert train(Watches, {"name": "zero", "stage": stage}, 2, **options).metrics["found"] == found
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "under strategy=zero")  # which the workers inherit
        with pytest.raises(WorkerError, match=rf"have {said} gradients.* when Watches\.on_before_optimizer_step is"):
            train(Watches, {"name": "zero", "stage": stage}, 2, **options)


@pytest.mark.parametrize(("make", "devices"), [(Watches, 1), (Classifier, 2)])
def test_where_they_are_found_nothing_is_told(make: type[Classifier], devices: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "under strategy=zero")
        train(make, zero(1), devices, precision="32-true", max_epochs=1)


class Clamps(Classifier):
    """As critics are held to a range."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class Halves(Classifier):
    def on_train_epoch_end(self) -> None:
        self.load_state_dict({name: value / 2 for name, value in self.state_dict().items()})


class Replaces(Classifier):
    """Not written to where they lie, but given others."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


@pytest.mark.parametrize("make", [Clamps, Halves, Replaces])
@pytest.mark.parametrize(("stage", "devices"), [(0, 2), (1, 1), (1, 3), (2, 3)])
def test_weights_that_a_hook_writes_to_are_what_the_next_step_starts_from(make: Any, stage: int, devices: int) -> None:
    """The engine's own copies were put over them."""
    options: dict[str, Any] = {"precision": "32-true", "max_epochs": 3}
    assert max(difference(train(make, **options), train(make, zero(stage), devices, **options)).values()) < 1e-6


def test_a_hook_that_finds_no_weights_is_told_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "under strategy=zero")
        with pytest.raises(WorkerError, match=r"parameters are empty when Clamps\.on_train_batch_end is called"):
            train(Clamps, zero(3), 2, precision="32-true", max_epochs=1)


class Skips(Classifier):
    """No rank has a loss of the batches 1 and 4, of the first of which it was not even asked for scores."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 4 else loss


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 3}], ids=["", "windows"])
def test_a_batch_of_which_no_rank_has_a_loss_is_left_out(stage: int, more: dict[str, Any]) -> None:
    options: dict[str, Any] = {"precision": "32-true", "max_epochs": 2, **more}
    reference, run = train(Skips, **options), train(Skips, zero(stage), 2, **options)
    assert reference.steps == run.steps > 0
    assert max(difference(reference, run).values()) < 1e-6


class Shaped(Classifier):
    """Steps its matrices by what their rows and columns are."""

    kind: Any = torch.optim.Adafactor

    def configure_optimizers(self) -> Any:
        return self.kind([p for p in self.parameters() if p.ndim == 2], lr=0.01)


class Orthogonal(Shaped):
    kind = torch.optim.Muon


@pytest.mark.parametrize(("stage", "devices"), [(1, 2), (3, 2), (1, 1)])
@pytest.mark.parametrize("made", [Shaped, Orthogonal])
def test_an_optimizer_that_looks_at_shapes_is_refused(made: type[Shaped], stage: int, devices: int) -> None:
    said = rf"{made.kind.__name__} makes of a parameter's rows and columns .*stage={stage}.*strategy=ddp"
    with pytest.raises(ConfigurationError, match=said):
        train(made, {"name": "zero", "stage": stage}, devices, precision="32-true", max_epochs=1)


def test_options_and_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**options: Any) -> str:
        return " ".join(map(str, conflicts(Plan("zero", ZeroOptions(**options), world_size=2), ZERO)))

    assert not found()
    assert "strategy.stage=4" in found(stage=4)
    assert "bucket_size=0" in found(bucket_size=0)
    assert "persistence_threshold=-1" in found(persistence_threshold=-1)
    monkeypatch.setattr(declared, "find_spec", lambda name: None)
    assert found() == "strategy=zero needs DeepSpeed: pip install 'deepspeed>=0.19'"


class Penalised(Classifier):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + 0.01 * sum(weight.abs().sum() for weight in self.parameters())


def test_a_penalty_on_weights() -> None:
    short: dict[str, Any] = {"max_steps": 4, "precision": "32-true"}
    two = train(Penalised, {"name": "zero", "stage": 2}, 2, **short)
    assert max(difference(train(Penalised, **short), two).values()) < 2e-6
    with pytest.raises(WorkerError, match=r"where they are empty .* use strategy\.stage=2"):
        train(Penalised, {"name": "zero", "stage": 3}, 2, **short)


class LooksAtItsOptimizer(Classifier):
    """Between steps, as who logs or keeps what is in it does."""

    def __init__(self) -> None:
        super().__init__("adamw")

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.parameters() if (p.ndim == 1) == bias]} for bias in (False, True)]
        return torch.optim.AdamW(groups, lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        kept = optimizer.state_dict()
        assert [len(group["params"]) > 0 for group in kept["param_groups"]] == [True, True]
        assert len(kept["state"]) == sum(len(group["params"]) for group in kept["param_groups"])
        assert all(float(state["step"]) == self.trainer.global_step for state in kept["state"].values())
        optimizer.load_state_dict(kept)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_can_be_looked_at_between_steps(stage: int) -> None:
    short: dict[str, Any] = {"max_steps": 5, "precision": "32-true"}
    found = train(LooksAtItsOptimizer, {"name": "zero", "stage": stage}, 2, **short)
    assert max(difference(train(LooksAtItsOptimizer, **short), found).values()) < 2e-6


class CompiledWithin(Classifier):
    """``in_place``: by the module's own method, which puts nothing around it."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        if in_place:
            self.net[0].compile(backend="eager")
        else:
            self.net[0] = torch.compile(self.net[0], backend="eager")


def test_a_part_that_is_compiled() -> None:
    few: dict[str, Any] = {"max_steps": 3, "precision": "32-true"}
    one, third = train(lambda: CompiledWithin(True), **few), {"name": "zero", "stage": 3}
    assert max(difference(one, train(lambda: CompiledWithin(True), third, 2, **few)).values()) < 2e-6
    with pytest.raises(ConfigurationError, match=r"net\.0 is what torch\.compile made .* \(net\.0\.compile\(\)\)"):
        train(CompiledWithin, third, 2, **few)


class AddsAGroup(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2:].parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": [*self.net[0].parameters()]})


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_group_that_is_added_while_training_is_refused(stage: int) -> None:
    with pytest.raises(WorkerError, match="SGD was given a group of parameters while strategy=zero trains"):
        train(AddsAGroup, {"name": "zero", "stage": stage}, 2, precision="32-true")


@pytest.mark.parametrize("where", ["training", "factor", "kinds", "layer", "nowhere"])
def test_a_step_that_computes_with_empty_weights_is_told_of(where: str) -> None:
    """Not with those of a layer, which the engine gathers when it is asked for."""

    def run(*place: Any) -> Any:
        return train(lambda: ReadsWeights(where), *place, max_steps=4, precision="32-true")

    third = {"name": "zero", "stage": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a step of .* computes with weights")  # which the workers inherit
        if where in {"training", "factor"}:
            with pytest.raises(WorkerError, match=r"net\.0\.weight.*where they are empty under strategy=zero"):
                run(third, 2)
        else:
            assert max(difference(run(), run(third, 2)).values()) < 2e-6
