"""configure_optimizers, what training_step may return, manual optimisation and the optimisation hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain.errors import ConfigurationError, TrainingError
from tests.runs import Classifier, difference, loader, train
from tests.trainer.twins import Body, both, make_module, run


# -- configure_optimizers ---------------------------------------------------------------------------------------
def _sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


def _lists(module: Any) -> Any:
    optimizer = _sgd(module)
    return [optimizer], [ExponentialLR(optimizer, 0.5)]


def _dict(module: Any) -> Any:
    optimizer = _sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}


def _dict_of_dict(module: Any) -> Any:
    optimizer = _sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}}


def _monitor_beside(module: Any) -> Any:
    optimizer = _sgd(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val"}


def _two_schedulers(module: Any) -> Any:
    optimizer = _sgd(module)
    first = {"scheduler": StepLR(optimizer, 1, 0.5), "frequency": 2, "name": "slow"}
    return [optimizer], [first, {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


FORMS: dict[str, Callable[[Any], Any]] = {
    "optimizer": _sgd,
    "list": lambda module: [_sgd(module)],
    "tuple": lambda module: (_sgd(module),),
    "two lists": _lists,
    "dict": _dict,
    "dict with a dict": _dict_of_dict,
    "monitor beside": _monitor_beside,
    "two schedulers": _two_schedulers,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_configure_optimizers(form: str) -> None:
    class Formed(Body):
        def configure_optimizers(self: Any) -> Any:
            return FORMS[form](self)

    a, b = both(body=Formed, max_epochs=4, num_sanity_val_steps=0)
    assert b.module.seen == a.module.seen  # with the learning rate of every step
    assert len(b.trainer.lr_scheduler_configs) == len(a.trainer.lr_scheduler_configs)
    for ours, theirs in zip(b.trainer.lr_scheduler_configs, a.trainer.lr_scheduler_configs, strict=True):
        for key in ("interval", "frequency", "reduce_on_plateau", "monitor", "strict"):
            assert getattr(ours, key) == getattr(theirs, key), key


def test_several_optimizers_as_dicts() -> None:
    class Several(Body):
        automatic_optimization = False

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self: Any) -> Any:
            halves = [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]
            return tuple({"optimizer": o, "lr_scheduler": ExponentialLR(o, 0.9)} for o in halves)

    a, b = both(body=Several)
    assert len(b.trainer.optimizers) == 2
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    # Lightning counts every optimizer's step, drivetrain one step a batch.
    assert (a.trainer.global_step, b.trainer.global_step) == (28, 14)


def test_no_optimizer_counts_batches() -> None:
    class Without(Classifier):
        def configure_optimizers(self) -> Any:
            return None

    outcome = train(Without, max_epochs=1)
    assert outcome.trainer.optimizers == []
    assert all(
        torch.equal(a, b) for a, b in zip(outcome.module.parameters(), Without().double().parameters(), strict=True)
    )
    assert len(outcome.curve) == 7


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda m: "adam", "returned a str where an optimizer is needed"),
        (lambda m: {"optimiser": _sgd(m)}, "did you mean 'optimizer'"),
        (lambda m: {"lr_scheduler": None}, "needs the key 'optimizer'"),
        (lambda m: ([_sgd(m)], [{"schedule": None}]), "did you mean 'scheduler'"),
        (lambda m: ([_sgd(m)], [{"scheduler": StepLR(_sgd(m), 1), "interval": "batch"}]), "'step' or 'epoch'"),
        (lambda m: ([_sgd(m)], [{"scheduler": StepLR(_sgd(m), 1), "frequency": 0}]), "frequency"),
        (lambda m: ([_sgd(m)], [ReduceLROnPlateau(_sgd(m))]), "needs the metric it watches"),
        (lambda m: ([_sgd(m)], ["cosine"]), "is no scheduler"),
        (lambda m: [_sgd(m), _sgd(m)], "configures 2 optimizers"),
    ],
)
def test_bad_configurations_are_told_in_a_sentence(returned: Callable[[Any], Any], said: str) -> None:
    class Wrong(Classifier):
        def configure_optimizers(self) -> Any:
            return returned(self)

    with pytest.raises(ConfigurationError, match=said):
        train(Wrong, max_epochs=1)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_plateau_with_a_monitor_never_logged(interval: str) -> None:
    class Plateau(Classifier):
        strict = True

        def configure_optimizers(self) -> Any:
            optimizer = _sgd(self)
            config = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val/los", "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": {**config, "strict": self.strict}}

    class Lenient(Plateau):
        strict = False

    validation = loader(10, 5)
    with pytest.raises((ConfigurationError, TrainingError), match="'val/los', which was not logged"):
        train(Plateau, max_epochs=1, validation=validation)
    with pytest.warns(UserWarning, match="'val/los', which was not logged"):
        assert train(Lenient, max_epochs=1, validation=validation).steps == 7


def test_plateau_by_step_sees_each_step_whatever_the_log_interval() -> None:
    class Plateau(Body):
        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            scheduler = ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=10.0)
            config = {"scheduler": scheduler, "monitor": "plain", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    a, b = both(body=Plateau, num_sanity_val_steps=0, log_every_n_steps=50)
    assert b.module.seen == a.module.seen
    assert len({seen[-1] for seen in b.module.seen}) > 5


def test_plateau_by_step_is_one_schedule_on_two_ranks() -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": scheduler, "monitor": "train/loss_step", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    assert max(difference(train(Plateau), train(Plateau, "ddp", 2)).values()) < 1e-10


# -- what training_step returns ---------------------------------------------------------------------------------
def test_a_mapping_with_loss_is_the_loss() -> None:
    class Mapped(Body):
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            return {"loss": Body.training_step(self, batch, batch_idx), "more": 1}

        def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["more"] == 1 and torch.is_tensor(outputs["loss"])

    plain, mapped = run(drivetrain), run(drivetrain, body=Mapped)
    assert all(torch.equal(plain.weights[name], mapped.weights[name]) for name in plain.weights)


class Tokens(Classifier):
    """A loss that is a mean over the tokens of a batch, of which samples have different numbers (some none)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens = batch
        count = tokens.sum()
        losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return {"loss": (losses * tokens).sum() / count.clamp(min=1), "weight": count}


