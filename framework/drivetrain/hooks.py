"""Calls the hooks of a run: callbacks first, then the module, then what saves; what nobody overrides costs a
dictionary look-up."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class Hooks:
    """The hooks that are there, resolved once per run.

    Attributes:
        current: name of the hook being called; ``self.log`` takes its defaults from it.
        active: names that anybody overrides: the loops ask ``name in hooks.active`` where a call would cost.
    """

    def __init__(self, trainer: Trainer, module: TrainModule, callbacks: list[Callback]) -> None:
        from drivetrain.module import TrainModule as Base

        self.trainer, self.module = trainer, module
        self.current: str | None = None
        self._base = Base
        self._resolve_all(callbacks)

    def _resolve_all(self, callbacks: list[Callback]) -> None:
        self._known, self.callbacks = list(callbacks), self.acting(callbacks)
        self._functions: dict[str, tuple[Callable[..., Any], ...]] = {}
        names = {name for name in dir(Callback) if name.startswith("on_")}
        self.active = frozenset(name for name in names if self._resolve(name))

    def acting(self, callbacks: list[Callback]) -> list[Callback]:
        """Those whose hooks are called on this rank. A project finds all of them in the Trainer's list, as in one
        process, and may ask the progress bar something on every rank."""
        job = self.trainer.job
        return [one for one in callbacks if not (one.rank_zero_only and job is not None and job.rank > 0)]

    def follow(self) -> None:
        """Take up what a project has added to the Trainer's list of callbacks since it was looked at, or taken from it
        (in a hook). The loops ask around an epoch's begin."""
        now = self.trainer.callbacks
        if len(now) == len(self._known) and all(map(operator.is_, now, self._known)):
            return
        now[:] = [self.trainer.take_callback(callback) for callback in now]
        for callback in now:
            callback._log_to(self.module)
        self._resolve_all(now)

    def __call__(self, name: str, *args: Any) -> Any:
        """Call hook ``name`` of every callback and of the module; returns what the last of them returned."""
        functions = self._functions.get(name)
        if functions is None:
            functions = self._resolve(name)
        result = None
        if functions:
            former, self.current = self.current, name
            for function in functions:
                result = function(*args)
            self.current = former
        return result

    def of_module(self, name: str, *args: Any) -> Any:
        """Call the module's own hook and return what it returns."""
        former, self.current = self.current, name
        hook = getattr(self.module, name)
        result = None if hook is None else hook(*args)
        self.current = former
        return result

    def of_callbacks(
        self, name: str, *args: Any, monitors: bool | None = None, saving: bool | None = None, **named: Any
    ) -> None:
        """Call hook ``name`` of the callbacks only; of those that read metrics, or of the others; of those that save
        checkpoints, or of the others."""
        former, self.current = self.current, name
        for callback in self.callbacks:
            if monitors in (None, callback.monitors) and saving in (None, callback.saves_checkpoints):
                getattr(callback, name)(self.trainer, self.module, *args, **named)
        self.current = former

    def _resolve(self, name: str) -> tuple[Callable[..., Any], ...]:
        found = self._functions.get(name)
        if found is None:
            last = name.endswith("_end") and self.trainer.meanings.saving == "last"  # moments at which things are saved
            listed = self._of(name, [one for one in self.callbacks if not (last and one.saves_checkpoints)])
            if hasattr(self._base, name) and self.module_has(name):
                listed.append(getattr(self.module, name))
            listed += self._of(name, [one for one in self.callbacks if last and one.saves_checkpoints])
            found = self._functions[name] = tuple(listed)
        return found

    def _of(self, name: str, callbacks: list[Callback]) -> list[Callable[..., Any]]:
        """The hooks ``name`` of those of the callbacks that have one."""
        return [
            partial(getattr(callback, name), self.trainer, self.module)
            for callback in callbacks
            if _overrides(callback, name, Callback)
        ]

    def agree(self, communicator: Communicator, more: Any = None) -> list[Any]:
        """Let every rank know which hooks callbacks have that are another rank's only (of a script that each rank runs,
        or of ``configure_callbacks``); every rank calls it at the same point. Returns every rank's ``more``, which is
        plain data that goes along."""
        names = sorted(name for name in self.active if self._overridden(name, False))
        mine = [[name for name in names if self._overridden(name, by_project)] for by_project in (False, True)]
        if communicator.world_size == 1:
            self._elsewhere = frozenset()
            return [more]
        said = communicator.all_gather_plain([mine, more])
        self._elsewhere = {(name, bool(kind)) for rank, _ in said for kind in (0, 1) for name in rank[kind]}
        return [with_it for _, with_it in said]

    _elsewhere: AbstractSet[tuple[str, bool]] = frozenset()  # hooks that a rank has: their names, and by_project

    def overridden_everywhere(self, name: str, by_project: bool = False) -> bool:
        """Whether the module or a callback overrides ``name``, on whatever rank, that is not meant for the first rank
        only: the same on all ranks.

        Args:
            by_project: not in code of drivetrain's own.
        """
        return (name, by_project) in self._elsewhere or self._overridden(name, by_project)

    def _overridden(self, name: str, by_project: bool) -> bool:
        owners: list[tuple[Any, type]] = [(self.module, self._base)]
        owners += [(callback, Callback) for callback in self.callbacks if not callback.rank_zero_only]
        found = [owner for owner, base in owners if _overrides(owner, name, base)]
        return any(not (by_project and _is_ours(getattr(owner, name))) for owner in found)

    def module_has(self, name: str) -> bool:
        """Whether the module overrides ``name``, in its class or on the object."""
        return _overrides(self.module, name, self._base)


def _overrides(owner: Any, name: str, base: type) -> bool:
    """Whether ``owner`` has a hook of its own; what stands in for one in a test (a mock) is one, too. None is none."""
    own = vars(owner)
    found = own[name] if name in own else getattr(type(owner), name, _ABSENT)
    return found is not None and found is not getattr(base, name, _ABSENT)


def _is_ours(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in ("drivetrain", "drivetrain_plugins")


_ABSENT = object()
