"""What modules and callbacks may ask of the running strategy: its place in the job, and a few collectives.

Names and meanings are those of Lightning's ``trainer.strategy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.checkpoint.io import CheckpointIO, TorchCheckpointIO
from drivetrain.data_hooks import move
from drivetrain.errors import ConfigurationError, MisuseError

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator, ReduceOp
    from drivetrain.launch import Job
    from drivetrain.module import TrainModule
    from drivetrain.optimizer import SchedulerConfig
    from drivetrain.precision import Precision

_OPS = {"mean": "average", "avg": "average", "sum": "sum", "max": "max", "min": "min", "product": "product"}


class StrategyView:
    """Base of :class:`drivetrain.strategy.Strategy`. Every training rank calls a collective at the same point.

    Attributes:
        apart: while ranks run different parts of the module's code, so that a collective would wait in vain: which part
            that is, and what to do instead; else None.
    """

    communicator: Communicator
    job: Job
    device: torch.device
    planned_device: torch.device | None = None
    precision: Precision
    module: TrainModule
    apart: str | None = None
    checkpoint_io: CheckpointIO = TorchCheckpointIO()  # who writes checkpoints that are one file

    @property
    def root_device(self) -> torch.device:
        """This rank's; before there are workers that of this node's first one, though nothing is put there yet."""
        return self.device if self.planned_device is None else self.planned_device

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def global_rank(self) -> int:
        return self.job.rank

    @property
    def local_rank(self) -> int:
        return self.job.local_rank

    @property
    def node_rank(self) -> int:
        return self.job.node_rank

    @property
    def num_nodes(self) -> int:
        return self.job.num_nodes

    @property
    def num_processes(self) -> int:
        """Workers of this node."""
        return self.job.local_world_size

    @property
    def is_global_zero(self) -> bool:
        return self.job.rank == 0

    @property
    def precision_plugin(self) -> Precision:
        return self.precision

    @property
    def lightning_module(self) -> TrainModule | None:
        return self.__dict__.get("module")

    @property
    def model(self) -> TrainModule | None:
        return self.__dict__.get("module")

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that the fit steps; to set them is to step these from here on (:attr:`drivetrain.Trainer.optimizers`).
        Empty before a stage. While a fit's are being built, the strategy that builds them may keep its own here."""
        module = self.lightning_module
        if self._built is not None:
            return self._built
        return [] if module is None else module.trainer.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if not self.module.trainer.optimizers:
            self._built = optimizers
        else:
            self.module.trainer.optimizers = optimizers

    _built: list[Optimizer] | None = None

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers of the fit and when they step; to set them is to go on with these. Empty before a stage."""
        module = self.lightning_module
        return [] if module is None else module.trainer.lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[SchedulerConfig]) -> None:
        self.module.trainer.lr_scheduler_configs = configs

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """``batch`` on this rank's device, or another."""
        return move(batch, self.device if device is None else torch.device(device))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``, a dictionary in Lightning's layout, as one file; the first rank does, others need not
        call it."""
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The dictionary in a file, as it is written, with its tensors on the CPU; nothing of the run takes it over."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete the checkpoint; the first rank does, others need not call it."""
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's weights by name: those that it trains where every rank holds all of them, else put together from
        the ranks, which all have to call it, and complete on the first one."""
        whole = self.support.editable  # type: ignore[attr-defined]
        return self.module.state_dict() if whole else self.module.trainer.full_weights()

    def come_together(self, collective: str) -> None:
        """Refuse ``collective`` where other ranks do not come to it.

        Raises:
            MisuseError: this rank is in a part of a step that is its own.
        """
        if self.apart is not None:
            raise MisuseError(f"{collective} is called in {self.apart}")

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here."""
        self.come_together("barrier")
        self.communicator.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src``: a tensor (of one shape and dtype on all ranks), or what JSON can hold."""
        self.come_together("broadcast")
        if self.communicator.world_size == 1:
            return obj
        if isinstance(obj, Tensor):
            return self.communicator.broadcast(obj.to(self.device).clone(), src).to(obj.device)
        return self.communicator.all_gather_plain(obj)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` combined over the ranks by ``"mean"``, ``"sum"``, ``"max"``, ``"min"`` or ``"product"``; anything
        else than a tensor stays as it is.

        Raises:
            ConfigurationError: ``group`` is given, or the operation is unknown.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if group is not None:
            raise ConfigurationError("strategy.reduce(group=...): values are combined over all ranks: leave it out.")
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").lower()
        if name not in _OPS:
            raise ConfigurationError(f"strategy.reduce(reduce_op={reduce_op!r}): use one of {', '.join(_OPS)}.")
        self.come_together("reduce")
        value = tensor.detach().to(self.device).clone()
        if _OPS[name] == "average" and not (value.is_floating_point() or value.is_complex()):
            value = value.float()
        return self.communicator.all_reduce(value, cast("ReduceOp", _OPS[name])).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``all`` ranks decided so, or any."""
        self.come_together("reduce_boolean_decision")
        found = [bool(one) for one in self.communicator.all_gather_plain(bool(decision))]
        return sum(found) == len(found) if all else any(found)

    def all_gather(
        self, tensor: Tensor, group: Any = None, sync_grads: bool = False, uneven: bool | None = None
    ) -> Tensor:
        """Every rank's tensor, stacked along a new first dimension. One rank alone gives it as it is; under Lightning's
        meaning only where no strategy for several processes was asked for.

        Args:
            tensor: this rank's, of one dtype on all ranks.
            group: None; it gathers from all ranks.
            sync_grads: whether gradients flow back to the ranks that they come from.
            uneven: whether ranks may have different numbers of rows, which :func:`_stacked` then fills up. Shapes are
                sent ahead for that, for which the host waits. False: tensors are of one shape, and nothing but them
                is sent. None: False while a batch is at hand of which every rank has as many samples, else True.

        Raises:
            ConfigurationError: ``group`` is given, or tensors differ in more than their rows.
        """
        if group is not None:
            raise ConfigurationError("all_gather(group=...): it gathers from all ranks: leave it out.")
        self.come_together("all_gather")
        tensor = tensor.to(self.device)
        module = self.lightning_module
        if self.communicator.world_size == 1:
            return tensor[None] if module is not None and module.trainer.has_lone_group else tensor
        if uneven is None:
            batch = None if module is None else module.trainer.metrics.batch
            uneven = batch is None or not batch.even
        uneven = uneven and tensor.ndim > 0
        if sync_grads and torch.is_grad_enabled():
            return _stacked(_Gather.apply(tensor, self.communicator, uneven))
        return _stacked(self.communicator.all_gather(tensor, uneven=uneven))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` as one tensor. Missing rows are filled up with the first rows of the ranks in turn, which is what a
    DistributedSampler does with the samples.

    Raises:
        ConfigurationError: they differ in more than their rows, or no rank has a row to fill up with.
    """
    if len({part.shape for part in parts}) == 1:
        return torch.stack(list(parts))
    longest = max(len(part) for part in parts)
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        listed = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ConfigurationError(f"all_gather: the ranks' tensors are of shapes {listed}: only rows may differ.")
    first = [part[row] for row in range(longest) for part in parts if row < len(part)]
    spare = iter(first)
    filled = [torch.cat([part, *(next(spare)[None] for _ in range(longest - len(part)))]) for part in parts]
    return torch.stack(filled)


class _Gather(torch.autograd.Function):
    """Gathers forward; backward sums what all ranks want of this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communicator: Communicator, uneven: bool) -> tuple[Tensor, ...]:
        ctx.communicator = communicator
        return tuple(communicator.all_gather(tensor, uneven=uneven))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.communicator.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
        rank = ctx.communicator.rank
        mine = total.split([grad.numel() for grad in grads])[rank]
        return mine.view(grads[rank].shape), None, None
