"""Optimizers and scalers with a memory of their own go on from a checkpoint with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain.lightning as L
from drivetrain import TrainModule, checkpoint
from drivetrain.errors import CheckpointError, WorkerError
from drivetrain.lightning.demos.boring_classes import BoringModel
from drivetrain.named_optimizer import load_named_state, named_state
from tests.facade.recorder import QUIET
from tests.resume.runs import Everything, assert_same, end, fit
from tests.runs import Classifier, Gan


class Lbfgs(Classifier):
    """A history of curvature and a line search that calls the closure again."""

    def __init__(self) -> None:
        super().__init__("lbfgs")


class Counting(torch.optim.SGD):
    """A schedule within: it counts steps in its state, beside what it keeps of each parameter, as MADGRAD does."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        count = self.state.setdefault("count", torch.zeros(1, dtype=torch.long))
        count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + count.item())
        return super().step(closure)


class Slow(torch.optim.SGD):
    """Keeps weights of its own, which its ``state_dict`` gives beside torch's parts, as Lookahead does."""

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        slow = vars(self).setdefault("slow", [p.detach().clone() for p in self._all()])
        loss = super().step(closure)
        with torch.no_grad():
            for held, p in zip(slow, self._all(), strict=True):
                p.lerp_(held.lerp_(p, 0.5), 0.5)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": [t.clone() for t in vars(self).get("slow", [])]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self)["slow"] = [t.clone() for t in state_dict["slow"]]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "slow"})


class Signs(torch.optim.SGD):
    """Counts for each weight how often it grew, in whole numbers, and notes which did last."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        loss = super().step(closure)
        for p, former in zip(parameters, before, strict=True):
            self.state[p].setdefault("grown", torch.zeros_like(p, dtype=torch.int16))
            self.state[p]["grown"] += p.detach() > former
            self.state[p]["last"] = p.detach() > former
        with torch.no_grad():
            for p in parameters:
                p.mul_(1 - 0.001 * (self.state[p]["grown"] % 3)).add_(0.001 * ~self.state[p]["last"])
        return loss


class Within(torch.optim.SGD):
    """Keeps averages of gradients in dictionaries and lists of a parameter's state."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", {"slow": torch.zeros_like(p), "last": [torch.zeros_like(p)]})
            kept["slow"] += 0.1 * (p.grad - kept["slow"])
            kept["last"] = [*kept["last"][-1:], p.grad.clone()]
            with torch.no_grad():
                p.sub_(kept["slow"] + kept["last"][0], alpha=0.01)
        return loss


class Nesterov(torch.optim.NAdam):
    def __init__(self, parameters: Any, lr: float, momentum: float) -> None:
        super().__init__(parameters, lr=lr, betas=(momentum, 0.99))


