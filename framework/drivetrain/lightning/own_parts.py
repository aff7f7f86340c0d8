"""A project's own strategies, accelerators and precisions: what they override and nothing here calls is refused, for a
method that is silently passed over would train something else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.lightning.accelerators import Accelerator
from drivetrain.lightning.strategies import Asked
from drivetrain.precision import Precision

# What Lightning calls of an accelerator while it runs.
_OF_ACCELERATORS = ("setup", "setup_device", "teardown", "get_device_stats")
# What it calls of a precision under another name, or by other arguments, than drivetrain does.
_OF_PRECISIONS = (
    *("backward", "pre_backward", "post_backward", "optimizer_step", "unscale_gradients", "main_params"),
    *("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "convert_output", "teardown"),
    *(f"{stage}_step_context" for stage in ("train", "val", "test", "predict")),
    *("module_init_context", "tensor_init_context", "on_save_checkpoint", "on_load_checkpoint"),
)


def refuse_what_is_not_called(strategy: Any, accelerator: Any, plugins: Any) -> None:
    """Refuse parts of the Trainer that a project derived from Lightning's classes and that would be passed over.

    Raises:
        ConfigurationError: one overrides a method that is never called here.
    """
    given = plugins if isinstance(plugins, Sequence) else [plugins]
    for part, base, never_called, instead in [
        (strategy, Asked, None, "derive from drivetrain.Strategy, whose methods are called (docs/architecture.md)"),
        (accelerator, Accelerator, _OF_ACCELERATORS, "do it in a callback's setup and teardown"),
        *(
            (
                plugin,
                Precision,
                _OF_PRECISIONS,
                "override convert_input, convert_module, forward_context, scale, unscale or step",
            )
            for plugin in given
        ),
    ]:
        if not isinstance(part, base):
            continue
        names = sorted(_overridden(type(part), never_called))
        if names:
            raise ConfigurationError(
                f"{type(part).__name__} overrides {', '.join(names)}, which nothing calls here: {instead}."
            )


def _overridden(kind: type, among: Collection[str] | None) -> Iterable[str]:
    """Names of ``among`` (None: of whatever is called or computed) that classes outside of drivetrain define."""
    for owner in kind.__mro__:
        if owner is object or owner.__module__.partition(".")[0] in ("drivetrain", "drivetrain_plugins"):
            continue
        for name, value in vars(owner).items():
            does = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if (
                does
                and not name.startswith("__")
                and (name != "register_strategies" if among is None else name in among)
            ):
                yield name
