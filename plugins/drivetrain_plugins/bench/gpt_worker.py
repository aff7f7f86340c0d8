"""One process of a contest of ``python -m drivetrain.bench gpt``: the Trainer and the hand-written loop by turns."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, Trainer, TrainModule
from drivetrain.compilation import compiled
from drivetrain.folders import make_importable
from drivetrain.launch import Job, destroy_process_group, init_process_group
from drivetrain_plugins.bench import gpt_by_hand
from drivetrain_plugins.bench.gpt_sizes import SIZES, Size


def model_of(size: Size) -> nn.Module:
    """The same weights on every process and side."""
    make_importable()
    from recipes.char_lm.model import GPT

    torch.manual_seed(0)
    return GPT(size.vocab, size.context, size.layers, size.heads, size.width, tied=True)


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of random tokens, ``(T,)`` and what follows ``(T,)``."""

    def __init__(self, size: Size, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(size.vocab, (number, size.context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = self.tokens[indices]
        return chosen[:, :-1], chosen[:, 1:]


class Language(TrainModule):
    """What the Trainer trains."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = model_of(size)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = batch
        return gpt_by_hand.loss_of(self.model(tokens), following)

    def configure_optimizers(self) -> Any:
        return gpt_by_hand.optimizer_of(self)


class Clock(Callback):
    """Seconds from the end of step ``warmup`` to the end of step ``warmup + steps``, with the device at rest."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step in (self.warmup, self.warmup + self.steps):
            rest_of(trainer.strategy.device)
            self.seconds = time.perf_counter() - self.seconds


def rest_of(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_trainer(job: Job, task: dict[str, Any], size: Size, data: Sequences, batch: int) -> tuple[float, list[float]]:
    """Seconds of the timed steps, and the losses."""
    clock = Clock(task["warmup"], task["steps"])
    # The reference of several processes has their whole batch, which one device need not hold at once.
    windows = task["scale"] if job.world_size == 1 else 1
    name, *words = task["strategy"].split(" ")
    options = {key: json.loads(value) for key, value in (word.split("=") for word in words)}
    trainer = Trainer(
        strategy={"name": name, **options},
        devices=job.world_size,
        accelerator="gpu" if task["accelerator"] == "cuda" else "cpu",
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        compile=task["compile"],
        accumulate_grad_batches=windows,
        log_every_n_steps=1000,
        return_weights=False,
        seed=0,
    )
    trainer.fit(Language(size), DataLoader(data, batch_size=batch // windows, collate_fn=lambda whole: whole))
    trainer.close()  # under torchrun it would keep the process group for another stage
    return clock.seconds, [loss for _, loss in trainer.loss_curve]


def by_hand(job: Job, task: dict[str, Any], size: Size, data: Sequences, batch: int, device: torch.device) -> float:
    """Seconds of the timed steps."""
    world = job.world_size
    init_process_group(job, device=device)
    # A lone rank of ours has no group; torchrun gives a loop by hand one.
    if world == 1 and task["engine"] != "single":
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model = model_of(size).to(device)
    engine = getattr(gpt_by_hand, task["engine"])
    if task["argument"] is not None:
        engine = engine(task["argument"])
    share = batch // world if task["replicas"] else batch
    first = job.rank * share if task["replicas"] else 0
    began = 0.0
    stored = data.tokens.pin_memory() if device.type == "cuda" else data.tokens
    holder = nn.Module()
    holder.model = model
    with compiled(holder, task["compile"]):
        step = engine(model, device)
        for number in range(task["warmup"] + task["steps"]):
            if number == task["warmup"]:
                rest_of(device)
                began = time.perf_counter()
            start = number * batch + first
            whole = stored[start : start + share].to(device, non_blocking=True)
            step(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())  # pipelines compare strides
        rest_of(device)
        seconds = time.perf_counter() - began
    if world > 1:
        dist.barrier()
    destroy_process_group()
    return seconds


def contend(job: Job, task: dict[str, Any]) -> None:
    """Take part in the contest ``task`` as one of the job's workers; the first writes the result."""
    size = SIZES[task["size"]]
    device = torch.device("cpu")
    if task["accelerator"] == "cuda":
        device = torch.device("cuda", job.local_rank)
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    batch = (task["batch"] or size.batch) * task["scale"]
    steps = task["warmup"] + task["steps"]
    data = Sequences(size, steps * batch)
    tokens = task["steps"] * batch * size.context
    result: dict[str, Any] = {"ours": [], "theirs": [], "losses": []}
    if task["side"] == "ours":
        seconds, result["losses"] = with_trainer(job, task, size, data, batch)
        result["ours"].append(tokens / seconds)
    else:
        result["theirs"].append(tokens / by_hand(job, task, size, data, batch, device))
    if job.rank == 0:
        Path(task["out"]).write_text(json.dumps(result))
