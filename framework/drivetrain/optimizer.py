"""Optimizers and schedulers as the module configures them, and the wrapper that steps through the strategy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.errors import ConfigurationError, nearest

_SCHEDULER_KEYS = ("scheduler", "name", "interval", "frequency", "reduce_on_plateau", "monitor", "strict")
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps; fields and defaults are Lightning's.

    Attributes:
        interval: ``"epoch"`` or ``"step"`` (optimizer steps).
        frequency: step it every so many intervals, counted over the whole run.
        reduce_on_plateau: whether its ``step`` takes the value of ``monitor``.
        strict: whether a missing ``monitor`` is an error.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def parse_configuration(
    configured: Any, *, steps_schedulers: bool = True, calls_step: bool = True, warns: bool = False
) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """The optimizers and schedulers in any of the forms that ``configure_optimizers`` may return.

    Args:
        configured: what it returned.
        steps_schedulers: whether the loop steps schedulers; else the module does, and a plateau needs no monitor.
        calls_step: whether it is their ``step()`` that the loop calls; else what steps them is the module's affair, and
            they need a state only.
        warns: whether a key that means nothing is told and passed over; else it is an error.

    Raises:
        ConfigurationError: a part that is missing or of the wrong kind.
    """
    optimizers, schedulers, monitor = _split(configured, warns)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"configure_optimizers returned a {type(optimizer).__name__} where an optimizer is needed: return an"
                " optimizer, a list of them, (optimizers, schedulers) or a dict with 'optimizer'."
            )
    configs = [_scheduler(item, monitor, steps_schedulers, calls_step, warns) for item in schedulers]
    stepped = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for config in configs:
        # An optimizer around another one has its groups, so that a scheduler of either changes both.
        changed = getattr(getattr(config.scheduler, "optimizer", None), "param_groups", None)
        if changed and not any(id(group) in stepped for group in changed):
            raise ConfigurationError(
                f"configure_optimizers returned a {type(config.scheduler).__name__} that changes the rate of an"
                " optimizer which was not returned: make it of one that is."
            )
    return optimizers, configs


def _known(given: Mapping[str, Any], keys: tuple[str, ...], what: str, warns: bool) -> dict[str, Any]:
    """``given`` without the keys that mean nothing, which are told or refused."""
    for key in given:
        if key not in keys:
            said = f"configure_optimizers: unknown {what} {key!r}, {nearest(str(key), keys)}"
            if not warns:
                raise ConfigurationError(said)
            warnings.warn(f"{said}; it is passed over", RuntimeWarning, stacklevel=2)
    return {key: value for key, value in given.items() if key in keys}


def _split(configured: Any, warns: bool) -> tuple[list[Any], list[Any], str | None]:
    if configured is None:
        return [], [], None
    if isinstance(configured, Optimizer):
        return [configured], [], None
    if isinstance(configured, Mapping):
        return _from_dict(configured, warns)
    if isinstance(configured, (list, tuple)) and configured:
        if all(isinstance(item, Mapping) for item in configured):
            parts = [_from_dict(item, warns) for item in configured]
            schedulers = [_with_monitor(s, monitor) for _, found, monitor in parts for s in found]
            return [o for found, _, _ in parts for o in found], schedulers, None
        if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
            optimizers, schedulers = configured
            listed = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
            return list(optimizers), list(listed), None
        return list(configured), [], None
    if isinstance(configured, (list, tuple)):
        return [], [], None
    return [configured], [], None


def _from_dict(item: Mapping[str, Any], warns: bool) -> tuple[list[Any], list[Any], str | None]:
    item = _known(item, _OPTIMIZER_KEYS, "key", warns)
    if "optimizer" not in item:
        raise ConfigurationError("configure_optimizers: a dict needs the key 'optimizer'.")
    scheduler = item.get("lr_scheduler")
    schedulers = [] if scheduler is None else list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
    return [item["optimizer"]], schedulers, item.get("monitor")


def _with_monitor(scheduler: Any, monitor: str | None) -> Any:
    if monitor is None or (isinstance(scheduler, Mapping) and "monitor" in scheduler):
        return scheduler
    given = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    return {**given, "monitor": monitor}


def _scheduler(item: Any, monitor: str | None, stepped: bool, calls_step: bool, warns: bool) -> SchedulerConfig:
    given: dict[str, Any]
    if isinstance(item, Mapping):
        item = _known(item, _SCHEDULER_KEYS, "scheduler key", warns)
        if "scheduler" not in item:
            raise ConfigurationError("configure_optimizers: an lr_scheduler dict needs the key 'scheduler'.")
        given = dict(item)
    else:
        given = {"scheduler": item}
    config = SchedulerConfig(**{"monitor": monitor, **given})
    plateau = isinstance(config.scheduler, ReduceLROnPlateau)
    config.reduce_on_plateau = config.reduce_on_plateau or plateau
    if config.interval not in ("step", "epoch"):
        raise ConfigurationError(f"a scheduler's interval is 'step' or 'epoch', not {config.interval!r}.")
    if isinstance(config.frequency, bool) or not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigurationError(f"a scheduler's frequency is a whole number of at least 1, not {config.frequency!r}.")
    if config.reduce_on_plateau and config.monitor is None and stepped:
        raise ConfigurationError(
            "ReduceLROnPlateau needs the metric it watches: add 'monitor': 'val/loss' to its lr_scheduler dict."
        )
    needed = "step" if calls_step else "state_dict"
    if not isinstance(config.scheduler, (LRScheduler, ReduceLROnPlateau)) and not hasattr(config.scheduler, needed):
        way_out = ", and lr_scheduler_step is not overridden" if calls_step else ""
        raise ConfigurationError(f"{type(config.scheduler).__name__} is no scheduler: it has no {needed}(){way_out}.")
    return config


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot do without its closure and so may call it several times (LBFGS)."""
    return calls_closures(type(optimizer))


