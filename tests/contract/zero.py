"""Probe of the contract: DeepSpeed ZeRO-1. The engine does backward, reduction, clipping and the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain import Declaration, Strategy, Support
from drivetrain.launch import Job
from drivetrain.strategy import Shard

ZERO = Declaration(
    name="probe_zero",
    summary="optimizer states in shards",
    implementation="tests.contract.zero:Zero",
    support=Support(
        fidelity="exact in fp32",
        precisions=frozenset({"32-true"}),
        clipping=frozenset({"norm"}),
        several_optimizers=False,
        closures=False,
    ),
)


class Zero(Strategy):
    def connect(self, job: Job) -> None:
        super().connect(job)
        self.data = Shard(job.rank, job.world_size)

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would start a compiler
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        optimizers = make()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 1.0,  # its value is set at each step
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        self.engine, *_ = deepspeed.initialize(model=self.module.net, optimizer=optimizers[0], config=config)
        self.module.net = self.engine
        return optimizers

    def backward(self, loss: torch.Tensor, share: float, sync: bool, **options: Any) -> None:
        self.engine.backward(loss * (share * self.data.size), scale_wrt_gas=False)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        self.engine.optimizer.clip_grad = value

    def optimizer_step(self, optimizer: Optimizer, closure: Any, before_step: Callable[[], None]) -> bool:
        self.engine.optimizer.clip_grad = 0.0
        closure()
        before_step()
        self.engine.step()
        return True

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        weights = {name.replace("net.module.", "net."): v for name, v in self.module.state_dict().items()}
        return {"module": weights, "optimizers": [], "precision": {}}

    def close(self, error: BaseException | None = None) -> None:
        if error is None:
            self.engine.destroy()
        super().close(error)
