"""Pipelines of 2 to 4 stages, held to the run on one process."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # before the workers are forked
import torchmetrics
from torch import nn

from drivetrain import Callback, Trainer, handover
from drivetrain.declaration import Plan, conflicts
from drivetrain.errors import ConfigurationError, WorkerError
from drivetrain_plugins.strategies.declared.pipeline import PIPELINE, PipelineOptions
from drivetrain_plugins.strategies.pipeline_cut import balance, cost, cut
from drivetrain_plugins.strategies.pipeline_schedule import runs
from recipes.char_lm.model import GPT
from tests.resume.runs import Everything, assert_same, end, fit, noisy_loader
from tests.runs import QUIET, Classifier, difference, loader, seeded, train
from tests.strategies.gpt import TinyGPT, tiny_gpt, token_loader
from tests.strategies.parity import check_parity
from tests.strategies.reads_weights import ReadsWeights


# -- cutting ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 9, 0], [0, 0, 0, 0], [3, 0, 3, 0, 3, 7]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_heaviest_stage_is_as_light_as_can_be(costs: list[int], parts: int) -> None:
    found = balance(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(found)
    every_cut = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), parts - 1)]
    best = min(max(sum(costs[a:b]) for a, b in pairwise(edges)) for edges in every_cut)
    assert max(sum(costs[i] for i in part) for part in found) == best


def test_stages_take_about_as_long_as_each_other() -> None:
    """A large vocabulary is looked up at one end and multiplied with at the other."""
    net = GPT(vocab=1000, context=16, layers=6, heads=2, width=32, tied=True)
    first, last = cut("", net, 2)
    assert (len(first.blocks), len(last.blocks)) == (1 + 4, 2 + 2)
    assert [cost(block) for block in (net.token, net.head, nn.Sequential(net.head, net.head))] == [0, 32000, 32000]


@pytest.mark.parametrize("total", range(1, 18))
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_every_sample_is_in_one_piece(total: int, microbatches: int) -> None:
    found = runs(total, microbatches)
    assert sum(pieces * size for pieces, size in found) == total
    assert sum(pieces for pieces, _ in found) <= microbatches


# -- parity -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 2), ("1f1b", 3), ("interleaved_1f1b", 2), ("gpipe", 4)])
def test_a_gpt_is_trained_as_on_one_process(schedule: str, devices: int) -> None:
    check_parity({"name": "pipeline", "schedule": schedule}, devices)


@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", 2), ("interleaved_1f1b", 3)])
def test_tied_weights_have_the_gradient_of_both_ends(schedule: str, devices: int) -> None:
    options = {"microbatches": 3} if devices == 3 else {}
    outcome = check_parity({"name": "pipeline", "schedule": schedule, **options}, devices, make=partial(tiny_gpt, True))
    assert torch.equal(outcome.weights["model.token.weight"], outcome.weights["model.head.weight"])


class Masked(Classifier):
    """Losses that weigh themselves, batches that are skipped, and a network that is called by name."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        kept = y != 0
        self.log("train/kept", kept.double().sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx == 1:
            return None
        loss = nn.functional.cross_entropy(scores, y, reduction="none")
        return {"loss": (loss * kept).sum() / kept.sum().clamp(min=1), "weight": float(kept.sum())}


def test_weighted_and_skipped_losses() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": 0.3}
    found = difference(train(Masked, **options), train(Masked, "pipeline", 2, **options))
    assert max(found.values()) < 1e-10


@pytest.mark.parametrize("batch_size", [1, 7])
def test_batches_that_do_not_divide(batch_size: int) -> None:
    data = loader(30, batch_size)
    strategy = {"name": "pipeline", "schedule": "1f1b", "microbatches": 4}
    found = difference(train(data=data, max_epochs=1), train(strategy=strategy, devices=3, data=data, max_epochs=1))
    assert max(found.values()) < 1e-10


class Augmented(Classifier):
    """Draws numbers in the step, around a network that draws as well; each rank writes down what it drew."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4)))
        self.folder, self.draws = folder, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.rand(())
        self.draws.append(float(noise))
        return nn.functional.cross_entropy(self.net(x * noise), y) * noise

    def on_fit_end(self) -> None:
        torch.save({"draws": self.draws, "after": torch.rand(3)}, self.folder / f"{self.global_rank}.pt")


def test_both_ends_draw_the_same_numbers(tmp_path: Path) -> None:
    train(lambda: Augmented(tmp_path), "pipeline", 2, max_epochs=1, data=loader(48))
    first, last = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["draws"] == last["draws"]  # what the last draws once more, to learn the shapes, is not kept
    assert len(set(first["draws"])) == 6 * 4  # other numbers for each piece
    assert torch.equal(first["after"], last["after"])


# -- evaluation and state ---------------------------------------------------------------------------------------
def test_evaluation_and_prediction_go_through_the_pipeline() -> None:
    def results(**options: Any) -> tuple[Any, Any]:
        trainer, module = Trainer(precision="64-true", **options, **QUIET), Classifier()
        return trainer.test(module, loader(23, 5, False)), trainer.predict(module, loader(23, 5, False))

    (single,), expected = results()
    (piped,), predictions = results(strategy="pipeline", devices=3)
    assert single.keys() == piped.keys()
    assert max(abs(single[name] - piped[name]) for name in single) < 1e-12
    assert [len(p) for p in predictions] == [5, 5, 5, 5, 3]
    assert torch.allclose(torch.cat(predictions), torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("pipeline", 3), ("single", 1)),
        (("single", 1), ("pipeline", 2)),
        (({"name": "pipeline", "schedule": "interleaved_1f1b"}, 2), ("ddp", 2)),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy(before: Any, after: Any, tmp_path: Path) -> None:
    def run(folder: Path, place: Any, *moments: str, resume: Path | None = None) -> dict[str, Any]:
        module, data = Everything(dropout=0.0), loader(18, 4)
        fit(folder, *moments, module=module, data=data, resume=resume, strategy=place[0], devices=place[1])
        return end(folder, 0, place[1])

    whole = run(tmp_path / "whole", before, "batch")
    resumed = run(tmp_path / "resumed", after, resume=tmp_path / "whole" / "2-batch-0.ckpt")
    for (_, a), (_, b) in zip(*(state["loops"]["loss_curve"] for state in (whole, resumed)), strict=True):
        assert abs(a - b) < 1e-10
    for name, value in whole["state_dict"].items():
        assert float((value - resumed["state_dict"][name]).abs().max()) < 1e-10


def test_resumed_in_mid_epoch_with_the_same_bits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": {"name": "pipeline", "schedule": "1f1b"}, "devices": 2}
    whole = fit(tmp_path / "whole", "batch", **options)
    resumed = fit(tmp_path / "resumed", data=noisy_loader(), resume=whole / "4-batch-1.ckpt", **options)
    assert_same(whole, resumed, 2, best=False)


# -- refusals ---------------------------------------------------------------------------------------------------
class Twice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean() + self.net(batch[0]).sum()


class OnceForEach(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(self.net(part).mean() for part in batch[0].split(1))


class Never(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net[0](batch[0]).mean()


class Two(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


class Unknown(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Bilinear(2, 2, 2)


@pytest.mark.parametrize(
    ("make", "devices", "message"),
    [
        (Two, 2, "2 children with parameters"),
        (Unknown, 2, "pipeline_stages"),
        (Classifier, 6, "6 stages and net has 5 blocks"),
        (Twice, 2, r"self\.net\(\.\.\.\) more than once"),
    ],
)
def test_modules_that_cannot_be_cut_are_refused_before_launch(
    make: Any, devices: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "in_workers", None)
    with pytest.raises(ConfigurationError, match=message):
        train(make, "pipeline", devices)


@pytest.mark.parametrize(
    ("make", "message"), [(OnceForEach, r"self\.net\(\.\.\.\) more than once"), (Never, r"does not call self\.net")]
)
def test_steps_that_call_the_network_otherwise_end_before_a_step_is_made(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train(make, "pipeline", 2)


def test_results_of_several_loaders_are_each_its_own() -> None:
    """Only the last rank logs, and the first says what came of it."""
    found = {}
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        trainer = Trainer(strategy=strategy, devices=devices, precision="64-true", **QUIET)
        found[strategy] = trainer.validate(Classifier(), [loader(23, 5, False), loader(7, 3, False)], verbose=False)
    assert [one.keys() for one in found["pipeline"]] == [one.keys() for one in found["single"]]
    assert all("val/loss/dataloader_idx_0" not in one for one in found["single"][1:])


class Gathers(Classifier):
    def __init__(self, collective: str) -> None:
        super().__init__()
        self.collective = collective
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.collective == "barrier":
            self.trainer.strategy.barrier()
        elif self.collective == "reduce":
            self.trainer.strategy.reduce(loss)
        elif self.collective == "all_gather":
            self.all_gather(loss)
        elif self.collective == "compute":
            self.mean(loss)
            self.mean.compute()

    def on_validation_epoch_end(self) -> None:
        assert self.all_gather(torch.ones(1)).shape == (2, 1)


@pytest.mark.parametrize("collective", ["barrier", "reduce", "all_gather", "compute", "none"])
def test_a_collective_in_a_step_is_refused_for_other_ranks_do_not_come_to_it(collective: str) -> None:
    trainer = Trainer(strategy="pipeline", devices=2, precision="64-true", timeout=10, **QUIET)
    if collective == "none":
        trainer.validate(Gathers(collective), loader(23, 5, False))
        return
    said = {"compute": r"compute\(\) of a metric"}.get(collective, collective)
    with pytest.raises(WorkerError, match=f"{said} is called in a step under a pipeline"):
        trainer.validate(Gathers(collective), loader(23, 5, False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PipelineOptions(schedule="zigzag"), "use one of gpipe"),
        (PipelineOptions(microbatches=0), "at least 1"),
        (PipelineOptions(schedule="1f1b", microbatches=2), "as many microbatches as the 4 stages"),
        (PipelineOptions(schedule="interleaved_1f1b", microbatches=9), "set strategy.microbatches=12"),
        (PipelineOptions(virtual_stages=0), "virtual_stages=0"),
    ],
)
def test_options_that_do_not_go_together(options: PipelineOptions, message: str) -> None:
    assert [c for c in conflicts(Plan("pipeline", options, world_size=4), PIPELINE) if message in str(c)]


class Watches(TinyGPT):
    def on_after_backward(self) -> None:
        found = [name for name, parameter in self.named_parameters() if parameter.grad is not None]
        assert 0 < len(found) < len([*self.parameters()])


def test_a_hook_that_finds_gradients_of_some_stages_is_told_of() -> None:
    train(Watches, "pipeline", 2, data=token_loader(), max_steps=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "under strategy=pipeline")  # which the workers inherit
        with pytest.raises(WorkerError, match=r"of this rank's stages only when Watches\.on_after_backward is called"):
            train(Watches, "pipeline", 2, data=token_loader(), max_steps=2)


class Penalised(Classifier):
    """Its loss has a part that is of the weights themselves."""

    last_only = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weights = self.net[4].parameters() if self.last_only else self.parameters()
        return self.loss(batch) + 0.01 * sum(weight.abs().sum() for weight in weights)


class PenalisesTheLast(Penalised):
    last_only = True

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:  # a hook may give one to what other ranks hold
                parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("pipeline", 2), ({"name": "mesh", "data": 2, "pipeline": 2}, 4)], ids=["line", "mesh"]
)
def test_a_loss_of_weights_that_other_ranks_train_is_refused(strategy: Any, devices: int) -> None:
    with pytest.raises(WorkerError, match=r"beside the network's output \(net\.0\.weight, .* \(weight_decay\)"):
        train(Penalised, strategy, devices, max_steps=2)
    few: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 2}
    one, several = train(PenalisesTheLast, **few), train(PenalisesTheLast, strategy, devices, **few)
    assert max(difference(one, several).values()) < 1e-10


class AddsAGroup(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[2:].parameters(), lr=0.02)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": [*self.net[0].parameters()]})

    def on_train_end(self) -> None:
        states = self.trainer.strategy.state_dict(self.trainer.optimizers)["optimizers"]
        assert [len(group["params"]) for group in states[0]["param_groups"]] == [4, 2]
        assert len(states[0]["state"]) == 6


def test_a_group_that_is_added_while_training_is_trained_and_saved() -> None:
    assert max(difference(train(AddsAGroup), train(AddsAGroup, "pipeline", 2)).values()) < 1e-10


class ReadsOutputs(Classifier):
    """As who prints losses, or keeps them, does."""

    def __init__(self, key: str = "loss") -> None:
        super().__init__()
        self.key = key
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else {"loss": loss, "scores": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            assert outputs["loss"].dtype == torch.float64
            self.losses.append(float(outputs[self.key]))


def test_every_rank_is_given_the_loss_of_the_whole_batch() -> None:
    windows: dict[str, Any] = {"accumulate_grad_batches": 2}
    one, several = train(ReadsOutputs, **windows), train(ReadsOutputs, "pipeline", 3, **windows)
    assert len(one.module.losses) == 12
    assert max(abs(a - b) for a, b in zip(one.module.losses, several.module.losses, strict=True)) < 1e-10
    assert max(difference(one, several).values()) < 1e-10
    with pytest.raises(WorkerError, match=r"outputs\['scores'\] is asked for in on_train_batch_end"):
        train(lambda: ReadsOutputs("scores"), "pipeline", 2)


@pytest.mark.parametrize("where", ["training", "validation", "zero", "kinds", "nowhere"])
def test_a_step_that_computes_with_weights_of_other_ranks_is_told_of(where: str) -> None:
    def run(*place: Any) -> Any:
        return train(lambda: ReadsWeights(where), *place, max_epochs=1, validation=loader(23, 5, False))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a step of .* computes with weights")  # which the workers inherit
        if where not in {"kinds", "nowhere"}:
            with pytest.raises(WorkerError, match=r"net\.0\.weight.*, which other ranks of a pipeline train"):
                run("pipeline", 2)
            warnings.filterwarnings("ignore", "a step of .* computes with weights")
        if where not in {"training", "validation"}:
            assert max(difference(run(), run("pipeline", 2)).values()) < 1e-10


class KeepsWeights(Classifier):
    """As who saves, averages or measures them between many steps does; on each rank."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.kept: list[dict[str, torch.Tensor]] = []

    def _keep(self) -> None:
        self.kept.append({name: value.detach().clone() for name, value in self.state_dict().items()})

    def on_train_epoch_end(self) -> None:
        self._keep()

    def on_validation_epoch_end(self) -> None:
        self._keep()
        self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())


