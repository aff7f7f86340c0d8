"""``configure_optimizers`` of a module whose optimizer a command line chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer

from drivetrain.errors import ConflictError
from drivetrain.lightning.cli.instantiation import instantiate_class
from drivetrain.lightning.cli.types import ReduceLROnPlateau
from drivetrain.module import TrainModule
from drivetrain.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from drivetrain.lightning.cli.parser import Classes, LightningArgumentParser


def lightnings_form(optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
    """What ``configure_optimizers`` gives of one optimizer, and of a schedule."""
    if lr_scheduler is None:
        return optimizer
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor},
        }
    return [optimizer], [lr_scheduler]


class Configured:
    """Makes the optimizer and the schedule when they are asked for: the module's parameters may come to be, or be
    sharded, after it is made.

    Args:
        form: ``configure_optimizers`` of the command line.
        optimizer: its class, or classes that it is below, and its configuration.
        schedule: the same of the schedule; None for none.
    """

    def __init__(
        self, form: Callable[..., Any], optimizer: tuple[Classes, Any], schedule: tuple[Classes, Any] | None
    ) -> None:
        self.form, self.optimizer, self.schedule = form, optimizer, schedule

    def bind(self, module: Any) -> None:
        """Let it be ``module``'s ``configure_optimizers``."""
        if is_overridden("configure_optimizers", module, TrainModule):
            rank_zero_warn(
                f"{type(module).__name__}.configure_optimizers is not called: the command line chooses the optimizer.",
                stacklevel=6,
            )
        module.configure_optimizers = partial(configure_optimizers, module, self)


def configure_optimizers(module: Any, chosen: Configured) -> Any:
    optimizer = _made(*chosen.optimizer, module.parameters())
    schedule = None if chosen.schedule is None else _made(*chosen.schedule, optimizer)
    return chosen.form(module, optimizer=optimizer, lr_scheduler=schedule)


def configured_by(
    command_line: Any, parser: LightningArgumentParser, chosen: Callable[[str], Any]
) -> Configured | None:
    """What the command line chose; None where it chose nothing.

    Args:
        command_line: has ``configure_optimizers``.
        parser: has the arguments that are optimizers and schedules.
        chosen: gives the configuration of an argument.

    Raises:
        ConflictError: several optimizers or schedules, which one method cannot tell apart.
    """
    found: list[tuple[Classes, Any] | None] = []
    for what, added in (("optimizer", parser._optimizers), ("lr_scheduler", parser._lr_schedulers)):
        automatic = [key for key, (_, link_to) in added.items() if link_to == "AUTOMATIC"]
        if len(automatic) > 1:
            raise ConflictError(
                f"{type(command_line).__name__} has several arguments that are the module's {what}:"
                f" {', '.join(automatic)}; give add_{what}_args(..., link_to='model.ARGUMENT') to all but one of them,"
                " or to all and define configure_optimizers in the module."
            )
        configuration = chosen(automatic[0]) if automatic else None
        found.append(None if configuration is None else (added[automatic[0]][0], configuration))
    optimizer, schedule = found
    if optimizer is None:
        if schedule is not None:
            rank_zero_warn("lr_scheduler is given and no optimizer: neither is used.", stacklevel=5)
        return None
    return Configured(command_line.configure_optimizers, optimizer, schedule)


def _made(kinds: Classes, configuration: Any, first: Any) -> Any:
    plain: Mapping[str, Any] = configuration.as_dict() if hasattr(configuration, "as_dict") else configuration
    return instantiate_class(first, plain) if isinstance(kinds, tuple) else kinds(first, **plain)


def with_path(kind: type) -> Callable[[Any], Mapping[str, Any]]:
    """Gives the arguments of ``kind`` together with its class path."""

    def made_of(init_args: Any) -> dict[str, Any]:
        return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": init_args.as_dict()}

    return made_of