def _tokens(samples: int = 51, size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y, torch.randint(9, (samples,), generator=generator)), batch_size=size)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("devices", [2, 3])
def test_weights_of_its_own_make_token_means(devices: int, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.3}
    one = train(Tokens, data=_tokens(), **options)
    several = train(Tokens, "ddp", devices, data=_tokens(), **options)
    assert max(difference(one, several).values()) < 1e-10


def test_token_means_over_a_window_by_hand() -> None:
    module = Tokens().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    scheduler = StepLR(optimizer, 3, 0.7)
    listed = list(_tokens())
    for start in range(0, len(listed), 3):
        window = listed[start : start + 3]
        total = sum(int(tokens.sum()) for _, _, tokens in window)
        optimizer.zero_grad()
        for x, y, tokens in window:
            (nn.functional.cross_entropy(module.net(x), y, reduction="none") * tokens / total).sum().backward()
        optimizer.step()
        scheduler.step()
    outcome = train(Tokens, data=_tokens(), max_epochs=1, accumulate_grad_batches=3)
    for a, b in zip(module.parameters(), outcome.module.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=0)


class Skips(Classifier):
    """Returns None where ``which`` says so: by batch number and rank."""

    which: Any = staticmethod(lambda batch_idx, rank: False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if type(self).which(batch_idx, self.global_rank):
            return None
        return self.loss(batch)


def test_none_is_a_plain_skip_on_one_process() -> None:
    class Third(Skips):
        which = staticmethod(lambda batch_idx, rank: batch_idx == 3)

    data = list(loader(shuffle=False))
    skipped = train(Third, data=data, max_epochs=1)
    without = train(data=[*data[:3], *data[4:]], max_epochs=1)
    assert skipped.steps == without.steps == 6
    assert all(torch.equal(skipped.weights[name], without.weights[name]) for name in without.weights)


def test_none_in_a_window_leaves_the_other_batches() -> None:
    class First(Skips):
        which = staticmethod(lambda batch_idx, rank: batch_idx % 2 == 0)

    outcome = train(First, data=list(loader(48, shuffle=False)), max_epochs=1, accumulate_grad_batches=2)
    assert outcome.steps == 3


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_none_on_one_rank_contributes_zeros(strategy: str) -> None:
    class OnRankOne(Skips):
        which = staticmethod(lambda batch_idx, rank: rank == 1 and batch_idx in (1, 4))

        def on_fit_end(self) -> None:
            mine = torch.cat([p.detach().reshape(-1) for p in self.parameters()])
            first, second = self.all_gather(mine)
            assert torch.equal(first, second)

    outcome = train(OnRankOne, strategy, 2, max_epochs=1)
    assert outcome.steps == 7


def test_none_on_all_ranks_is_a_plain_skip() -> None:
    class Everywhere(Skips):
        which = staticmethod(lambda batch_idx, rank: batch_idx == 2)

    found = difference(train(Everywhere), train(Everywhere, "ddp", 2))
    assert max(found.values()) < 1e-10
    assert train(Everywhere, "ddp", 2).steps == 12


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda loss: loss.expand(3), r"a loss of shape \(3,\) at step 1"),
        (lambda loss: loss.detach(), "a loss without a graph at step 1"),
        (lambda loss: "loss", "returned a str"),
        (lambda loss: {"los": loss}, "a mapping without 'loss'"),
        (lambda loss: {"loss": loss, "weight": -1}, "a negative weight"),
        (lambda loss: {"loss": loss.detach()}, "without a graph"),
    ],
)
def test_losses_that_cannot_be_used(returned: Callable[[Any], Any], said: str) -> None:
    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned(self.loss(batch))

    with pytest.raises(TrainingError, match=said):
        train(Wrong, max_epochs=1)


