"""Callback: code that runs at named moments of a run. Names, arguments and order are Lightning's.

For each moment the callbacks are called first, in the order given (checkpoint callbacks last), then the module. At the
end of something checkpoint callbacks come after the module, under Lightning's meanings before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer

from drivetrain.dependent_options import Dependent

if TYPE_CHECKING:
    from drivetrain.module import TrainModule
    from drivetrain.trainer import Trainer


class Callback:
    """Override what you need; a hook that is not overridden costs nothing.

    Attributes:
        saves_checkpoints: such callbacks run last, so that what others changed is in the checkpoint.
        shows_progress: whether it is the progress bar, of which there is one: the Trainer's ``print`` goes to its own.
        monitors: whether ``on_train_epoch_end`` reads metrics, and so runs after the module's own.
        rank_zero_only: whether its hooks are called on the first worker only (it must not then run a collective).
        reads_predictions: whether it reads ``trainer.predict_loop.predictions``, which are kept for it then.
        needs: what it asks of the strategy: names of flags of :class:`~drivetrain.declaration.Support`. Where one is
            false, training is refused before it starts.
        dependents: arguments that have an effect in some runs only; a command tells who sets one in vain.
        saved_on_exception: path of the checkpoint that it saves when an exception ends training. A fit that is not told
            where to go on from begins there, or with the newest called ``last``, under Lightning's meanings.
        rebuilds: whether its ``setup``, where it has one, may give the module other layers. A checkpoint is then
            compared with the module only where it is loaded, and not before workers start.
        handed_back: names of attributes beside the public ones that come back from workers which the Trainer started:
            plain data that a further stage reads and that is no part of ``state_dict``.
    """

    saves_checkpoints = False
    handed_back: tuple[str, ...] = ()
    shows_progress = False
    monitors = False
    rank_zero_only = False
    reads_predictions = False
    needs: tuple[str, ...] = ()
    dependents: ClassVar[tuple[Dependent, ...]] = ()
    saved_on_exception: str | None = None
    rebuilds = True
    _logs_to: TrainModule | None = None  # the module of the stage at hand

    def log(self, *args: Any, **options: Any) -> None:
        """As :meth:`drivetrain.TrainModule.log` of the module of the stage at hand; nothing where there is none."""
        if self._logs_to is not None:
            self._logs_to.log(*args, **options)

    def log_dict(self, *args: Any, **options: Any) -> None:
        """As :meth:`drivetrain.TrainModule.log_dict`, likewise."""
        if self._logs_to is not None:
            self._logs_to.log_dict(*args, **options)

    def _log_to(self, module: TrainModule | None) -> None:
        # No assignment: a callback that is a network as well would take the module for one of its layers.
        vars(self)["_logs_to"] = module

    @property
    def state_key(self) -> str:
        """Under which the callback's state lies in a checkpoint; unique among the callbacks of a run."""
        return type(self).__qualname__

    def _generate_state_key(self, **settings: Any) -> str:
        """For a ``state_key`` that tells callbacks of one class apart by their settings."""
        return f"{type(self).__qualname__}{settings!r}"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None: ...
    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None: ...
    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...
    def on_before_zero_grad(self, trainer: Trainer, pl_module: TrainModule, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, trainer: Trainer, pl_module: TrainModule, loss: torch.Tensor) -> None: ...
    def on_after_backward(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainModule, optimizer: Optimizer) -> None: ...
    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...
    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...
    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...
    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None: ...
    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None: ...

    def before_restore(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Of a resumed fit: optimizers and schedulers are there and get their states next. ``on_load_checkpoint`` was
        called before that, when there were none."""

    def before_division(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Of a fit whose strategy divides modules among the ranks (it declares ``divides``): the last moment at which
        the module is whole and any rank can run its forward alone."""


def state_name(callback: Callback) -> str:
    """The callback's state key as text, under which its state is saved: a key may be a class, which a checkpoint that
    is read without trust cannot hold."""
    key: Any = callback.state_key
    if isinstance(key, str):
        return key
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else repr(key)


def saved_state(callback: Callback, states: Mapping[Any, Any]) -> Any:
    """The callback's state among ``states``, by its name or, in a file that Lightning wrote, by its key or class; None
    where there is none."""
    for key in (state_name(callback), callback.state_key, type(callback)):
        if key in states:
            return states[key]
    return None
