"""What a worker's optimizer has for states: the servers hold them, and who reaches for them here is told so."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from drivetrain.errors import MisuseError


class AbsentStates(dict[Any, Any]):
    """An empty ``optimizer.state``. Momenta and the like are made by the servers, so that what a hook changed of them
    here would have no effect, and what it read would not be there.

    Raises:
        MisuseError: a state is asked for, set or removed.
    """

    def _absent(self, *_: Any, **__: Any) -> NoReturn:
        raise MisuseError(
            "a state of the optimizer is read or changed on a worker of strategy=parameter_server, whose servers"
            " hold the states, so that it would have no effect: leave it out, or use strategy=ddp."
        )

    __missing__ = __setitem__ = __delitem__ = _absent
    clear = pop = popitem = setdefault = update = _absent


def keep_no_states(optimizer: Optimizer) -> None:
    """Have ``optimizer`` of a worker without states, and without any that a hook loads."""
    states = AbsentStates()
    optimizer.state = states  # type: ignore[assignment]
    optimizer.register_load_state_dict_pre_hook(states._absent)
