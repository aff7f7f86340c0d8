"""Checks that need GPUs, run by hand on a machine with two: ``python -m tests.gpu.check [WORD ...]`` (those whose names
begin with one of the words; all without).

Each line ends with what was seen; the command exits with 1 if anything is not as it should be.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import torch

from drivetrain import Trainer
from drivetrain.errors import ConfigurationError, Interrupted, WorkerError
from tests.compression.test_compressors import LOSSY
from tests.compression.test_runs import CLOSE, EXACT, Watch, fewer_bytes
from tests.runs import QUIET, Classifier, Gan, difference, loader, train
from tests.strategies.test_reached import Experts, parted

GPU: dict[str, Any] = {"accelerator": "gpu"}


def parity() -> str:
    """ddp and ring over NCCL give single's run in fp64, with accumulation, clipping and an uneven tail."""
    options: dict[str, Any] = {**GPU, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    options["validation"] = loader(23, 5, shuffle=False)
    reference = train(devices=1, **options)
    assert reference.trainer.strategy.device.type == "cuda"
    assert next(iter(reference.weights.values())).device.type == "cpu", "it is back where the module was"
    worst = 0.0
    for strategy in ("ddp", "ring"):
        run = train(strategy=strategy, devices=2, **options)
        worst = max(worst, *difference(reference, run).values())
    assert worst < 1e-10, worst
    return f"largest difference {worst:.1e}"


def manual() -> str:
    """A GAN with two toggled optimizers over NCCL."""
    reference = train(Gan, **GPU)
    run = train(Gan, "ring", 2, **GPU)
    worst = max(difference(reference, run).values())
    assert worst < 1e-10, worst
    return f"largest difference {worst:.1e}"


def sharded() -> str:
    """fsdp over NCCL gives single's run in fp64, also with two networks whose optimizers take turns."""
    worst = 0.0
    for make in (Classifier, Gan):
        reference, run = train(make, **GPU), train(make, "fsdp", 2, **GPU)
        worst = max(worst, *difference(reference, run).values())
    assert worst < 1e-10, worst
    return f"largest difference {worst:.1e}"


def mixed(precision: str) -> str:
    """Mixed precision trains, on one GPU and on two, to about the loss of fp32."""
    scale = {"loss_scale": 1024.0} if precision == "16-mixed" else {}  # a dynamic scale skips steps to find its size
    exact = train(Classifier, precision="32-true", max_epochs=6, **GPU).curve[-1][1]
    one = train(Classifier, precision=precision, max_epochs=6, **GPU, **scale).curve[-1][1]
    two = train(Classifier, "ring", 2, precision=precision, max_epochs=6, **GPU, **scale).curve[-1][1]
    assert abs(one - exact) < 0.02 and abs(two - exact) < 0.02, (exact, one, two)
    return f"last loss {exact:.4f} in fp32, {one:.4f} on one GPU, {two:.4f} on two"


class Overflow(Classifier):
    """One rank's gradient overflows in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and self.global_rank == self.trainer.world_size - 1 and not hasattr(self, "done"):
            self.done = True
            loss = loss * 1e38
        return loss


def overflow() -> str:
    """An inf on one rank skips the step on all: one step less, and the ranks' weights stay equal."""
    options = {"precision": "16-mixed", "loss_scale": 1024.0, "nonfinite": "warn", **GPU}
    plain, run = train(Classifier, "ddp", 2, **options), train(Overflow, "ddp", 2, **options)
    assert run.steps == plain.steps - 1, (run.steps, plain.steps)
    assert all(bool(torch.isfinite(value).all()) for value in run.weights.values())
    return f"{run.steps} steps instead of {plain.steps}"


def compressed(name: str) -> str:
    """Over NCCL a compressor gives ddp and ring nearly the run of two uncompressed GPUs, in fewer bytes, and an inf on
    one rank skips the step on all; what is declared exact is single's run."""
    options: dict[str, Any] = {**GPU, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    dense, worst = train(Classifier, "ddp", 2, **options), 0.0
    for strategy in ("ddp", "ring"):
        run = train(Classifier, strategy, 2, compression=name, callbacks=Watch(fewer_bytes), **options)
        worst = max(worst, difference(dense, run)["curve"])
    assert 0 < worst < CLOSE[name], worst
    options = {"precision": "16-mixed", "loss_scale": 1024.0, "nonfinite": "warn", "compression": name, **GPU}
    plain = train(Classifier, "ring", 2, **options)
    run = train(Overflow, "ring", 2, callbacks=Watch(), **options)
    assert run.steps == plain.steps - 1, (run.steps, plain.steps)
    if EXACT.get(name):
        exact = train(Classifier, "ring", 2, compression={"name": name, **EXACT[name]}, **GPU)
        alike = max(difference(train(Classifier, "ddp", 2, **GPU), exact).values())
        assert alike < 1e-10, alike
    return f"largest difference of a loss {worst:.1e}"


def experts(strategy: Any) -> str:
    """Where the ranks use different parameters the job ends with a sentence: in seconds; where one of them uses all, so
    that the engine's messages differ in size, at the latest when a collective may take no longer."""
    told = []
    for batch_size in (2, 3):
        started = time.monotonic()
        try:
            precision = "32-true" if "zero" in str(strategy) else "64-true"
            data = parted(batch_size, torch.float32 if "zero" in str(strategy) else torch.float64)
            run = train(Experts, strategy, 2, data=data, precision=precision, timeout=30.0, **GPU)
        except WorkerError as error:
            told.append(f"{time.monotonic() - started:.0f} s: {str(error).splitlines()[0][:160]}")
            print(told[-1], flush=True)
        else:
            raise AssertionError(f"it trained: {run.curve}")
    return "; ".join(told)


def refusals() -> str:
    """More GPUs than there are is one sentence before anything starts."""
    count = torch.cuda.device_count()
    try:
        Trainer(strategy="ddp", devices=count + 1, **{**QUIET, **GPU})
    except ConfigurationError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def main(words: list[str]) -> int:
    # What starts workers by forking comes first: a process that has used CUDA cannot fork any more.
    failed = 0
    checks = [("refusals", refusals), ("parity", parity), ("manual", manual), ("overflow", overflow)]
    checks += [(f"mixed {p}", lambda p=p: mixed(p)) for p in ("bf16-mixed", "16-mixed")]  # type: ignore[misc]
    checks += [(f"compression {c}", lambda c=c: compressed(c)) for c in LOSSY]  # type: ignore[misc]
    checks.append(("sharded", sharded))
    for strategy in ("fsdp", {"name": "zero", "stage": 1}, {"name": "zero", "stage": 3}):
        checks.append((f"experts {strategy}", lambda strategy=strategy: experts(strategy)))  # type: ignore[misc]
    for name, check in checks:
        if words and not name.startswith(tuple(words)):
            continue
        try:
            print(f"{name}: {check()}", flush=True)
        except Interrupted:  # whoever asks for the end means all of them
            raise
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
