"""Callbacks that change what is trained or its weights: the figures are those of Lightning's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch import nn

import drivetrain.lightning as ours
from drivetrain.errors import ConfigurationError
from tests.distributed import run_job
from tests.lightning_parts.both import classifier, close, compare, loader, trainer, weights


@pytest.mark.parametrize(
    "options",
    [
        {"unfreeze_backbone_at_epoch": 1},
        {"unfreeze_backbone_at_epoch": 1, "should_align": False, "lambda_func": lambda epoch: 1.0 + epoch},
        {"unfreeze_backbone_at_epoch": 2, "backbone_initial_lr": 0.03, "train_bn": False, "verbose": True},
    ],
)
def test_backbone_finetuning(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(L: Any) -> dict[str, Any]:
        module, flags = classifier(L, norm=True), []

        class Watch(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                flags.append([p.requires_grad for p in pl_module.parameters()])
                flags.append([m.track_running_stats for m in pl_module.modules() if isinstance(m, nn.BatchNorm1d)])

        fit = trainer(L, tmp_path, callbacks=[L.callbacks.BackboneFinetuning(**options), Watch()])
        fit.fit(module, loader())
        return {"flags": flags, "rates": module.rates, "weights": weights(module)}

    found = compare(run)
    assert found["flags"][0] != found["flags"][-2], "the backbone was never thawed"
    assert len(found["rates"][0]) == 1 and len(found["rates"][-1]) == 2


def test_finetuning_tools() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def run(L: Any) -> dict[str, Any]:
        tools, parts = L.callbacks.BaseFinetuning, nn.ModuleDict({"a": Own(), "b": nn.Linear(1, 1)})
        kinds = [type(module).__name__ for module in tools.flatten_modules(parts)]
        tools.freeze(parts, train_bn=True)
        frozen = [p.requires_grad for p in parts.parameters()]
        tools.make_trainable(parts["a"])
        trained = len(list(tools.filter_params(parts, train_bn=False)))
        tools.freeze_module(parts["b"])
        return {
            "kinds": kinds,
            "frozen": frozen,
            "trained": trained,
            "left": [p.requires_grad for p in parts["b"].parameters()],
        }

    compare(run)
    both_zero = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    nn.init.zeros_(both_zero[0].bias)
    nn.init.zeros_(both_zero[1].bias)
    optimizer = torch.optim.SGD(both_zero[0].parameters(), lr=1.0)
    ours.callbacks.BaseFinetuning.unfreeze_and_add_param_group(both_zero[1], optimizer)
    assert len(optimizer.param_groups[1]["params"]) == 2, "parameters of equal values are two parameters"
    assert optimizer.param_groups[1]["lr"] == 0.1


def test_finetuning_resumes_with_what_was_trained(tmp_path: Path) -> None:
    def run(epochs: int, path: str | None, interrupt: bool = False) -> Any:
        module = classifier(ours, norm=True)
        keep = ours.callbacks.ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, every_n_train_steps=5)
        fit = trainer(
            ours,
            tmp_path,
            max_epochs=epochs,
            enable_checkpointing=True,
            callbacks=[ours.callbacks.BackboneFinetuning(1), keep],
        )
        fit.fit(module, loader(), ckpt_path=path)
        return module

    straight = run(4, None)
    for step in (10, 15, 20):  # within epoch 1, 2 and 3: thawed already
        path = next(tmp_path.glob(f"*step={step}.ckpt"))
        resumed = run(4, str(path))
        assert close(weights(straight), weights(resumed)), step
        assert straight.rates[-1] == resumed.rates[-1]


def test_finetuning_under_ddp_follows() -> None:
    """The figures of one process, also where the backbone is thawed by hand among batches, and refused elsewhere."""

    def thaw(self: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and batch_idx == 2:
            self.backbone.requires_grad_(True)

    def fit(strategy: str, devices: int, by_hand: bool, **options: Any) -> Any:
        parts = {"on_train_batch_start": thaw} if by_hand else {}
        module = classifier(ours, everything=by_hand, **parts)
        if by_hand:
            module.backbone.requires_grad_(False)
        callbacks = [] if by_hand else [ours.callbacks.BackboneFinetuning(1)]
        run = trainer(
            ours,
            ".",
            strategy=strategy,
            devices=devices,
            callbacks=callbacks,
            batch="global",
            precision="64-true",
            **options,
        )
        run.fit(module, loader())
        return module

    for by_hand in (False, True):
        alone = weights(fit("auto", 1, by_hand))
        for strategy in ("ddp", "ring"):
            shared = weights(fit(strategy, 2, by_hand))
            assert all(torch.allclose(shared[name], alone[name], atol=1e-10) for name in alone), (strategy, by_hand)
    with pytest.raises(Exception, match="compression=none"):
        fit("ddp", 2, True, compression="fp16")
    with pytest.raises(
        ConfigurationError, match=r"BackboneFinetuning freezes or thaws .* strategy=fsdp .* use strategy=ddp"
    ):
        fit("fsdp", 2, False)


def test_gradient_accumulation_scheduler(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        module, steps = classifier(L), []

        class Watch(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                steps.append((trainer.global_step, trainer.accumulate_grad_batches))

        schedule = L.callbacks.GradientAccumulationScheduler(scheduling={1: 2, 3: 4})
        fit = trainer(L, tmp_path, callbacks=[schedule, Watch()])
        fit.fit(module, loader(32))
        return {
            "steps": steps,
            "weights": weights(module),
            "epochs": schedule.epochs,
            "loss": float(fit.callback_metrics["loss"]),
        }

    assert compare(run)["steps"] == [(8, 1), (12, 2), (16, 2), (18, 4)]
    scheduler = ours.callbacks.GradientAccumulationScheduler
    for wrong in ({}, {-1: 2}, {0: 0}, {"a": 1}):
        with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler"):
            scheduler(wrong)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2 goes against"):
        trainer(ours, tmp_path, callbacks=[scheduler({1: 2})], accumulate_grad_batches=2).fit(
            classifier(ours), loader()
        )


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"swa_lrs": 0.02, "swa_epoch_start": 0.5, "annealing_epochs": 2},
        {
            "swa_lrs": [0.05],
            "swa_epoch_start": 2,
            "annealing_epochs": 3,
            "annealing_strategy": "linear",
            "device": None,
        },
        {"swa_lrs": 0.02, "swa_epoch_start": 2, "avg_fn": lambda average, new, count: 0.5 * average + 0.5 * new},
    ],
)
def test_stochastic_weight_averaging(tmp_path: Path, norm: bool, options: dict[str, Any]) -> None:
    def run(L: Any) -> dict[str, Any]:
        module = classifier(L, norm=norm)
        swa = L.callbacks.StochasticWeightAveraging(**options)
        fit = trainer(L, tmp_path, callbacks=[swa])
        fit.fit(module, loader(), loader(9))
        return {
            "weights": weights(module),
            "rates": module.rates,
            "losses": module.losses,
            "n": int(swa.n_averaged),
            "start": swa.swa_start,
            "epoch": fit.current_epoch,
            "step": fit.global_step,
            "max": fit.max_epochs,
        }

    compare(run)


@pytest.mark.parametrize("norm", [False, True])
def test_weights_of_a_run_that_ends_before_any_is_averaged(tmp_path: Path, norm: bool) -> None:
    """Lightning gives back those from before it trained."""

    def run(L: Any) -> list[dict[str, Any]]:
        module, seen = classifier(L, norm=norm), dict[str, Any]()

        class Looks(L.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch == 0:
                    seen.update(weights(pl_module))

        first = {name: value.clone() for name, value in weights(module).items()}
        swa = L.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2)
        trainer(L, tmp_path, callbacks=[swa, Looks()], max_epochs=1).fit(module, loader())
        learned = {name for name, _ in module.named_parameters()}
        return [{k: v for k, v in one.items() if k in learned} for one in (first, seen, weights(module))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, _, last = run(lightning)
    assert norm or close(first, last)  # with BatchNorm it makes steps in the epoch after
    with pytest.warns(UserWarning, match=r"averaged nothing: its first epoch would have been 1 .* last one was"):
        first, seen, last = run(ours)
    assert close(seen, last) and not close(first, last)


def test_stochastic_weight_averaging_resumes(tmp_path: Path) -> None:
    def run(path: Any, folder: Path) -> Any:
        module = classifier(ours, norm=True)
        keep = ours.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
        swa = ours.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2)
        fit = trainer(ours, tmp_path, callbacks=[swa, keep], enable_checkpointing=True)
        fit.fit(module, loader(), loader(9), ckpt_path=path)
        return module

    straight = run(None, tmp_path / "a")
    for epoch in (0, 1, 2, 3):
        resumed = run(tmp_path / "a" / f"epoch={epoch}.ckpt", tmp_path / f"b{epoch}")
        assert close(weights(straight), weights(resumed)), epoch
        assert straight.rates[-1] == resumed.rates[-1]


EMA: list[dict[str, Any]] = [
    {"decay": 0.8},
    {"decay": 0.8, "use_buffers": False, "update_every_n_steps": 2, "update_starting_at_step": 5},
    {"decay": 0.5, "update_every_n_steps": 0, "update_starting_at_epoch": 1},
]


@pytest.mark.parametrize("options", EMA)
def test_ema_weight_averaging(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(L: Any) -> dict[str, Any]:
        module = classifier(L, norm=True)
        ema, path = L.callbacks.EMAWeightAveraging(**options), tmp_path / L.__name__ / "kept.ckpt"
        keep = L.callbacks.ModelCheckpoint(dirpath=path.parent, filename="kept", save_on_train_epoch_end=True)
        fit = trainer(L, tmp_path, callbacks=[ema, keep], enable_checkpointing=True, accumulate_grad_batches=2)
        fit.fit(module, loader(), loader(9))
        restored = type(module).load_from_checkpoint(path, weights_only=False)
        return {"weights": weights(module), "losses": module.losses, "saved": weights(restored)}

    found = compare(run)
    assert found["weights"].keys() == found["saved"].keys()


def test_weight_averaging_resumes_and_averages_equally(tmp_path: Path) -> None:
    def mean(L: Any) -> dict[str, Any]:
        module = classifier(L)
        fit = trainer(L, tmp_path, callbacks=[L.callbacks.WeightAveraging()])
        fit.fit(module, loader())
        return {"weights": weights(module)}

    compare(mean)

    def run(path: Any, folder: Path, limit: int = -1) -> Any:
        module = classifier(ours, norm=True)
        keep = ours.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, every_n_train_steps=4, filename="{step}")
        fit = trainer(
            ours, tmp_path, callbacks=[ours.callbacks.EMAWeightAveraging(decay=0.9), keep], enable_checkpointing=True
        )
        fit.fit(module, loader(), loader(9), ckpt_path=path)
        return module

    straight = run(None, tmp_path / "a")
    resumed = run(tmp_path / "a" / "step=8.ckpt", tmp_path / "b")
    assert close(weights(straight), weights(resumed))


def test_averages_under_ddp_are_those_of_one_process() -> None:
    def fit(strategy: str, devices: int) -> list[Any]:
        found = []
        for callback in (
            ours.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2),
            ours.callbacks.EMAWeightAveraging(decay=0.7),
        ):
            module = classifier(ours)
            run = trainer(
                ours, ".", strategy=strategy, devices=devices, callbacks=[callback], batch="global", precision="64-true"
            )
            run.fit(module, loader(), loader(8))
            found.append(weights(module))
        return found

    for shared, alone in zip(fit("ddp", 2), fit("auto", 1), strict=True):
        assert all(torch.allclose(shared[name], alone[name], atol=1e-10) for name in alone)


def test_prediction_writer(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"batches": [], "epoch": []}

        class Writer(L.callbacks.BasePredictionWriter):
            def write_on_batch_end(
                self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *n: int
            ) -> None:
                found["batches"].append((prediction, list(indices), len(batch[0]), *n))

            def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
                found["epoch"].append((predictions, indices))

        fit = trainer(L, tmp_path, callbacks=[Writer("batch_and_epoch")])
        assert fit.predict(classifier(L), loader(10), return_predictions=False) is None
        fit.predict(classifier(L), [loader(6), loader(9)], return_predictions=False)
        return found

    compare(run)
    with pytest.raises(ConfigurationError, match=r"write_interval='bath'.*'batch'"):
        ours.callbacks.BasePredictionWriter("bath")


def test_prediction_writer_of_each_worker_has_each_sample_once() -> None:
    def work(rank: int, size: int) -> Any:
        seen: list[int] = []

        class Writer(ours.callbacks.BasePredictionWriter):  # type: ignore[misc, name-defined]
            def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
                assert [len(p) for p in predictions] == [len(i) for i in indices[0]]
                seen.extend(i for batch in indices[0] for i in batch)

        run = trainer(ours, ".", strategy="ddp", devices=2, callbacks=[Writer("epoch")])
        run.predict(classifier(ours), loader(21), return_predictions=False)
        run.close()
        return seen

    first, second = run_job(work, 2)
    assert sorted(first + second) == list(range(21))