class Wrapping(torch.optim.Optimizer):
    """Another optimizer within, whose ``state_dict`` it gives under a name of its own: torch's parts are not there."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(list(parameters), {})
        self.within = Slow([p for group in self.param_groups for p in group["params"]], **options)
        self.param_groups = self.within.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        return self.within.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.within.state_dict(), "places": {(0, i): i for i in range(len(self.param_groups))}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.within.load_state_dict(state_dict["base"])


class Stepped(Everything):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1, momentum=0.9)


class Overflowing(Everything):
    """The gradient of batch ``at`` of the first epoch is infinite on the last rank, or on the only one."""

    def __init__(self, at: int = 3) -> None:
        super().__init__()
        self.at = at
        self.first: nn.Linear = next(layer for layer in self.modules() if isinstance(layer, nn.Linear))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        here = self.trainer.global_rank == self.trainer.world_size - 1
        if here and self.trainer.current_epoch == 0 and batch_idx == self.at:
            weights = self.first.weight.sum()
            loss = loss + (weights - weights.detach()) * 1e36  # finite until it is scaled
        return loss


def _stopped_and_resumed(
    folder: Path, make: Callable[[], TrainModule], steps: tuple[int, ...], options: dict[str, Any]
) -> Path:
    """The whole run, saved after each of ``steps`` and gone on from there; its folder."""
    workers = options["devices"]
    options = {"validation": False, **options}
    whole = fit(folder / "whole", "batch", module=make(), **options)
    for step in steps:
        (saved,) = whole.glob(f"{step}-batch-*.ckpt")
        resumed = fit(folder / str(step), module=make(), resume=saved, **options)
        assert_same(whole, resumed, workers, best=False)
    return whole


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ring", 2)])
def test_lbfgs(strategy: str, devices: int, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": 1}
    whole = _stopped_and_resumed(tmp_path, Lbfgs, (1, 4, 7), options)
    (state,) = checkpoint.load(whole / "7-batch-1.ckpt", world_size=devices).shared["optimizer_states"]
    assert "old_dirs" in str(state)  # else nothing of the history was there to be lost


@pytest.mark.parametrize("kind", [Counting, Slow, Wrapping])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_what_an_optimizer_keeps_beside_the_states_of_parameters(
    strategy: str, devices: int, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    options = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": 1}
    whole = _stopped_and_resumed(tmp_path, lambda: Stepped(kind), (1, 4), options)
    (state,) = end(whole, 0, devices)["optimizer_states"]
    kept = {Counting: ("beside", "count"), Slow: ("further", "slow"), Wrapping: ("further", "base")}
    part, key = kept[kind]
    assert key in state[part]


@pytest.mark.parametrize("kind", [Signs, Nesterov])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_states_of_another_kind_of_number_than_the_weights(
    strategy: str, devices: int, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    options = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": 1}
    whole = _stopped_and_resumed(tmp_path, lambda: Stepped(kind), (1, 4), options)
    (state,) = end(whole, 0, devices)["optimizer_states"]
    (some, *_) = state["state"].values()
    key, dtype = ("grown", torch.int16) if kind is Signs else ("mu_product", torch.float32)
    assert some[key].dtype == dtype


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_states_within_states_are_cut_as_parameters_are(strategy: str, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 1}
    _stopped_and_resumed(tmp_path, lambda: Stepped(Within), (4,), options)


def test_weights_that_an_optimizer_keeps_a_second_time_are_not_cut(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "validation": False}
    whole = fit(tmp_path / "whole", "batch", module=Stepped(Slow), strategy="single", devices=1, **options)
    (saved,) = whole.glob("4-batch-*.ckpt")
    with pytest.raises(WorkerError, match=r"whole tensors that Slow keeps beside .* \(slow\), .*strategy=ddp"):
        fit(tmp_path / "cut", module=Stepped(Slow), resume=saved, strategy="fsdp", devices=2, **options)


def test_a_state_in_a_form_of_its_own_in_a_file(tmp_path: Path) -> None:
    class Own(BoringModel):
        def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
            super().__init__()
            self.kind = kind

        def configure_optimizers(self) -> Any:
            return self.kind(self.parameters(), lr=0.1, momentum=0.9)

    def fitted(epochs: int, kind: type[torch.optim.Optimizer] = Wrapping, resume: Path | None = None) -> L.Trainer:
        trainer = L.Trainer(max_epochs=epochs, limit_val_batches=0, default_root_dir=tmp_path, **QUIET)
        trainer.fit(Own(kind), ckpt_path=resume)
        return trainer

    saved = tmp_path / "a.ckpt"
    fitted(1).save_checkpoint(saved)
    (state,) = torch.load(saved, weights_only=True)["optimizer_states"]
    assert state.keys() == {"base", "places"} and state["places"] == {(0, 0): 0}
    assert [t.shape for t in state["base"]["slow"]] == [(2, 32), (2,)]
    fitted(2, resume=saved).save_checkpoint(tmp_path / "b.ckpt")
    assert torch.load(tmp_path / "b.ckpt", weights_only=True)["optimizer_states"][0]["base"]["slow"]
    fitted(1, torch.optim.SGD).save_checkpoint(tmp_path / "sgd.ckpt")
    for kind, other in ((torch.optim.SGD, saved), (Wrapping, tmp_path / "sgd.ckpt")):
        with pytest.raises(CheckpointError, match=f"kept its state in another form than {kind.__name__} does"):
            fitted(2, kind, other)


@pytest.mark.parametrize("own_form", [True, False])
def test_optimizers_put_in_place_when_the_fit_starts(own_form: bool, tmp_path: Path) -> None:
    """Their states are loaded into them, and not into those that the module configures."""

    class Averaging(torch.optim.Optimizer):
        def __init__(self, within: torch.optim.Optimizer) -> None:
            self.within = within
            self.average = [p.detach().clone() for group in within.param_groups for p in group["params"]]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.within, name)

        def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
            loss = self.within.step(closure)
            of = (p for group in self.within.param_groups for p in group["params"])
            for held, p in zip(self.average, of, strict=True):
                held.lerp_(p.detach(), 0.5)
            return loss

        def state_dict(self) -> dict[str, Any]:
            within = self.within.state_dict()
            return {**({"opt": within} if own_form else within), "average": [t.clone() for t in self.average]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            kept = {key: value for key, value in state_dict.items() if key != "average"}
            self.within.load_state_dict(kept["opt"] if own_form else kept)
            self.average = [t.clone() for t in state_dict["average"]]

    class Average(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers = [Averaging(optimizer) for optimizer in trainer.optimizers]

    class Momentum(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def fitted(epochs: int, resume: Path | None = None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(1)
        module, saved = Momentum(), tmp_path / f"{epochs}.ckpt"
        trainer = L.Trainer(
            max_epochs=epochs,
            callbacks=[Average()],
            limit_train_batches=3,
            limit_val_batches=0,
            log_every_n_steps=1,
            default_root_dir=tmp_path,
            **QUIET,
        )
        trainer.fit(module, ckpt_path=resume)
        trainer.save_checkpoint(saved)
        (state,) = torch.load(saved, weights_only=True)["optimizer_states"]
        return module.state_dict(), state["average"]

    weights, average = fitted(2)
    fitted(1)
    again, resumed = fitted(2, tmp_path / "1.ckpt")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert all(map(torch.equal, average, resumed))


class Replacing(Classifier):
    """Steps another optimizer than the one it configures."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"net.0": "columns", "net.2": "rows"}

    def on_fit_start(self) -> None:
        self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.02)]


