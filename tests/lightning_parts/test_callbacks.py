"""The other callbacks: pruning, spikes, device statistics, throughput, learning rates, progress bars, lambdas."""

from __future__ import annotations

import csv
import io
import json
import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as theirs
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.utils import prune

import drivetrain.lightning as ours
from drivetrain import registry
from drivetrain.errors import ConfigurationError
from drivetrain_plugins.callbacks.progress_bar import RichProgressBarTheme
from drivetrain_plugins.callbacks.spike_detection import TrainingSpikeException
from tests.lightning_parts.both import classifier, close, compare, loader, trainer, weights


def test_every_name_of_lightning_is_there() -> None:
    for package in ("callbacks", "loggers", "profilers", "tuner"):
        module = getattr(ours, package)
        for name in module.__all__:
            assert getattr(module, name).__name__ == name, name
    assert {"backbone_finetuning", "tqdm_progress_bar"} <= set(registry.names("callbacks"))


@pytest.mark.parametrize(
    "options",
    [
        {"pruning_fn": "l1_unstructured", "amount": 0.3, "use_lottery_ticket_hypothesis": False, "verbose": 2},
        {"pruning_fn": "l1_unstructured", "amount": lambda epoch: 2 + epoch, "parameter_names": ["weight"],
         "apply_pruning": lambda epoch: epoch == 1},
        {"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 2,
         "parameter_names": ["weight"], "apply_pruning": lambda epoch: epoch == 1},
        {"pruning_fn": prune.L1Unstructured, "amount": 0.5, "prune_on_train_epoch_end": False,
         "use_lottery_ticket_hypothesis": lambda epoch: epoch == 2,
         "make_pruning_permanent": False},
    ],
)  # fmt: skip
def test_pruning(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(L: Any) -> dict[str, Any]:
        module, path = classifier(L), tmp_path / L.__name__ / "kept.ckpt"
        keep = L.callbacks.ModelCheckpoint(dirpath=path.parent, filename="kept", save_on_train_epoch_end=True)
        pruning = L.callbacks.ModelPruning(**options)
        fit = trainer(L, tmp_path, callbacks=[pruning, keep], enable_checkpointing=True, max_epochs=3)
        fit.fit(module, loader(), loader(9))
        saved = torch.load(keep.best_model_path, weights_only=False)["state_dict"]
        return {"weights": weights(module), "saved": dict(sorted(saved.items()))}

    found = compare(run)["weights"]
    assert any((value == 0).any() for value in found.values())


def test_pruning_goes_back_to_what_a_further_fit_began_with(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        module = classifier(L)
        pruning = L.callbacks.ModelPruning("l1_unstructured", apply_pruning=lambda epoch: epoch in (0, 2))
        fit = trainer(L, tmp_path, callbacks=[pruning], max_epochs=2)
        fit.fit(module, loader())
        fit.fit_loop.max_epochs = 4
        fit.fit(module, loader())
        return weights(module)

    compare(run)


def test_pruning_under_ddp_is_the_same_on_all_workers_and_resumes(tmp_path: Path) -> None:
    def fit(epochs: int, path: Any = None, strategy: str = "ddp", devices: int = 2) -> Any:
        module = classifier(ours)
        pruning = ours.callbacks.ModelPruning("random_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
        keep = ours.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
        run = trainer(
            ours, tmp_path, strategy=strategy, devices=devices, callbacks=[pruning, keep], enable_checkpointing=True,
            max_epochs=epochs,
        )  # fmt: skip
        run.fit(module, loader(), ckpt_path=path)
        return module

    found = weights(fit(1))
    zeros = sum(int((value == 0).sum()) for value in found.values())
    assert zeros == sum(value.numel() for value in found.values()) // 2, "a mean of two choices would have fewer"
    resumed = weights(fit(2, next(tmp_path.glob("epoch=0*")), "auto", 1))
    assert not close(found, resumed) and found.keys() == resumed.keys()


def test_pruning_refuses() -> None:
    pruning = ours.callbacks.ModelPruning
    for wrong in ("l1", {"pruning_fn": "ln_structured"}, {"pruning_fn": "l1_unstructured", "amount": "x"}, 3):
        with pytest.raises(ConfigurationError, match="ModelPruning"):
            pruning(**wrong) if isinstance(wrong, dict) else pruning(wrong)
    with pytest.raises(ConfigurationError, match="no Linear of these"):
        pruning.sanitize_parameters_to_prune(nn.Linear(1, 1), [(nn.Linear(1, 1), "weight")])


LEAP, DROP = [1.0, 1.1, 0.9, 1.2, 1.0, 6.0, 1.0], [4.0, 4.1, 4.2, 0.5, 4.0, 4.0, 4.0]
INFINITE = [1.0, 1.1, math.nan, -math.inf, 1.0, math.inf, 1.0]  # for finite_only=False the last one only is worse


@pytest.mark.parametrize(
    ("options", "losses"),
    [
        ({}, LEAP),
        ({"atol": 0.5, "rtol": None, "window": 3}, LEAP),
        ({"mode": "max", "rtol": 0.5}, DROP),
        ({"finite_only": True}, [1.0, 1.1, math.nan, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_spikes(tmp_path: Path, options: dict[str, Any], losses: list[float]) -> None:

    def run(L: Any) -> dict[str, Any]:
        def step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            return loss - loss.detach() + losses[batch_idx]

        folder = tmp_path / L.__name__
        spikes = L.callbacks.SpikeDetection(exclude_batches_path=folder, **options)
        with pytest.raises(Exception, match="batch") as caught:
            trainer(L, tmp_path, callbacks=[spikes]).fit(classifier(L, training_step=step), loader(28))
        assert "Spike" in type(caught.value).__name__
        return {"listed": json.loads((folder / "skip_batches.json").read_text()), "bad": spikes.bad_batches}

    assert compare(run)["bad"]
    assert issubclass(TrainingSpikeException, RuntimeError) or TrainingSpikeException(3, "x").batch_idx == 3


def test_infinity_is_a_spike_where_it_is_worse(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(default_root_dir=tmp_path, global_rank=0)
    module: Any = None
    spikes = ours.callbacks.SpikeDetection(finite_only=False)
    found = []
    for index, loss in enumerate(INFINITE):
        try:
            spikes.on_train_batch_end(run, module, torch.tensor(loss), None, index)
        except TrainingSpikeException:
            found.append(index)
    assert found == [5]


def test_a_spike_on_one_worker_ends_the_job(tmp_path: Path) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss - loss.detach() + (50.0 if self.global_rank == 1 and batch_idx == 2 else 1.0)

    run = trainer(ours, tmp_path, strategy="ddp", devices=2, callbacks=[ours.callbacks.SpikeDetection()])
    module = classifier(ours, training_step=step)
    with pytest.raises(Exception, match="the loss leapt in batch 2"):
        run.fit(module, loader(40))
    assert run.lightning_module is module, "as where one process fails"
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [1, 2]


def metrics(root: Path) -> list[dict[str, str]]:
    with next(root.rglob("metrics.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def test_monitors_log_at_the_same_steps(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        root = tmp_path / L.__name__
        watch = [
            L.callbacks.DeviceStatsMonitor(),
            L.callbacks.LearningRateMonitor(log_momentum=True, log_weight_decay=True),
            L.callbacks.ThroughputMonitor(
                batch_size_fn=lambda b: len(b[0]), length_fn=lambda b: b[0].numel(), window_size=2
            ),
        ]
        module = classifier(L)
        module.flops_per_batch = 100
        fit = trainer(
            L, root, callbacks=watch, logger=L.loggers.CSVLogger(root), log_every_n_steps=2, accumulate_grad_batches=2
        )
        fit.fit(module, loader(32), loader(8))
        rows = metrics(root)
        seen = {
            name: sorted({int(r["step"]) for r in rows if r[name]}) for name in rows[0] if name not in ("step", "epoch")
        }
        counted = [(r["train/samples"], r["train/lengths"], r["train/batches"]) for r in rows if r["train/samples"]]
        return {
            "steps": {name: seen[name] for name in sorted(seen) if "validat" not in name},
            "counted": [tuple(map(float, row)) for row in counted],
            "lrs": {name: set(values) for name, values in watch[1].lrs.items()},
            "momentum": watch[1].last_momentum_values,
        }

    found = compare(run)
    assert found["steps"]["DeviceStatsMonitor.on_train_batch_end/cpu_percent"]
    assert "train/device/flops_per_sec" in found["steps"]
    with pytest.raises(ConfigurationError, match="give the Trainer a logger"):
        trainer(ours, tmp_path, callbacks=[ours.callbacks.DeviceStatsMonitor()]).fit(classifier(ours), loader())


def test_a_schedule_that_is_exchanged_is_logged_by_its_own_name(tmp_path: Path) -> None:
    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "steps"}]

    def run(L: Any) -> dict[str, Any]:
        root = tmp_path / L.__name__
        swa = L.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=1)
        watch = [L.callbacks.LearningRateMonitor("step"), swa]
        fit = trainer(L, root, callbacks=watch, logger=L.loggers.CSVLogger(root), log_every_n_steps=2, max_epochs=3)
        fit.fit(classifier(L, configure_optimizers=configure), loader())
        rates = {name: float(value) for name, value in fit.callback_metrics.items() if name in ("steps", "lr-SGD")}
        return {"last": rates, "rows": [[row["step"], row["steps"], row["lr-SGD"]] for row in metrics(root)]}

    assert len(compare(run)["last"]) == 2


def test_lambda_callbacks(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        seen: list[Any] = []
        first = L.callbacks.LambdaCallback(
            on_train_epoch_end=lambda trainer, module: seen.append(trainer.current_epoch)
        )
        other = L.callbacks.LambdaCallback(setup=lambda *args, **kwargs: seen.append("setup"))
        trainer(L, tmp_path, callbacks=[first, other], max_epochs=2).fit(classifier(L), loader())
        return {"seen": seen}

    assert compare(run)["seen"] == ["setup", 0, 1]
    with pytest.raises(ConfigurationError, match="did you mean 'on_train_start'"):
        ours.callbacks.LambdaCallback(on_train_strat=print)


def drawn(bar: Any, tmp_path: Path) -> str:
    module = classifier(ours, training_step=shown)
    run = trainer(ours, tmp_path, callbacks=[bar], enable_progress_bar=True, max_epochs=1, log_every_n_steps=1)
    run.fit(module, loader())
    return bar._given.file.getvalue()


def shown(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
    self.log("loss", loss, prog_bar=True)
    return loss


def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=140, color_system=None)


def test_progress_bars_of_two_looks(tmp_path: Path) -> None:
    class Mine(ours.callbacks.RichProgressBar):  # type: ignore[misc, name-defined]
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            items = super().get_metrics(trainer, pl_module)
            return {**items, "mine": "yes", "batches": self.total_train_batches}

    rich = Mine(interval=0.0, console=screen(), theme=RichProgressBarTheme(metrics_format=".1e"))
    text = drawn(rich, tmp_path)
    assert "epoch 1/1" in text and "mine=yes" in text and "batches=6" in text and "loss=4.7e-01" in text
    plain = ours.callbacks.TQDMProgressBar(refresh_rate=2)
    plain._given, plain._interval = screen(), 0.0
    plain._console = plain._given
    text = drawn(plain, tmp_path)
    assert "Epoch 0:  33%|██████              | 2/6 [00:00<00:00" in text and "100%|" in text
    assert "| 1/6 [" not in text, "every second batch"
    off = ours.callbacks.TQDMProgressBar(refresh_rate=0)
    assert off.is_disabled and plain.is_enabled and plain.refresh_rate == 2
    plain.disable()
    assert plain.is_disabled
    with pytest.raises(TypeError, match="has no trainer yet"):
        _ = ours.callbacks.ProgressBar().trainer


def test_numbers_beside_a_bar_have_the_length_that_they_have_there() -> None:
    numbers = [1.0, 0.1, 1e-5, 12345.0, 1234567.0, -0.5, 0.0, 7, "1.0", "10", "", "x", "1e5", "0.12345", 1e20]
    theirs_, ours_ = (
        import_module(f"{library.__name__}.callbacks.progress.tqdm_progress").Tqdm for library in (theirs, ours)
    )
    assert [ours_.format_num(n) for n in numbers] == [theirs_.format_num(n) for n in numbers]
    assert ours_.format_num(torch.tensor(0.25)) == "0.250"


@pytest.mark.parametrize("environment", [{}, {"COLAB_GPU": "1"}, {"TQDM_MINITERS": "3"}])
def test_how_often_a_bar_is_drawn(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    rates = [[L.callbacks.TQDMProgressBar(rate).refresh_rate for rate in (0, 1, 2, 19)] for L in (theirs, ours)]
    assert rates[0] == rates[1]


def test_one_progress_bar(tmp_path: Path) -> None:
    class Bar(ours.callbacks.ProgressBar):
        pass

    class Speaks(ours.Callback):
        def print(self) -> None: ...

    with pytest.raises(ConfigurationError, match=r"callbacks have 2 progress bars \(TQDMProgressBar, Bar\): keep one"):
        trainer(ours, tmp_path, callbacks=[ours.callbacks.TQDMProgressBar(), Bar()], enable_progress_bar=True)
    with pytest.raises(ConfigurationError, match="enable_progress_bar=False goes against the Bar in callbacks"):
        trainer(ours, tmp_path, callbacks=Bar())
    run = trainer(ours, tmp_path, callbacks=[Speaks()], enable_progress_bar=True)
    assert isinstance(run.progress_bar_callback, ours.callbacks.RichProgressBar), "Speaks is none"


def test_the_logger_of_a_run_that_is_tried_out(tmp_path: Path) -> None:
    for L in theirs, ours:
        dummy = trainer(L, tmp_path, fast_dev_run=True, logger=True).logger
        assert isinstance(dummy, import_module(f"{L.__name__}.loggers.logger").DummyLogger)
        assert (dummy.name, dummy.version, dummy[0].experiment[1].add_image("x")) == ("", "", None)


def test_throughput_of_evaluations_is_counted_on(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Rows(L.loggers.Logger):  # type: ignore[misc, name-defined]
            name, version = "rows", 0

            def __init__(self) -> None:
                self.rows: list[Any] = []

            def log_hyperparams(self, *args: Any, **options: Any) -> None: ...

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                counts = {name: value for name, value in metrics.items() if name.endswith(("/batches", "/samples"))}
                self.rows += [(step, counts)] if counts else []

        rows, monitor = Rows(), L.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
        fit = trainer(L, tmp_path, logger=rows, callbacks=[monitor], log_every_n_steps=2, max_epochs=2)
        module = classifier(L)
        fit.fit(module, loader(12), loader(20))
        for _ in range(2):
            fit.validate(module, loader(20), verbose=False)
            fit.predict(module, loader(12))
        return {"rows": rows.rows}

    steps = [step for step, counts in compare(run)["rows"] if "predict/batches" in counts]
    assert steps == [2, 5], "the second evaluation's come after the first one's"


def test_throughput_of_validations_within_an_epoch_is_counted_on(tmp_path: Path) -> None:
    """And loggers are told it by name, as they are told what a module logs."""

    def run(L: Any) -> dict[str, Any]:
        class Rows(L.loggers.Logger):  # type: ignore[misc, name-defined]
            name, version = "rows", 0

            def __init__(self) -> None:
                self.rows: list[Any] = []

            def log_hyperparams(self, *args: Any, **options: Any) -> None: ...

            def log_metrics(self, *, metrics: dict[str, float], step: int | None = None) -> None:
                self.rows.append((step, metrics["validate/batches"])) if "validate/batches" in metrics else None

        rows, monitor = Rows(), L.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
        options = {"limit_train_batches": 4, "val_check_interval": 2, "limit_val_batches": 3, "max_epochs": 2}
        fit = trainer(L, tmp_path, logger=rows, callbacks=[monitor], log_every_n_steps=2, **options)
        fit.fit(classifier(L), loader(20), loader(12))
        return {"rows": rows.rows}

    assert compare(run)["rows"] == [(2, 2), (5, 2)] * 2


def test_how_far_a_bar_came_can_be_asked_afterwards(tmp_path: Path) -> None:
    def run(L: Any) -> dict[str, Any]:
        bar = L.callbacks.TQDMProgressBar()
        fit = trainer(L, tmp_path, callbacks=[bar], enable_progress_bar=True, max_epochs=2)
        module = classifier(L)
        fit.fit(module, loader(20), loader(8))
        fit.predict(module, loader(12))
        bars = (bar.train_progress_bar, bar.val_progress_bar, bar.predict_progress_bar)
        return {"bars": [(one.total, one.disable) for one in bars], "train": bars[0].n}

    assert compare(run)["bars"][0][0] == 5


@pytest.mark.parametrize(("steps", "epochs"), [(7, -1), (3, None), (7, 4)])
def test_a_bar_ends_where_the_steps_do(tmp_path: Path, steps: int, epochs: int | None) -> None:
    def run(L: Any) -> dict[str, Any]:
        class Asks(L.callbacks.TQDMProgressBar):  # type: ignore[misc, name-defined]
            def on_train_epoch_start(self, trainer: Any, *rest: Any) -> None:
                super().on_train_epoch_start(trainer, *rest)
                totals.append((self.total_train_batches, self.train_progress_bar.total))

        totals: list[Any] = []
        stream = ([part.clone() for part in batch] for _ in range(9) for batch in loader(20))
        options = {"enable_progress_bar": True, "max_steps": steps, "max_epochs": epochs}
        trainer(L, tmp_path, callbacks=[Asks()], **options).fit(classifier(L), loader(20))
        trainer(L, tmp_path, callbacks=[Asks()], **options | {"max_epochs": -1}).fit(classifier(L), stream)
        return {"totals": totals}

    assert compare(run)["totals"][-1] == (steps, steps)


def test_a_callback_that_is_a_network_and_a_layer_of_the_module(tmp_path: Path) -> None:
    """It has weights of its own and is given by ``configure_callbacks``: the module is not a layer of it in turn."""

    def run(L: Any) -> dict[str, Any]:
        class Scaling(nn.Module, L.Callback):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(3))
                self.register_buffer("batches", torch.tensor(0))

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                batch[0].mul_(self.scale.detach())
                self.batches += 1

        def configure_callbacks(self: Any) -> list[Any]:
            self.scaling = Scaling()
            return [self.scaling]

        module, path = classifier(L, configure_callbacks=configure_callbacks), tmp_path / L.__name__ / "kept.ckpt"
        fit = trainer(L, tmp_path, max_epochs=2)
        fit.fit(module, loader(), loader(9))
        fit.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)
        again = trainer(L, tmp_path, max_epochs=3)
        again.fit(module, loader(), loader(9), ckpt_path=path)
        return {
            "weights": weights(module),
            "layers": [name for name, _ in module.named_modules()],
            "saved": saved["state_dict"] | next(iter(saved["callbacks"].values())),
            "batches": module.scaling.batches,
        }

    assert compare(run)["batches"] == 18