# -- manual optimisation ----------------------------------------------------------------------------------------
class Manual(Body):
    automatic_optimization = False

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class WithClosure(Manual):
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class EverySecond(Manual):
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class ClipsItself(Manual):
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class ClipsAsTold(Classifier):
    """By the Trainer's value and algorithm, where it gives none."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **given: Any) -> None:
        self.clip_gradients(optimizer)


class ClipsByTheTrainersAlgorithm(Classifier):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.01)
        assert max(float(p.grad.abs().max()) for p in self.parameters()) == 0.01
        optimizer.step()


def test_what_a_module_does_not_say_of_clipping_the_trainer_does() -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "max_epochs": 1}
    told = difference(train(Classifier, **options), train(ClipsAsTold, **options))
    assert max(told.values()) == 0.0
    assert max(difference(train(Classifier, max_epochs=1), train(ClipsAsTold, **options)).values()) > 1e-3
    train(ClipsByTheTrainersAlgorithm, max_epochs=1, gradient_clip_algorithm="value")


class Raw(Manual):
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.SGD)
        optimizer.param_groups[0]["lr"] = 0.1 / (batch_idx + 1)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("body", [WithClosure, EverySecond, ClipsItself, Raw])
def test_manual_optimisation_is_lightnings(body: type) -> None:
    a, b = both(body=body, val=None)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    assert b.trainer.global_step == a.trainer.global_step
    steps = [step for step, _ in b.trainer.loss_curve]
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("body", [WithClosure, EverySecond, ClipsItself])
def test_manual_optimisation_on_several_ranks(body: type, devices: int) -> None:
    made = make_module(drivetrain, body=body)
    found = difference(train(made, data=loader(48)), train(made, "ddp", devices, data=loader(48)))
    assert max(found.values()) < 1e-10


def test_a_module_that_optimises_by_hand_steps_its_own_schedulers() -> None:
    class Scheduled(Raw):
        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            WithClosure.training_step(self, batch, batch_idx)

        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": i} for i in ("step", "epoch")]

    a, b = both(body=Scheduled)
    assert b.module.lr() == a.module.lr() == 0.2


def test_gradients_gathered_by_hand_outlive_a_validation() -> None:
    """Lightning zeroes them before it validates; here a module that accumulates by hand loses nothing."""
    outcomes = [run(drivetrain, body=EverySecond, val_check_interval=interval) for interval in (1.0, 1)]
    assert all(torch.equal(outcomes[0].weights[n], outcomes[1].weights[n]) for n in outcomes[0].weights)


def test_toggling_restores_what_was_frozen() -> None:
    class Toggles(Manual):
        def configure_optimizers(self: Any) -> Any:
            self.net[0].bias.requires_grad = False
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer, mine, other in ((first, self.net[0], self.net[2]), (second, self.net[2], self.net[0])):
                with self.toggled_optimizer(optimizer):
                    assert mine.weight.requires_grad and not other.weight.requires_grad
                    assert not self.net[0].bias.requires_grad
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()
                assert self.net[0].weight.requires_grad and self.net[2].weight.requires_grad
                assert not self.net[0].bias.requires_grad

    run(drivetrain, body=Toggles, max_epochs=1)


def test_manual_backward_outside_of_training_step() -> None:
    class Late(Manual):
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            self.kept = self.loss(batch)

        def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.kept)

    with pytest.raises(TrainingError, match="manual_backward is called outside of training_step"):
        run(drivetrain, body=Late, max_epochs=1)


def test_accumulation_needs_automatic_optimisation() -> None:
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2 needs automatic optimisation"):
        run(drivetrain, body=Raw, accumulate_grad_batches=2)


# -- hooks of the optimisation ----------------------------------------------------------------------------------
class WarmUp(Body):
    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx + 10 * epoch)
        optimizer.step(closure=optimizer_closure)


class StepsEverySecond(Body):
    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure) if batch_idx % 2 else optimizer_closure()


class ClipsByHook(Body):
    def configure_gradient_clipping(
        self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")


class ZeroesInPlace(Body):
    def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Around(torch.optim.Optimizer):
    """An optimizer with the groups of another one, as those have that average its weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class ScheduledWithin(Classifier):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int | None = None) -> Any:
        assert optimizer_idx is None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        inner = torch.optim.SGD(self.parameters(), lr=0.1)
        return [Around(inner)], [torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)]


