"""A module that a failed stage left in parts on several ranks, in a script that caught the error and goes on.

Where an error is handled no rank may wait for another. So the parts stay as they are until the script's ranks meet in
the next stage, whose first act is to bring them together; until then whoever wants the whole module is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from drivetrain.errors import MisuseError, TrainingError

if TYPE_CHECKING:
    from drivetrain.comm.communicator import Communicator
    from drivetrain.module import TrainModule
    from drivetrain.strategy import Strategy


class InParts:
    """What is known of such a module.

    Args:
        module: it refuses to be called or saved, and takes a whole ``state_dict``, which ends this.
        kind: its own class, where an engine has given it another one.
        strategy: that left it so.
        together: makes it whole, on all ranks of the communicator it is given, which are those of the failed stage.
        whole: makes it whole without values, on this rank alone.
    """

    def __init__(
        self,
        module: TrainModule,
        kind: type,
        strategy: Strategy,
        together: Callable[[Communicator], None],
        whole: Callable[[], None],
    ) -> None:
        self.kind, self.step, self.ranks = kind, module.trainer.global_step, strategy.everyone.world_size
        self.together, self._whole = together, whole
        self._words = (
            f"each rank has a part of {kind.__name__} only since a stage failed under"
            f" strategy={strategy.name}: go on with a stage of a Trainer on all ranks (fit, validate), which brings the"
            " parts together, or load whole weights (load_state_dict)."
        )
        self._hooks = [
            module.register_forward_pre_hook(self._refuse, prepend=True),
            module.register_state_dict_pre_hook(self._refuse),
        ]
        vars(module)["load_state_dict"] = partial(self._load, module)
        _KNOWN[module] = self

    def _refuse(self, *_: Any) -> None:
        raise MisuseError(self._words)

    def _load(self, module: TrainModule, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        lacking = next((name for name, _ in module.named_parameters() if name not in state_dict), None)
        if lacking is not None:
            raise MisuseError(f"the state_dict has no {lacking}, and {self._words}")
        self.forget(module)
        self._whole()
        return module.load_state_dict(state_dict, *arguments, **named)

    def forget(self, module: TrainModule) -> None:
        """The module is whole again."""
        for hook in self._hooks:
            hook.remove()
        del vars(module)["load_state_dict"]
        del _KNOWN[module]


_KNOWN: WeakKeyDictionary[nn.Module, InParts] = WeakKeyDictionary()


def bring_together(module: TrainModule, strategy: Strategy) -> None:
    """Make ``module`` whole where a failed stage left it in parts. All ranks call it when they have joined a job.

    Raises:
        TrainingError: there are no parts that belong together.
    """
    found, everyone = _KNOWN.get(module), strategy.everyone
    steps = everyone.all_gather_plain(None if found is None else found.step)
    if all(step is None for step in steps):
        return
    if found is None or len(set(steps)) > 1 or everyone.world_size != found.ranks:
        told = ", ".join("whole" if step is None else f"of step {step}" for step in steps)
        kind = type(module) if found is None else found.kind
        raise TrainingError(
            f"the parts of {kind.__name__} that a failed stage left on the ranks are not of one moment ({told}):"
            " load whole weights on all ranks, of a checkpoint (load_state_dict), or make the module anew."
        )
    found.forget(module)
    found.together(everyone)
