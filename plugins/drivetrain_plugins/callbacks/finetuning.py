"""Finetuning: parts of the module are frozen at the start and join the optimizer at a later epoch.

Names, arguments and state are Lightning's. What is better here: a resumed run gets back which parameters were trained,
not only their groups; parameters are told apart by what they are, not by their values (two biases that are both zero
are two); a run resumed within an epoch does not apply that epoch's change twice.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from drivetrain.callback import Callback, saved_state
from drivetrain.dependent_options import Dependent
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)


class BaseFinetuning(Callback):
    """Override ``freeze_before_training(pl_module)`` and ``finetune_function(pl_module, epoch, optimizer)``.

    The latter is called at the start of every epoch for every optimizer; :meth:`unfreeze_and_add_param_group` is what
    it is for. Under ``ddp`` and ``ring`` the gradients' buckets are made anew where it changed what is trained.
    """

    needs = ("thaws",)

    def __init__(self) -> None:
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        self._trained: list[str] | None = None  # names of parameters, as of the epoch done last
        self._tracking: list[str] = []  # names of BatchNorms that keep running statistics
        self._epoch = -1  # for which finetune_function was called last

    # -- what a subclass defines --------------------------------------------------------------------------------
    def freeze_before_training(self, pl_module: TrainModule) -> None:
        """Freeze what is not to be trained from the start."""
        raise NotImplementedError(f"{type(self).__name__} has no freeze_before_training: define it.")

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze what is to be trained from ``epoch`` on."""
        raise NotImplementedError(f"{type(self).__name__} has no finetune_function: define it.")

    # -- tools --------------------------------------------------------------------------------------------------
    @staticmethod
    def flatten_modules(modules: nn.Module | Iterable[Any]) -> list[nn.Module]:
        """The modules without children below ``modules``, and those with children that have parameters themselves."""
        listed = modules.values() if isinstance(modules, nn.ModuleDict) else modules
        if isinstance(listed, Iterable):
            below = [found for item in listed for found in BaseFinetuning.flatten_modules(item)]
        else:
            below = list(listed.modules())
        return [module for module in below if not list(module.children()) or module._parameters]

    @staticmethod
    def filter_params(
        modules: nn.Module | Iterable[Any], train_bn: bool = True, requires_grad: bool = True
    ) -> Generator[nn.Parameter, None, None]:
        """The parameters of ``modules`` with this ``requires_grad``; without BatchNorms if not ``train_bn``."""
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad is requires_grad)

    @staticmethod
    def make_trainable(modules: nn.Module | Iterable[Any]) -> None:
        """Unfreeze parameters and let BatchNorms track their statistics."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trained(module, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters that ``module`` has itself."""
        _set_trained(module, False)

    @staticmethod
    def freeze(modules: nn.Module | Iterable[Any], train_bn: bool = True) -> None:
        """Freeze all parameters, those of BatchNorms only if not ``train_bn``."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trained(module, train_bn and isinstance(module, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``params`` that ``optimizer`` does not have."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        params = list(params)
        fresh = [p for p in params if id(p) not in held]
        if len(fresh) < len(params):
            warnings.warn(
                f"{len(params) - len(fresh)} parameters to be added are in the optimizer already and stay in the group"
                " they are in: give configure_optimizers only what is trained from the start.",
                stacklevel=3,
            )
        return fresh

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: nn.Module | Iterable[Any],
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze ``modules`` and add their parameters to ``optimizer`` as a group.

        Args:
            lr: of the group; by default that of the first group over ``initial_denom_lr``.
            train_bn: whether the parameters of BatchNorms are added too.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        params = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn))
        if params:
            optimizer.add_param_group({"params": params, "lr": rate})

    # -- the run ------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._internal_optimizer_metadata, self._trained, self._epoch = {}, None, -1
        self.freeze_before_training(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        epoch = trainer.current_epoch
        if epoch == self._epoch:  # resumed within it
            return
        for index, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self.finetune_function(pl_module, epoch, optimizer)
            self._store(pl_module, index, before, optimizer.param_groups)
        self._epoch = epoch
        self._trained = [name for name, p in pl_module.named_parameters() if p.requires_grad]
        self._tracking = [
            n for n, m in pl_module.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats
        ]

    def _store(
        self, pl_module: TrainModule, opt_idx: int, num_param_groups: int, current_param_groups: list[dict[str, Any]]
    ) -> None:
        """Remember the groups of optimizer ``opt_idx``, parameters by name."""
        names = {id(p): name for name, p in pl_module.named_parameters()}
        known = self._internal_optimizer_metadata.get(opt_idx)
        fresh = current_param_groups if known is None else current_param_groups[num_param_groups:]
        described = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in fresh]
        self._internal_optimizer_metadata[opt_idx] = [*(known or []), *described]

    # -- resuming -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {
            "internal_optimizer_metadata": self._internal_optimizer_metadata,
            "trained": self._trained,
            "tracking": self._tracking,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._internal_optimizer_metadata = state_dict["internal_optimizer_metadata"]
        self._trained = state_dict.get("trained")
        self._tracking = state_dict.get("tracking", [])
        self._epoch = state_dict.get("epoch", -1)

    def before_restore(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Before optimizers get their states: the groups that had been added, and what was trained."""
        saved = saved_state(self, checkpoint.get("callbacks", {}))
        if not saved:
            return
        named, added = dict(pl_module.named_parameters()), []
        for index, optimizer in enumerate(trainer.optimizers):
            groups = saved["internal_optimizer_metadata"].get(index, [])
            for group in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({**group, "params": [named[name] for name in group["params"]]})
                added += group["params"]
        trained = saved.get("trained")
        if trained is None:  # saved by Lightning, which does not say: what was added had been unfrozen
            for name in added:
                named[name].requires_grad = True
                _set_tracking(pl_module.get_submodule(name.rpartition(".")[0]), True)
            return
        for name, parameter in named.items():
            parameter.requires_grad = name in trained
        for name, module in pl_module.named_modules():
            _set_tracking(module, name in saved["tracking"])