def calls_closures(kind: type) -> bool:
    """:func:`needs_closure` of the optimizers of a class."""
    parameter = inspect.signature(kind.step).parameters.get("closure") if hasattr(kind, "step") else None
    return parameter is not None and parameter.default is inspect.Parameter.empty


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is of one of torch's own classes, of which it is known what they do."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


# Which treat every element of a parameter by itself. Known by their very class: what derives from them may step in
# another way.
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)


def calls_closure_once(optimizer: Optimizer) -> bool:
    """Whether a closure may just as well run before ``step()``: true for torch's own optimizers but LBFGS.

    An optimizer from elsewhere may call it when and as often as it likes.
    """
    kind = type(optimizer)
    found = _ONCE.get(kind)
    if found is None:
        found = _ONCE[kind] = is_torchs(optimizer) and not needs_closure(optimizer)
    return found


_ONCE: dict[type, bool] = {}


class TrainOptimizer:
    """What ``self.optimizers()`` returns: the user's optimizer, stepping through strategy and precision.

    It passes ``isinstance(x, torch.optim.Adam)`` for an Adam, and attributes that it doesn't have are the optimizer's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Optimizer, Callable[[], Any] | None], Any] = lambda optimizer, closure: optimizer.step(closure),
        toggled: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.__class__ = type("Train" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self.__dict__["_optimizer"] = optimizer
        self.__dict__["_step"] = step
        self.__dict__["_toggled"] = toggled

    @property
    def optimizer(self) -> Optimizer:
        return self.__dict__["_optimizer"]

    # The class inherits from the user's optimizer for isinstance only; its state is the wrapped one's.
    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "__dict__")["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["_optimizer"], name, value)

    def __repr__(self) -> str:
        return repr(self.__dict__["_optimizer"])

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step through the strategy; ``closure`` must do forward, zeroing and backward. ``kwargs`` are the
        optimizer's own."""
        if closure is not None and not callable(closure):
            raise ConfigurationError("optimizer.step(closure): the closure must be callable.")
        optimizer = self.__dict__["_optimizer"]
        with _stepping_with(optimizer, kwargs) if kwargs else nullcontext():
            return self.__dict__["_step"](optimizer, closure)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """While it lasts only this optimizer's parameters require gradients. ``sync_grad`` changes nothing: gradients
        are averaged when the optimizer steps."""
        with self.__dict__["_toggled"](self):
            yield


@contextmanager
def _stepping_with(optimizer: Optimizer, options: Mapping[str, Any]) -> Iterator[None]:
    """Let ``optimizer.step``, whoever calls it, take ``options``: strategies and scalers need not know them."""
    former = vars(optimizer).get("step")  # schedulers put one there that counts
    optimizer.step = partial(optimizer.step, **options)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if former is None:
            del optimizer.step
        else:
            optimizer.step = former  # type: ignore[method-assign]


_OWN = frozenset({"optimizer", "_optimizer", "step", "toggle_model", "__dict__", "__class__"})