def test_a_scheduler_of_the_optimizer_within_and_an_index_that_nobody_needs() -> None:
    (optimizer,) = (outcome := train(ScheduledWithin, max_epochs=2)).trainer.optimizers
    assert (outcome.trainer.global_step, optimizer.param_groups[0]["lr"]) == (14, 0.025)


class OwnBackward(Body):
    def backward(self: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward(*args, **kwargs)


class OwnSchedulerStep(Body):
    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1)


@pytest.mark.parametrize("body", [WarmUp, StepsEverySecond, ClipsByHook, ZeroesInPlace, OwnBackward, OwnSchedulerStep])
def test_overridden_hooks(body: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the scheduler's old argument
        a, b = both(body=body, hp={"scheduler": "epoch"}, num_sanity_val_steps=0)
    if body is StepsEverySecond:  # Lightning counts a step for every call of the hook, drivetrain the steps
        assert (a.trainer.global_step, b.trainer.global_step) == (14, 6)
    else:
        assert b.module.seen == a.module.seen
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    plain = run(drivetrain, hp={"scheduler": "epoch"}, num_sanity_val_steps=0)
    changed = any(not torch.equal(plain.weights[name], b.weights[name]) for name in plain.weights)
    assert changed is (body not in (ZeroesInPlace, OwnSchedulerStep))


@pytest.mark.parametrize("body", [WarmUp, ClipsByHook, OwnBackward])
def test_overridden_hooks_on_two_ranks(body: type) -> None:
    made = make_module(drivetrain, {"scheduler": "step"}, body)
    assert max(difference(train(made), train(made, "ddp", 2)).values()) < 1e-10


def test_an_optimizer_step_that_forgets_its_closure() -> None:
    class Forgets(Body):
        def optimizer_step(self: Any, *args: Any) -> None:
            pass

    with pytest.raises(TrainingError, match="did not run its closure"):
        run(drivetrain, body=Forgets)


def test_an_optimizer_that_leaves_out_its_closure() -> None:
    class Leaves(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    class Trains(Body):
        def configure_optimizers(self: Any) -> Any:
            return Leaves(self.parameters(), lr=0.1)

    with pytest.raises(TrainingError, match=r"Leaves.step\(closure\) did not run its closure"):
        run(drivetrain, body=Trains)


def test_clipping_before_any_fit() -> None:
    module = Classifier()
    with pytest.raises(RuntimeError, match="not attached"):
        module.clip_gradients(_sgd(module), 1.0)