@pytest.mark.parametrize(
    ("strategy", "devices"), [("pipeline", 3), ({"name": "mesh", "data": 2, "pipeline": 2}, 4)], ids=["line", "mesh"]
)
def test_hooks_of_an_epochs_end_and_of_validation_find_the_weights_of_all_stages(strategy: Any, devices: int) -> None:
    data: dict[str, Any] = {"validation": loader(23, 5, False), "val_check_interval": 3}
    one, several = train(KeepsWeights, **data), train(KeepsWeights, strategy, devices, **data)
    assert len(one.module.kept) == len(several.module.kept) == 6
    for a, b in zip(one.module.kept, several.module.kept, strict=True):
        assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-10
    assert max(difference(one, several).values()) < 1e-10


class OnOneRank(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.seen.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.seen.append(float(sum(p.detach().norm() for p in module.parameters())))


class LooksOnOneRank(Classifier):
    """As a script does that each rank runs, which gives callbacks to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def configure_callbacks(self) -> list[Callback]:
        return [OnOneRank()] if self.trainer.is_global_zero else []


def test_a_callback_of_one_rank_only_finds_losses_and_weights_and_holds_nobody_up() -> None:
    one, two = train(LooksOnOneRank), train(LooksOnOneRank, "pipeline", 2)
    assert max(difference(one, two).values()) < 1e-10
    assert len(one.module.seen) == len(two.module.seen) == 16
    assert two.module.seen == pytest.approx(one.module.seen, abs=1e-6)  # losses are shown in fp32
