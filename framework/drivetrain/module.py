"""TrainModule: the user's model. Hook names, signatures and meanings are those of Lightning's LightningModule."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.class_only import class_only
from drivetrain.data_hooks import DataHooks
from drivetrain.errors import ConfigurationError
from drivetrain.hyperparameters import HyperparametersMixin
from drivetrain.module_hooks import CheckpointHooks, ModelHooks
from drivetrain.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from drivetrain.callback import Callback
    from drivetrain.logger import Logger
    from drivetrain.optimizer import TrainOptimizer
    from drivetrain.trainer import Trainer


def _tell_of_missing(module: TrainModule, name: str, task: str) -> None:
    """A mixin may call what the next class does not define; a fit of a module without these is refused before."""
    rank_zero_warn(f"{type(module).__name__} has no {name}: define it and {task}.", stacklevel=4)


class _SameAs:
    """An attribute that gives another one until an object is given its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else getattr(module, self.name)


class TrainModule(HyperparametersMixin, ModelHooks, DataHooks, CheckpointHooks, nn.Module):
    """A model together with how it is trained, evaluated and logged.

    Attributes:
        automatic_optimization: False lets ``training_step`` step the optimizers itself (``self.optimizers()``,
            ``self.manual_backward``).
        strict_loading: whether ``load_from_checkpoint`` and resume demand exactly the module's keys.
        example_input_array: a batch for the model summary and the logged graph.
    """

    # Properties that TorchScript must not compile.
    __jit_unused_properties__ = [
        "current_epoch",
        "device",
        "device_mesh",
        "dtype",
        "global_rank",
        "global_step",
        "hparams",
        "hparams_initial",
        "local_rank",
        "logger",
        "loggers",
        "on_gpu",
        "overrides_backward",
        "trainer",
    ]
    automatic_optimization = True
    strict_loading = True
    fabric = None  # Lightning's module may belong to a Fabric; there is none here
    example_input_array = cast(Any, None)  # TorchScript reads annotations, and does not know Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None

    # A trainer refers to processes, files and threads of this process; none of it may travel with the module.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}

    # -- the steps ----------------------------------------------------------------------------------------------
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any] | None:
        """Return the loss: a scalar tensor that is a mean over the batch's samples, or a mapping with ``"loss"`` and
        optionally ``"weight"`` (the number of terms it is the mean of, such as tokens); None skips the batch."""
        _tell_of_missing(self, "training_step", "return the loss")
        return None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any: ...

    def test_step(self, *args: Any, **kwargs: Any) -> Any: ...

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """By default the module called with the batch, or with its first part where the batch is a tuple or list."""
        batch = kwargs.get("batch", args[0])
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    # -- how a batch gets to the device: for code that has batches of its own; the names are Lightning's ---------------
    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return self._transfer_hook("on_before_batch_transfer")(batch, dataloader_idx)

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """``batch`` on ``device`` (by default the module's), by the hooks of the data module or of this module."""
        moved = self._transfer_hook("transfer_batch_to_device")(batch, device or self.device, dataloader_idx)
        return self._transfer_hook("on_after_batch_transfer")(moved, dataloader_idx)

    def _transfer_hook(self, name: str) -> Callable[..., Any]:
        from drivetrain.transfer import transfer_owner

        return getattr(self if self._trainer is None else transfer_owner(self._trainer, name), name)

    # -- configuration ------------------------------------------------------------------------------------------
    def configure_optimizers(self) -> Any:
        """One of: an optimizer; a list of them; (optimizers, schedulers); a dict with ``"optimizer"`` and optionally
        ``"lr_scheduler"``; a list of such dicts; a tuple of dicts; None for no optimizer."""
        _tell_of_missing(self, "configure_optimizers", "return an optimizer")
        return None

    def configure_callbacks(self) -> Callback | list[Callback]:
        return []

    # -- optimisation -------------------------------------------------------------------------------------------
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | TrainOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in manual optimisation, through the strategy and the precision."""
        self.trainer.fit_loop.optimization.manual_backward(loss, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    @property
    def overrides_backward(self) -> bool:
        return "backward" in self.__dict__ or type(self).backward is not TrainModule.backward

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients that ``optimizer`` reads, as the strategy holds them; by default as the Trainer says."""
        if gradient_clip_val is None:
            gradient_clip_val = self.trainer.gradient_clip_val
        if gradient_clip_val is None or gradient_clip_val == 0:
            return
        algorithm = gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm"
        if algorithm not in ("norm", "value"):
            raise ConfigurationError(f"gradient_clip_algorithm is 'norm' or 'value', not {algorithm!r}.")
        raw = getattr(optimizer, "optimizer", optimizer)
        self.trainer.fit_loop.optimization.clip_gradients(raw, float(gradient_clip_val), algorithm)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of several; wrapped so that ``step`` goes through the strategy."""
        trainer = self.trainer
        found: list[Any] = trainer.wrapped_optimizers if use_pl_optimizer else trainer.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of several, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def toggle_optimizer(self, optimizer: Optimizer | TrainOptimizer) -> None:
        """Let only this optimizer's parameters require gradients, until ``untoggle_optimizer``."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        former: dict[nn.Parameter, bool] = {}
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if parameter in former:
                        continue
                    former[parameter] = parameter.requires_grad
                    if id(parameter) not in mine:
                        parameter.requires_grad = False
        self.__dict__["_toggled"] = former

    def untoggle_optimizer(self, optimizer: Optimizer | TrainOptimizer) -> None:
        for parameter, required in self.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | TrainOptimizer) -> Iterator[None]:
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    # -- logging ------------------------------------------------------------------------------------------------
    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a scalar. Means are over samples, and over all ranks by themselves; under
        ``drivetrain.lightning.Trainer`` with ``sync_dist`` only.

        Args:
            name: key; with both ``on_step`` and ``on_epoch`` it forks into ``name_step`` and ``name_epoch``.
            value: number, one-element tensor, or a torchmetrics metric. One that was computed of weights or gradients
                which ranks hold in shards is put together by all of them, one small exchange for each call.
            prog_bar: show it in the progress bar.
            logger: write it to the loggers (default yes).
            on_step: log the value of the step at log boundaries (default in training hooks of a batch).
            on_epoch: log the mean over the epoch (default elsewhere).
            reduce_fx: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"`` (or torch's function of that name), over
                batches and over ranks; ``"gmean"``, the geometric mean, makes ``loss.exp()`` a perplexity.
            add_dataloader_idx: append ``/dataloader_idx_N`` where there are several loaders.
            batch_size: weight of the value in means; by default this rank's samples in the batch.
            rank_zero_only: log on rank 0 only.
        """
        trainer = self._trainer
        if trainer is None:
            warnings.warn(f"self.log({name!r}, ...) is called without a Trainer: nothing is logged.", stacklevel=2)
            return
        if sync_dist_group is not None:
            raise ConfigurationError(
                f"self.log({name!r}, sync_dist_group=...): values are combined over all ranks: leave it out."
            )
        if isinstance(value, DTensor):  # a norm of weights in shards: what the ranks have of it, put together by all
            value = value.full_tensor()
        if rank_zero_only and trainer.global_rank != 0:
            return
        trainer.metrics.log(
            name,
            value,
            prog_bar=prog_bar,
            logger=True if logger is None else logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            sync_dist=sync_dist,
            meant_for_one=rank_zero_only,
        )

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """:meth:`log` for each item; the options are the same."""
        for name, value in _items(dictionary):
            self.log(
                name,
                value,
                prog_bar=prog_bar,
                logger=logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reduce_fx,
                enable_graph=enable_graph,
                sync_dist=sync_dist,
                sync_dist_group=sync_dist_group,
                add_dataloader_idx=add_dataloader_idx,
                batch_size=batch_size,
                rank_zero_only=rank_zero_only,
            )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker only, above the progress bar."""
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False, uneven: bool | None = None) -> Any:
        """Every rank's tensors and numbers, stacked along a new first dimension of size ``world_size``, which one rank
        alone does not add (under Lightning's meaning under ``single`` only). With ``sync_grads`` gradients flow back to
        where the tensors come from. Ranks with fewer rows than others are filled up; ``uneven`` says whether there may
        be such, see :meth:`drivetrain.strategy_view.StrategyView.all_gather`."""
        from lightning_utilities.core.apply_func import apply_to_collection

        strategy = self.trainer.strategy

        def gather(value: Any) -> Tensor:
            return strategy.all_gather(torch.as_tensor(value), group, sync_grads, uneven)

        return apply_to_collection(data, (Tensor, int, float), gather)

    # -- state --------------------------------------------------------------------------------------------------
    @property
    def trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer: call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        for child in self.children():
            if isinstance(child, TrainModule):
                child.trainer = trainer

    _device, _dtype = _SameAs("device"), _SameAs("dtype")  # so Lightning keeps them, and projects read them

    @property
    def device(self) -> torch.device:
        computing = self._trainer.strategy.device if self._trainer is not None else torch.device("cpu")
        first: torch.device | None = None
        for tensor in self.parameters():
            if tensor.device == computing:  # a strategy may keep the others' parts elsewhere
                return computing
            first = first or tensor.device
        return first or computing

    @property
    def dtype(self) -> torch.dtype:
        for tensor in self.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    @property
    def logger(self) -> Logger | None:
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Logger]:
        return self._trainer.loggers if self._trainer is not None else []

    @property
    def current_epoch(self) -> int:
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """The mesh of ranks that the strategy cuts the module over, None for one that does not."""
        return None if self._trainer is None else getattr(self._trainer.strategy, "mesh", None)

    def to_torchscript(
        self, file_path: Any = None, method: str = "script", example_inputs: Any = None, **options: Any
    ) -> Any:
        """The module as TorchScript, for prediction: see :func:`drivetrain.module_export.to_torchscript`."""
        from drivetrain.module_export import to_torchscript

        return to_torchscript(self, file_path, method, example_inputs, options)

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **options: Any) -> Any:
        """The module as ONNX: see :func:`drivetrain.module_export.to_onnx`."""
        from drivetrain.module_export import to_onnx

        return to_onnx(self, file_path, input_sample, options)

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered."""
        raise ConfigurationError("to_tensorrt is not offered: export with to_onnx and build the engine from that.")

    def freeze(self) -> Self:
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the module from a checkpoint's hyper-parameters and load its weights.

        From a directory it comes in evaluation mode; from a file, as Lightning has it, in training mode.

        Args:
            checkpoint_path: a checkpoint of drivetrain or a file that Lightning wrote.
            map_location: where the weights go; by default where they were saved, as far as that is here.
            hparams_file: YAML (or CSV) to take the hyper-parameters from instead.
            strict: whether the names must be exactly the module's; its ``strict_loading`` by default.
            weights_only: False trusts the file: objects of any class in it are made, which may run code.
            kwargs: arguments of ``__init__`` that override the hyper-parameters.

        Raises:
            CheckpointError: there is none, it is damaged, it does not fit, or it needs ``weights_only=False``.
        """
        from drivetrain.restore import module_from_checkpoint

        found = module_from_checkpoint(cls, checkpoint_path, map_location, hparams_file, strict, weights_only, kwargs)
        return cast(Self, found)


def _items(dictionary: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """The items of ``dictionary``. Metrics of a MetricCollection share states, and copies would be made of these for
    whoever looks at them."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(dictionary, torchmetrics.MetricCollection):
        return dictionary.items(keep_base=False, copy_state=False)
    return dictionary.items()