def multiplicative(epoch: int) -> float:
    """The default schedule: twice the rate at every epoch."""
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Freeze ``pl_module.backbone``, train it from an epoch on with a learning rate of its own that grows.

    Args:
        unfreeze_backbone_at_epoch: epoch, from 0, from which on the backbone is trained.
        lambda_func: factor of the backbone's rate at each later epoch, called with the number of the next one.
        backbone_initial_ratio_lr: the backbone's first rate over the first group's.
        backbone_initial_lr: that rate itself, instead.
        should_align: never go beyond the first group's rate.
        initial_denom_lr: has no effect where the rates above are given, which they are; kept for its name.
        train_bn: whether the backbone's BatchNorms get into the optimizer.
        verbose: report both rates.
        rounding: digits of the report.
    """

    dependents = (Dependent("backbone_initial_ratio_lr", {".backbone_initial_lr": None}),)

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            raise ConfigurationError(
                f"BackboneFinetuning looks for {type(pl_module).__name__}.backbone, and there is no module of that"
                " name: call the part to finetune so, or derive from BaseFinetuning."
            )
        super().setup(trainer, pl_module, stage)

    def freeze_before_training(self, pl_module: TrainModule) -> None:
        self.freeze(_backbone(pl_module))

    def finetune_function(self, pl_module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        if epoch == self.unfreeze_backbone_at_epoch:
            own = self.backbone_initial_lr
            backbone_rate = rate * self.backbone_initial_ratio_lr if own is None else own
            self.unfreeze_and_add_param_group(
                _backbone(pl_module), optimizer, backbone_rate, self.initial_denom_lr, self.train_bn
            )
        else:
            assert self.previous_backbone_lr is not None
            backbone_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align:
                backbone_rate = min(backbone_rate, rate)
            optimizer.param_groups[-1]["lr"] = backbone_rate
        self.previous_backbone_lr = backbone_rate
        if self.verbose:
            log.info(
                "learning rate %s, of the backbone %s", round(rate, self.rounding), round(backbone_rate, self.rounding)
            )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict(state_dict)


def _backbone(module: nn.Module) -> nn.Module:
    return module.get_submodule("backbone")


def _set_trained(module: nn.Module, trained: bool) -> None:
    _set_tracking(module, trained)
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trained


def _set_tracking(module: nn.Module, tracking: bool) -> None:
    if isinstance(module, _BatchNorm):
        module.track_running_stats = tracking
