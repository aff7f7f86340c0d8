"""Hand-written training loops of a GPT, one for each engine that a strategy rides on: what the strategies are measured
against. Each function takes the model (fp32, on the device) and returns the step of a loop as plain PyTorch has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

# One optimizer step on this rank's (tokens, following), both (B, T): the loss, still on the device.
Step = Callable[[Tensor, Tensor], Tensor]
Engine = Callable[[Any, torch.device], Step]

LEARNING_RATE = 3e-4


def optimizer_of(model: nn.Module) -> AdamW:
    """What both sides train with."""
    on_gpu = next(model.parameters()).is_cuda
    return AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=on_gpu)


def optimizer_of_two_kinds(model: nn.Module) -> AdamW:
    """The same in two groups: an operation on a list takes plain tensors or DTensors, not both."""
    cut = [p for p in model.parameters() if hasattr(p, "placements")]
    whole = [p for p in model.parameters() if not hasattr(p, "placements")]
    on_gpu = next(model.parameters()).is_cuda
    return AdamW([{"params": cut}, {"params": whole}], lr=LEARNING_RATE, weight_decay=0.1, fused=on_gpu)


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def _loop(
    model: nn.Module,
    device: torch.device,
    after: Callable[[], None] = lambda: None,
    make: Callable[[nn.Module], AdamW] = optimizer_of,
) -> Step:
    optimizer = make(model)

    def step(tokens: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model(tokens), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
        return loss.detach()

    return step


def single(model: nn.Module, device: torch.device) -> Step:
    return _loop(model, device)


def ddp(model: nn.Module, device: torch.device) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    ids = [device.index] if device.type == "cuda" else None
    return _loop(DistributedDataParallel(model, ids, gradient_as_bucket_view=True), device)


def fsdp(model: Any, device: torch.device) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _loop(model, device)


def tensor_parallel(model: Any, device: torch.device) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.output", "mlp.down")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return _loop(model, device, make=optimizer_of_two_kinds)


def pipeline(model: Any, device: torch.device) -> Step:
    """GPipe over the stages that the strategy cuts, in as many micro-batches as it has. The two ends share the token
    embedding: its gradient is their sum."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from drivetrain_plugins.strategies.pipeline_cut import cut

    rank, size = dist.get_rank(), dist.get_world_size()
    part = nn.Sequential(*cut("", model, size)[rank].blocks)
    ends = dist.new_group([0, size - 1])
    optimizer = optimizer_of(part)
    stage = PipelineStage(part, rank, size, device)
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of)

    def step(tokens: Tensor, following: Tensor) -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            if rank == 0:
                schedule.step(tokens, target=following, losses=losses)
            else:
                schedule.step(target=following, losses=losses)
        if rank in (0, size - 1):
            dist.all_reduce(model.token.weight.grad, group=ends)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)

    return step


class _Autocast(nn.Module):
    """DeepSpeed turns off the autocast that its engine is called under, so it is entered within."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return loss_of(self.model(tokens), following)


def zero(stage: int) -> Engine:
    """Weights and gradients go from rank to rank in fp32, as in the other loops."""
    return _zero({"zero_optimization": {"stage": stage}})


def zero_narrow(stage: int) -> Engine:
    """Those of matrices go in bf16."""
    config = {"zero_optimization": {"stage": stage}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return _zero(config)


def _zero(options: dict[str, Any]) -> Engine:
    def engine(model: nn.Module, device: torch.device) -> Step:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            **options,
        }
        wrapped, *_ = deepspeed.initialize(model=_Autocast(model), optimizer=optimizer_of(model), config=config)

        def step(tokens: Tensor, following: Tensor) -> Tensor:
            loss: Tensor = wrapped(tokens, following)
            wrapped.backward(loss)
            wrapped.step()
            return loss.detach()

        return step

    return engine


def local_sgd(period: int) -> Engine:
    """Weights averaged in one flat message every ``period`` steps."""

    def engine(model: nn.Module, device: torch.device) -> Step:
        done = 0

        def average() -> None:
            nonlocal done
            done += 1
            if done % period == 0:
                with torch.no_grad():
                    flat = torch.cat([p.flatten() for p in model.parameters()])
                    dist.all_reduce(flat)
                    flat /= dist.get_world_size()
                    parts = flat.split([p.numel() for p in model.parameters()])
                    for p, part in zip(model.parameters(), parts, strict=True):
                        p.copy_(part.view_as(p))

        return _loop(model, device, average)

    return engine


def parameter_server(model: nn.Module, device: torch.device) -> Step:
    from drivetrain_plugins.bench import gpt_by_hand_server  # a module of its own: it needs pyzmq

    return gpt_by_hand_server.parameter_server(model, device)
