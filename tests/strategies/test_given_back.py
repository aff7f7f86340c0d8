"""A job that was started elsewhere: the caller's own module is trained in parts and is whole and plain afterwards."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain import Callback, Trainer, lightning
from drivetrain.checkpoint import Loaded, load
from drivetrain.errors import Interrupted, MissingCheckpointError
from drivetrain.strategy import Strategy
from drivetrain_plugins.callbacks.model_checkpoint import ModelCheckpoint
from tests.distributed import run_job
from tests.patience import SOON
from tests.runs import QUIET, Classifier, loader, train
from tests.strategies.gpt import TinyGPT, token_loader

OPTIONS: dict[str, Any] = {"max_steps": 3, "num_sanity_val_steps": 0, "seed": 3, "precision": "64-true"}


class Hooked(TinyGPT):
    """Has hooks of its own, before and after an engine's."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.model.register_forward_hook(self._count)

    def on_train_start(self) -> None:
        self.model.register_forward_hook(self._count)

    def _count(self, *rest: Any) -> None:
        self.calls += 1


def fit(rank: int, size: int, strategy: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What the module holds after a fit, having looked that nothing else is left in it."""
    module, trainer = Hooked(), Trainer(strategy=strategy, **OPTIONS, **QUIET)
    methods, kinds = dir(module), [type(one) for one in module.modules()]
    trainer.fit(module, token_loader())
    trainer.save_checkpoint(folder / "after.ckpt")
    assert not any(isinstance(tensor, DTensor) for tensor in [*module.parameters(), *module.buffers()])
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    assert [type(one) for one in module.modules()] == kinds
    assert set(dir(module)) - set(methods) <= {"trainer", "_trainer"}
    found = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if rank == 0:  # nobody else is asked for anything
        module.calls = 0
        module.model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
        assert module.calls == 2
        assert copy.deepcopy(module.model).state_dict().keys() == module.model.state_dict().keys()
    [metrics] = trainer.test(module, token_loader(23, 5, shuffle=False), verbose=False)
    assert metrics["test/loss"] > 0
    assert not any(isinstance(tensor, DTensor) for tensor in module.parameters())
    trainer.save_checkpoint(folder / "after_test.ckpt")
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("strategy", "size"),
    [("fsdp", 2), ("tensor_parallel", 2), ({"name": "mesh", "data": 1, "shard": 2, "tensor": 2}, 4)],
)
def test_the_callers_module_is_whole_again(strategy: Any, size: int, tmp_path: Path) -> None:
    expected = train(partial(TinyGPT, tied=True), data=token_loader(), max_steps=3).weights
    for weights in run_job(fit, size, strategy, tmp_path):
        assert weights.keys() == expected.keys()
        assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 1e-10
    # Saved after the module was given back, states by name all the same.
    [states] = load(tmp_path / "after.ckpt", rank=0, world_size=1).shared["optimizer_states"]
    assert states["state"].keys() == expected.keys() - {"model.head.weight"}
    _compare(tmp_path)


def saved_before_and_after_a_test(rank: int, size: int, strategy: Any, folder: Path) -> None:
    module, trainer = Classifier(), Trainer(strategy=strategy, **OPTIONS, **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.validate(module, loader(), verbose=False)
    trainer.save_checkpoint(folder / "after_test.ckpt")
    trainer.close()


def test_an_evaluation_in_between_changes_nothing_of_what_replicas_save(tmp_path: Path) -> None:
    run_job(saved_before_and_after_a_test, 2, {"name": "local_sgd", "period": 2, "outer": "nesterov"}, tmp_path)
    _compare(tmp_path)


def _compare(folder: Path) -> None:
    """What a script saves after a fit is the same after a test in between: states had lost their names by then."""
    first, second = (_tensors(load(folder / f"{name}.ckpt", rank=1, world_size=2)) for name in ("after", "after_test"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[place], second[place]) for place in first)


def _tensors(loaded: Loaded) -> dict[str, torch.Tensor]:
    """What a run goes on from, by where it lies."""
    shared, own = loaded.shared, loaded.own or {"strategy": {}}
    assert shared["optimizer_states"][0]["state"]

    def within(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, (dict, list)):
            for key, item in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
                yield from within(f"{place}/{key}", item)

    kept = {"weights": shared["state_dict"], "optimizers": shared["optimizer_states"], "own": own["strategy"]}
    return dict(within("", kept))


def saved_after_servers_are_gone(rank: int, size: int, folder: Path) -> list[str]:
    module, trainer = Classifier(), Trainer(strategy="parameter_server", **OPTIONS, **QUIET)
    trainer.fit(module, loader())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.save_checkpoint(folder / "after.ckpt")
    trainer.close()
    return [str(one.message) for one in told]


def test_states_of_optimizers_that_are_gone_with_their_servers_are_told_of(tmp_path: Path) -> None:
    trained, served = run_job(saved_after_servers_are_gone, 2, tmp_path)
    assert len(trained) == 1 and "parameter_server has no states of optimizers any more" in trained[0] and not served
    saved = load(tmp_path / "after.ckpt", rank=0, world_size=1)
    assert saved.meta["world_size"] == 1 and saved.shared["optimizer_states"] == []


def gone_on_beside_a_server(rank: int, size: int, strategy: Any, folder: Path) -> list[Any]:
    """What a script has after a fit, another, a test of the best checkpoint, and an evaluation without the server."""
    module, held_out = Classifier(), loader(23, 5, shuffle=False)
    best = ModelCheckpoint(folder, monitor="val/loss")
    options = {**QUIET, **OPTIONS, "enable_checkpointing": True, "max_steps": -1, "max_epochs": 1}
    trainer = Trainer(strategy=strategy, callbacks=[best], **options)
    trainer.fit(module, loader(), held_out)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), held_out)
    steps = [trainer.global_step, trainer.current_epoch, len(trainer.loss_curve)]
    found = [float(value) for _, value in sorted(trainer.callback_metrics.items())]
    found.append(sum(float(part.sum()) for part in trainer.predict(module, held_out) or []))
    found += trainer.test(module, held_out, ckpt_path="best", verbose=False)[0].values()
    other = Trainer(strategy="ddp" if size > 1 else "single", **OPTIONS, **QUIET)
    found += other.validate(module, held_out, verbose=False)[0].values()
    other.close()
    return [steps, best.best_model_path, torch.tensor(found, dtype=torch.float64), *module.state_dict().values()]


def test_a_rank_that_served_has_what_came_of_it_too(tmp_path: Path) -> None:
    """It knew no metrics, results or best checkpoint, and evaluated later with the weights it began with."""
    found = run_job(gone_on_beside_a_server, 3, {"name": "parameter_server", "servers": 1}, tmp_path / "served")
    steps, best, *expected = gone_on_beside_a_server(0, 1, "single", tmp_path / "alone")
    for own, path, *of_rank in found:
        assert own == steps and Path(path).name == Path(best).name and path == found[0][1]
        assert all(
            torch.allclose(a.double(), b.double(), rtol=0, atol=1e-10) for a, b in zip(of_rank, expected, strict=True)
        )


def built_after_a_fit(rank: int, size: int, folder: Path) -> list[torch.Tensor]:
    """Weights of modules that a script makes before a fit and after it."""
    lightning.seed_everything(5)
    made = [nn.Linear(3, 2).weight.detach()]
    trainer = lightning.Trainer(
        strategy="ddp", devices=size, **{**QUIET, "max_epochs": 1, "precision": "64-true", "default_root_dir": folder}
    )
    trainer.fit(Classifier(), loader())
    made.append(nn.Linear(3, 2).weight.detach())
    trainer.close()
    return made


def test_what_a_script_draws_after_a_fit_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """And is not what it drew before, though the stage itself begins anew with the seed."""
    (first, second), (other_first, other_second) = run_job(built_after_a_fit, 2, tmp_path)
    assert torch.equal(first, other_first) and torch.equal(second, other_second)
    assert not torch.equal(first, second)


class Fails(Classifier):
    """Of which one rank has an error in its code."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            raise ValueError("of one rank")
        return super().training_step(batch, batch_idx)


def gone_on_after_an_error(rank: int, size: int, strategy: str) -> list[Any]:
    """A script that catches what a fit raised, keeps it, and fits again."""
    trainer, failed = Trainer(strategy=strategy, timeout=20, **OPTIONS, **QUIET), Fails()
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer.fit(failed, loader())
    seconds = time.monotonic() - began
    drawn = torch.rand(2)
    again, module = Trainer(strategy=strategy, **OPTIONS, **QUIET), Classifier()
    again.fit(module, loader())
    again.close()
    return [type(caught.value) is ValueError, seconds, drawn, *module.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_an_error_that_one_rank_catches_is_the_others_at_once(strategy: str) -> None:
    """They had waited for it as long as the time-out is, and drawn other numbers than it did afterwards."""
    (of_other, waited, *others), (own, _, *mine) = run_job(gone_on_after_an_error, 2, strategy)
    assert own and not of_other and waited < 10
    assert all(torch.equal(a, b) for a, b in zip(others, mine, strict=True))


class Stopped(Callback):
    """Each worker is asked to stop, and the second takes its time to leave."""

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer: Trainer, *rest: Any) -> None:
        time.sleep(0.5 * trainer.global_rank)


def stopped_beside_a_server(rank: int, size: int, strategy: Any) -> str:
    trainer = Trainer(strategy=strategy, callbacks=[Stopped()], **OPTIONS, **QUIET)
    try:
        trainer.fit(Classifier(), loader())
    except Interrupted as stop:
        return str(stop)
    trainer.close()
    return "ended in order"


def test_workers_that_are_stopped_leave_a_server_in_order() -> None:
    """Who left first is not taken for one that failed."""
    found = run_job(stopped_beside_a_server, 3, {"name": "parameter_server", "servers": 1})
    assert found == ["stopped by signal 15", "stopped by signal 15", "ended in order"]


class FailsAtTheEnd(Classifier):
    def teardown(self, stage: str) -> None:
        if self.trainer.global_rank == 1:
            raise ValueError("of one rank")


def caught_beside_a_server(rank: int, size: int, strategy: Any) -> list[Any]:
    """A script that catches a refusal of what only the first rank asks for, then what one rank raises at a stage's end;
    how long the three take together."""
    began = time.monotonic()
    refused = Trainer(strategy=strategy, **OPTIONS, **QUIET)
    with pytest.raises(MissingCheckpointError):
        refused.test(Classifier(), loader(23, 5), ckpt_path=None if rank else "/none", verbose=False)
    with pytest.raises((ValueError, RuntimeError)):
        Trainer(strategy=strategy, **OPTIONS, **QUIET).fit(FailsAtTheEnd(), loader())
    again = Trainer(strategy=strategy, **OPTIONS, **QUIET)
    again.fit(Classifier(), loader())
    steps = again.global_step
    again.close()
    return [steps, time.monotonic() - began]


def test_what_a_script_catches_leaves_nobody_waiting_beside_a_server() -> None:
    """A rank that serves had waited for workers that were refused, and others for one that had left."""
    for steps, seconds in run_job(caught_beside_a_server, 3, {"name": "parameter_server", "servers": 1}):
        assert steps == 3 and seconds < SOON


def many_trainers(rank: int, size: int) -> list[int]:
    """Open descriptors of this process after each of some Trainers; Python looks for circles only when it is told."""
    gc.disable()
    found = []
    for _ in range(13):
        Trainer(strategy="ddp", **{**OPTIONS, "max_steps": 1}, **QUIET).fit(Classifier(), loader())
        found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list a process's descriptors")
def test_a_script_of_many_trainers_does_not_run_out_of_connections() -> None:
    for found in run_job(many_trainers, 2):
        assert max(found[8:]) <= max(found[:8])


def taking_turns(rank: int, size: int) -> list[int]:
    """Steps of a Trainer that fits, leaves the job to another and fits again."""
    trainer, other = (Trainer(strategy="ring", **{**OPTIONS, "max_steps": 1}, **QUIET) for _ in range(2))
    module, steps = Classifier(), []
    for one in (trainer, other, trainer):
        one.max_steps = one.global_step + 1
        one.fit(module, loader())
        steps.append(one.global_step)
    return steps


def test_a_trainer_that_left_the_job_to_another_comes_back_to_it() -> None:
    assert run_job(taking_turns, 2) == [[1, 1, 2]] * 2


class Drops(Classifier):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))


