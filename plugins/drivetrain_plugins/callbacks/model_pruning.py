"""ModelPruning: weights are set to zero as training goes, by ``torch.nn.utils.prune``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import prune

from drivetrain.callback import Callback
from drivetrain.dependent_options import Dependent
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)
_FUNCTIONS: dict[str, Any] = {
    name: getattr(prune, name)
    for name in ("ln_structured", "l1_unstructured", "random_structured", "random_unstructured")
}
_METHODS: dict[str, Any] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
Chosen = Sequence[tuple[nn.Module, str]]


class ModelPruning(Callback):
    """Arguments are Lightning's. Where there are several workers they all take the first one's choice.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"random_unstructured"``, ``"ln_structured"``, ``"random_structured"``, or
            a subclass of ``torch.nn.utils.prune.BasePruningMethod``.
        parameters_to_prune: ``(module, name)`` pairs; default: every parameter called one of ``parameter_names``.
        parameter_names: default: weight and bias.
        use_global_unstructured: choose among all parameters together, instead of within each.
        amount: share (float) or number (int) of entries at each pruning, or a function of the epoch.
        apply_pruning: whether, or a function of the epoch.
        make_pruning_permanent: whether checkpoints and the trained module hold the pruned weights themselves.
        use_lottery_ticket_hypothesis: set what is left back to its first values (Frankle and Carbin, ICLR 2019); or a
            function of the epoch.
        resample_parameters: draw these values anew instead.
        pruning_dim, pruning_norm: of structured pruning.
        verbose: report the sparsity: 0 not, 1 of all, 2 of each parameter.
        prune_on_train_epoch_end: else at the end of validation.

    Raises:
        ConfigurationError: arguments that cannot be meant.
    """

    PARAMETER_NAMES = ("weight", "bias")
    needs = ("editable",)

    dependents = (Dependent("resample_parameters", {".use_lottery_ticket_hypothesis": True}),)

    def __init__(
        self,
        pruning_fn: Any,
        parameters_to_prune: Chosen = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._parameters_to_prune = parameters_to_prune
        self._parameter_names = parameter_names or list(self.PARAMETER_NAMES)
        self._use_global_unstructured = use_global_unstructured
        self.amount = amount
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._verbose = verbose
        self._global_kwargs: dict[str, Any] = {}
        self._first: dict[int, nn.Module] = {}  # copies of the modules as they began, by id of the module
        for name in self._parameter_names:
            if name not in self.PARAMETER_NAMES:
                raise ConfigurationError(f"ModelPruning(parameter_names): {nearest(name, self.PARAMETER_NAMES)}")
        if not (callable(amount) or isinstance(amount, (int, float))):
            raise ConfigurationError(
                f"ModelPruning(amount={amount!r}): give a share, a number or a function of the epoch."
            )
        if verbose not in (0, 1, 2):
            raise ConfigurationError(f"ModelPruning(verbose={verbose!r}): use 0, 1 or 2.")
        self.pruning_fn = self._function(pruning_fn, pruning_dim, pruning_norm)

    def _function(self, given: Any, dim: int | None, norm: int | None) -> Any:
        """What prunes: torch's method class for global pruning, else torch's function."""
        if isinstance(given, str):
            name = given.lower()
            if name not in _FUNCTIONS:
                raise ConfigurationError(f"ModelPruning(pruning_fn={given!r}): {nearest(name, _FUNCTIONS)}")
            options: dict[str, Any] = {}
            if name.endswith("_structured"):
                if dim is None or (name == "ln_structured" and norm is None):
                    missing = "pruning_dim" if dim is None else "pruning_norm"
                    raise ConfigurationError(f"ModelPruning(pruning_fn={given!r}) needs {missing}.")
                options = {"dim": dim, **({"n": norm} if name == "ln_structured" else {})}
            self._global_kwargs = options
            found: Any = _METHODS[name] if self._use_global_unstructured else partial(_FUNCTIONS[name], **options)
        elif inspect.isclass(given) and issubclass(given, prune.BasePruningMethod):
            if not self._use_global_unstructured:
                raise ConfigurationError(
                    "ModelPruning: a pruning method of your own needs use_global_unstructured=True."
                )
            found = given
        else:
            raise ConfigurationError(
                f"ModelPruning(pruning_fn={given!r}): give {', '.join(_FUNCTIONS)} or a subclass of BasePruningMethod."
            )
        if self._use_global_unstructured and found.PRUNING_TYPE != "unstructured":
            raise ConfigurationError(
                f"ModelPruning(pruning_fn={given!r}) prunes whole rows, which is no choice among all parameters: set"
                " use_global_unstructured=False."
            )
        return found

    # -- what is pruned -----------------------------------------------------------------------------------------
    def filter_parameters_to_prune(self, parameters_to_prune: Chosen = ()) -> Chosen:
        """Override to leave some out."""
        return parameters_to_prune

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: Chosen = (), parameter_names: Sequence[str] = ()
    ) -> Chosen:
        """The given pairs if they are the module's, or all of its."""
        names = parameter_names or ModelPruning.PARAMETER_NAMES
        modules = [module for module in pl_module.modules() if not isinstance(module, _CONTAINERS)]
        if not parameters_to_prune:
            return [(m, name) for name in names for m in modules if isinstance(getattr(m, name, None), nn.Parameter)]
        for pair in parameters_to_prune:
            module, name = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
            if not isinstance(module, nn.Module) or not isinstance(name, str):
                raise ConfigurationError("ModelPruning(parameters_to_prune): give pairs of a module and a name.")
            if not any(module is known for known in modules) or not hasattr(module, name):
                raise ConfigurationError(
                    f"ModelPruning(parameters_to_prune): {type(pl_module).__name__} has no {type(module).__name__} of"
                    f" these with {name!r}: give its own modules."
                )
        return parameters_to_prune

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        chosen = self.sanitize_parameters_to_prune(pl_module, self._parameters_to_prune, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(chosen)
        if self._use_lottery_ticket_hypothesis and stage == "fit":
            self._first = {}  # a further fit goes back to what it began with
            for module, _ in self._parameters_to_prune:
                if id(module) not in self._first:
                    self._first[id(module)] = deepcopy(module)

    # -- pruning ------------------------------------------------------------------------------------------------
    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._prune_on_train_epoch_end:
            self._run_pruning(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.sanity_checking and not self._prune_on_train_epoch_end:
            with torch.inference_mode(False):
                self._run_pruning(trainer)

    def _run_pruning(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        amount = self.amount(epoch) if callable(self.amount) else self.amount
        if not _applies(self._apply_pruning, epoch) or not amount:
            return
        self.apply_pruning(amount)
        if trainer.strategy.communicator.world_size > 1:
            for module, name in self._parameters_to_prune:
                trainer.strategy.communicator.broadcast(getattr(module, f"{name}_mask"))
        if _applies(self._use_lottery_ticket_hypothesis, epoch):
            self.apply_lottery_ticket_hypothesis()

    def apply_pruning(self, amount: int | float) -> None:
        """Prune now."""
        before = [_zeros(*pair) for pair in self._parameters_to_prune]
        if self._use_global_unstructured:
            taken = set(inspect.signature(self.pruning_fn).parameters)
            options = {k: v for k, v in {**self._global_kwargs, "amount": amount}.items() if k in taken}
            prune.global_unstructured(self._parameters_to_prune, pruning_method=self.pruning_fn, **options)
        else:
            for module, name in self._parameters_to_prune:
                self.pruning_fn(module, name=name, amount=amount)
        if self._verbose:
            self._report(before)

    @rank_zero_only
    def _report(self, before: list[tuple[int, int]]) -> None:
        after = [_zeros(*pair) for pair in self._parameters_to_prune]
        total = sum(size for _, size in after)
        log.info("pruned: %d -> %d of %d", sum(n for n, _ in before), sum(n for n, _ in after), total)
        if self._verbose == 2:
            for (module, name), (was, _), (now, size) in zip(self._parameters_to_prune, before, after, strict=True):
                log.info("pruned %s of %r: %d -> %d of %d", name, module, was, now, size)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Set the parameters back to their first values, or draw them anew."""
        renewed: dict[int, nn.Module] = {}
        for module, name in self._parameters_to_prune:
            source = self._first[id(module)]
            reset = getattr(source, "reset_parameters", None)
            if self._resample_parameters and callable(reset):
                if id(module) not in renewed:
                    renewed[id(module)] = deepcopy(source)
                    renewed[id(module)].reset_parameters()  # type: ignore[operator]
                source = renewed[id(module)]
            target = getattr(module, f"{name}_orig", None)
            target = getattr(module, name) if target is None else target
            with torch.no_grad():
                target.copy_(getattr(source, name))

    # -- the end ------------------------------------------------------------------------------------------------
    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Put the pruned weights in the places of masks and originals."""
        for child in module.modules():
            for key, hook in list(child._forward_pre_hooks.items()):
                if isinstance(hook, prune.BasePruningMethod):
                    hook.remove(child)
                    del child._forward_pre_hooks[key]

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._make_pruning_permanent:
            self.make_pruning_permanent(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """The checkpoint gets pruned weights by their own names, also in the optimizers' states; training goes on with
        masks."""
        if not self._make_pruning_permanent:
            return
        state = dict(checkpoint["state_dict"])
        for name in [
            key.removesuffix("_mask") for key in state if key.endswith("_mask") and f"{key[:-5]}_orig" in state
        ]:
            original, mask = state.pop(f"{name}_orig"), state.pop(f"{name}_mask")
            state[name] = mask.to(original.dtype) * original
        checkpoint["state_dict"] = state
        plain = lambda key: key.removesuffix("_orig") if isinstance(key, str) else key
        for saved in checkpoint.get("optimizer_states", []):
            saved["state"] = {plain(key): value for key, value in saved["state"].items()}
            for group in saved["param_groups"]:
                group["params"] = [plain(key) for key in group["params"]]


def _applies(rule: bool | Callable[[int], bool], epoch: int) -> bool:
    return bool(rule(epoch)) if callable(rule) else rule


def _zeros(module: nn.Module, name: str) -> tuple[int, int]:
    """Entries pruned, and all."""
    mask = getattr(module, f"{name}_mask", None)
    return (0, getattr(module, name).numel()) if mask is None else (int((mask == 0).sum()), mask.numel())