MESH = {"name": "mesh", "data": 1, "shard": 2, "tensor": 1}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", MESH], ids=["ddp", "fsdp", "mesh"])
def test_one_put_in_place_gets_this_ranks_part_of_its_state(strategy: Any, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 1}
    _stopped_and_resumed(tmp_path, Replacing, (2, 7), options)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_two_toggled_optimizers(strategy: str, devices: int, tmp_path: Path) -> None:
    options = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": 1}
    whole = _stopped_and_resumed(tmp_path, Gan, (2, 5, 8), options)
    assert len(end(whole, 0, devices)["optimizer_states"]) == 2


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_a_loss_scale_after_an_overflow(strategy: str, devices: int, tmp_path: Path) -> None:
    options = {
        "strategy": strategy,
        "devices": devices,
        "validation": True,
        "accumulate_grad_batches": 1,
        "precision": "16-mixed",
        "loss_scale": "dynamic",
    }
    whole = _stopped_and_resumed(tmp_path, Overflowing, (2, 4, 6), options)
    before, after = (
        checkpoint.load(path, world_size=devices).shared["precision"]["scaler"]["scale"]
        for step in (2, 4)
        for path in whole.glob(f"{step}-batch-*.ckpt")
    )
    assert after == before / 2  # the overflow lies between them
    assert end(whole, 0, devices)["precision"]["scaler"]["scale"] == after


@pytest.mark.parametrize(("saved", "now", "missing"), [("adamw", "sgd", "dampening"), ("sgd", "adamw", "step")])
def test_what_another_optimizer_left_is_refused(saved: str, now: str, missing: str) -> None:
    def made(kind: str) -> tuple[Classifier, Any]:
        module = Classifier(kind)
        module.net(torch.ones(1, 6)).sum().backward()
        return module, module.configure_optimizers()["optimizer"]

    def goes_on() -> None:
        load_named_state(module, optimizer, state)
        optimizer.step()

    module, optimizer = made(saved)
    optimizer.step()
    state = named_state(module, optimizer)
    module, optimizer = made(now)
    with pytest.raises(CheckpointError, match=rf"in another form than \w+ does \('{missing}' is missing\)"):
        goes_on()
    module, optimizer = made(saved)
    goes_on()