def gone_on_from_what_was_saved_after(rank: int, size: int, folder: Path) -> list[list[torch.Tensor]]:
    """Weights of a run of three epochs, and of one that goes on from a checkpoint saved after a fit of two."""

    def run(epochs: int, **options: Any) -> tuple[Trainer, Drops]:
        trainer = Trainer(strategy="ddp", devices=size, **{**QUIET, **OPTIONS, "max_steps": -1, "max_epochs": epochs})
        module = Drops()
        trainer.fit(module, loader(), **options)
        return trainer, module

    straight, whole = run(3)
    straight.close()
    half, _ = run(2)
    half.save_checkpoint(folder / "half.ckpt")
    half.close()
    resumed, again = run(3, ckpt_path=folder / "half.ckpt")
    resumed.close()
    return [[p.detach().clone() for p in module.parameters()] for module in (whole, again)]


def test_what_a_script_saves_after_a_fit_has_the_random_states_of_its_end(tmp_path: Path) -> None:
    for whole, again in run_job(gone_on_from_what_was_saved_after, 2, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_what_an_optimizer_keeps_beside_the_states_of_parameters_is_given_back_too() -> None:
    """Its own tensors may lie in the state itself, or in lists of a parameter's: none is left on the device."""

    class Elsewhere(torch.Tensor):
        """Stands for a tensor on a device."""

        def cpu(self, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
            return torch.zeros(1)

    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    there = torch.zeros(1).as_subclass(Elsewhere)
    optimizer.state["count"] = there
    optimizer.state[module.bias] = {"history": [there, 3], "momentum": there}
    on_a_device: Any = SimpleNamespace(module=module, device=torch.device("meta"))
    Strategy.give_back(on_a_device, [optimizer])
    of_bias = optimizer.state[module.bias]
    held = [optimizer.state["count"], *of_bias["history"], of_bias["momentum"]]
    assert [type(value) for value in held] == [torch.Tensor, torch.Tensor, int, torch.Tensor]
