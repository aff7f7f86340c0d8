"""Trainer: the object a user holds, and what it can be asked for."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch._dynamo  # every optimizer imports it at its first use; before a fork it is paid for once
from torch.distributed.tensor import DTensor

from drivetrain import handover, late_setup, outcome, session, snapshot
from drivetrain.checkpoint import rng
from drivetrain.comm import phase
from drivetrain.compilation import uncompiled
from drivetrain.empty_init import EmptyInit
from drivetrain.errors import (
    ConfigurationError,
    Interrupted,
    MissingPartError,
    MisuseError,
    Terminated,
    WrongKindError,
)
from drivetrain.frame_room import in_one_chunk
from drivetrain.launch import Job, own_processes
from drivetrain.local_path import local_path
from drivetrain.metrics import Metrics
from drivetrain.module import TrainModule
from drivetrain.rank_zero import rank_zero_only, rank_zero_warn
from drivetrain.request import Request, check
from drivetrain.summary import run_summary
from drivetrain.timing import Timing
from drivetrain.trainer_state import TrainerState

if TYPE_CHECKING:
    from drivetrain.data import DataModule

# Engines lie in circles with what they hold, connections and threads too, of which a script of many Trainers would run
# out before Python looks for circles; to look takes a few tenths of a second.
_COLLECT_EVERY = 4


class Trainer(TrainerState):
    """Trains, evaluates and predicts with any strategy. Arguments carry Lightning's names and meanings, see
    :class:`~drivetrain.configuration.Configuration`."""

    # -- what a user calls --------------------------------------------------------------------------------------
    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train. Starts workers where the strategy needs them and none are there; afterwards the caller's module holds
        the trained weights, and this object the counters and metrics. Called again it counts on from there, with new
        optimizers, up to ``max_epochs`` and ``max_steps``, which may have been raised meanwhile.

        Args:
            train_dataloaders: a loader, or a data module in its place.
            ckpt_path: go on from ``"last"``, ``"best"``, ``"auto"`` (the newest, or from the start) or a path, of a
                checkpoint that drivetrain wrote or of a file that Lightning wrote.
            weights_only: False: trust a checkpoint file that holds objects of arbitrary classes.
        """
        train, datamodule = self._data(train_dataloaders, datamodule)
        loaders = {"train": train, "val": val_dataloaders}
        self._run(Request("fit", model, loaders, datamodule, ckpt_path, weights_only=weights_only))

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Validate; one dict of metrics per loader."""
        return self._evaluate("validate", "val", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Test; one dict of metrics per loader. Without ``model`` the best checkpoint of the last fit is tested."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Predict; the predictions in the order of the data (batch by batch, each in parts where ranks shared it),
        a list of lists where there are several loaders. Each sample is predicted once."""
        loader, datamodule = self._data(dataloaders, datamodule)
        model, ckpt_path = self._known(model, ckpt_path)
        request = Request("predict", model, {"predict": loader}, datamodule or self.datamodule, ckpt_path)
        request.weights_only, request.keep_predictions = weights_only, return_predictions is not False
        parts = self._run(request)
        if return_predictions is False or parts is None:
            return None
        merged = [[item for _, _, item in sorted(loader, key=lambda part: part[:2])] for loader in parts]
        return merged[0] if len(merged) == 1 else merged

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save the run as a checkpoint directory at ``filepath``; every worker must call it."""
        if self.lightning_module is None:
            raise MissingPartError("save_checkpoint needs a module: call fit first.")
        if storage_options is not None:
            raise ConfigurationError("save_checkpoint(storage_options=...): checkpoints are local files: leave it out.")
        if not self.strategy.trains:  # a rank that serves: those that train have it all
            return
        clock = perf_counter()
        with phase.during(phase.CHECKPOINT):
            snapshot.write(self, local_path(filepath, "filepath"), bool(weights_only))
            if self.status != "running":  # no stage's end will wait for it
                self.checkpoint_io.teardown()
        self.timing.add("checkpoint", clock)

    def save_alone(self, filepath: str | Path) -> None:
        """Save what this rank has at ``filepath`` without the other ranks: what a callback may do in ``on_exception``.

        Raises:
            CheckpointError: the strategy leaves no rank the whole state, or the disk refuses.
        """
        snapshot.write_alone(self, local_path(filepath, "filepath"))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker only, above the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback
            show = print if bar is None else bar.print
            show(*args, **kwargs)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """While it lasts modules are made in the precision's dtype and, with one process or one GPU for each, on the
        device that they are trained on. ``empty_init`` leaves weights as memory was, to be loaded from a checkpoint."""
        device = self.strategy.device
        if self.job is None:
            device = torch.device(self.accelerator_name, *self.gpus[:1])
        with self.precision_plugin.init_context(), device if self.world_size == 1 else nullcontext():
            with EmptyInit() if empty_init else nullcontext():
                yield

    def request_stop(self, reason: str | None = None) -> None:
        """Ask for a stop from one rank; all stop together at the next boundary, a lone rank after its batch."""
        self.stop_wish = reason or self.stop_wish
        if reason != "max_time" or self.strategy.communicator.world_size == 1:
            self.should_stop = True

    def close(self) -> None:
        """Leave the job: process groups and threads end. Called for you where workers were started for you."""
        self.disconnect(None)

    # -- running ------------------------------------------------------------------------------------------------
    def _evaluate(
        self,
        stage: str,
        which: str,
        model: Any,
        loaders: Any,
        ckpt_path: Any,
        verbose: bool,
        datamodule: Any,
        weights_only: bool | None,
    ) -> list[dict[str, float]]:
        loader, datamodule = self._data(loaders, datamodule)
        model, ckpt_path = self._known(model, ckpt_path)
        data = datamodule or self.datamodule
        return self._run(Request(stage, model, {which: loader}, data, ckpt_path, verbose, weights_only))

    def _known(self, model: TrainModule | None, ckpt_path: Any) -> tuple[TrainModule, Any]:
        if model is not None:
            return model, ckpt_path
        if self.lightning_module is None:
            raise WrongKindError("there is no module: pass one, or call fit before.")
        if ckpt_path is None and getattr(self.checkpoint_callback, "best_model_path", None):
            ckpt_path = "best"
        elif ckpt_path is None:
            rank_zero_warn("no module is given and no best checkpoint was kept: the last module runs as it is.")
        return self.lightning_module, ckpt_path

    def _data(self, loaders: Any, datamodule: Any) -> tuple[Any, Any]:
        """Loaders and data module; a data module may stand in the loaders' place."""
        from drivetrain.data import DataModule

        if isinstance(loaders, DataModule):
            return None, loaders
        if loaders is not None and datamodule is not None:
            raise ConfigurationError("loaders and a datamodule were both given: pass one of them.")
        return loaders, datamodule

    def _run(self, request: Request) -> Any:
        try:
            return self._run_stage(request)
        except (Interrupted, KeyboardInterrupt) as stop:
            self._terminated = isinstance(stop, Terminated)
            if self.meanings.keyboard == "raise" or not isinstance(stop, KeyboardInterrupt):
                raise
            self.status = "interrupted"
            raise SystemExit(1) from stop

    def _run_stage(self, request: Request) -> Any:
        self._terminated = False
        request.module = uncompiled(request.module)
        owed = late_setup.put_by(request.datamodule)
        check(self, request)
        if request.stage == "fit":
            self.should_stop, self.stop_wish = False, None
            self.timing = Timing()
            self.left_state = None
            fit = self.loop
            if fit is not None:
                self._adopted = fit.counters()
        if self.job is None and self.world_size > 1:
            try:
                return handover.in_workers(self, request)
            except BaseException as error:
                stopped = isinstance(error, (Interrupted, KeyboardInterrupt))
                self.stage, self.status = request.stage, "interrupted" if stopped else "failed"
                raise
            finally:
                late_setup.put_back(request.datamodule, owed)
        alone = Job(accelerator=self.accelerator_name, backend=self.backend, timeout=self.timeout, gpus=self.gpus)
        before = outcome.before(self, request)
        result = in_one_chunk(session.run, self, request, self.job or alone)
        try:
            if request.stage == "predict":
                result = handover.gather_predictions(self.strategy.communicator, result)
            if self.strategy.hands_on:
                result = outcome.to_those_that_served(self, request, before, result)
        except BaseException as error:
            self.status = "failed"
            self.disconnect(error)  # else others would wait for this rank, whose script may catch it
            raise
        return result

    def connect(self, job: Job) -> None:
        """Join ``job``; does nothing when that is done."""
        if self._connected:
            return
        if Trainer._in_job is not None and job.origin != "inline":  # an earlier one of the script makes room
            Trainer._in_job.close()
            Trainer._made_room += 1
            if Trainer._made_room % _COLLECT_EVERY == 0:
                gc.collect()
        self.job = job if job.origin != "inline" else None
        if self.job is not None:
            self.node_rank = job.node_rank
        self.strategy.connect(job)
        setattr(rank_zero_only, "rank", job.rank)  # noqa: B010  (mypy does not know of it)
        self._connected = True
        if self.job is not None:
            own_processes.bind()
            Trainer._in_job = self
            atexit.register(self.close)  # a script under torchrun need not say goodbye itself
        # One seed for all ranks' data order, whatever each rank's own generator was seeded with.
        mine = self.seed if self.seed is not None else torch.initial_seed() % 2**53
        self.data_seed = int(self.strategy.everyone.all_gather_plain(mine)[0])

    _connected = False
    _in_job: ClassVar[Trainer | None] = None  # the one of this process that holds its process group
    _made_room: ClassVar[int] = 0  # how many did for another

    def disconnect(self, error: BaseException | None) -> None:
        if self._connected:
            self._connected = False
            if Trainer._in_job is self:
                Trainer._in_job = None
            atexit.unregister(self.close)
            self.strategy.close(error)

    def new_metrics(self) -> Metrics:
        strategy = self.strategy
        device = (
            strategy.device if strategy.job.backend == "nccl" and strategy.job.world_size > 1 else torch.device("cpu")
        )
        communicator, module = strategy.communicator, self.lightning_module
        current = lambda: self.hooks.current
        return Metrics(
            strategy.gather,
            communicator,
            device,
            current,
            module.named_modules,
            strategy.counts,
            self.meanings.log_over_ranks,
            self.meanings.pools_loaders,
            strategy.alike,
        )

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The strategy's consensus; within another it is there already."""
        self._consensus += 1
        try:
            if self._consensus > 1:
                yield
            else:
                with self.strategy.consensus():
                    yield
        finally:
            self._consensus -= 1

    def full_weights(self) -> dict[str, torch.Tensor]:
        """The model's whole weights by name, as they are validated and saved, however the strategy holds them. Every
        training rank calls it at the same point; complete on the first rank. In a script whose workers have ended they
        are those of the module that it was given back."""
        if self.handed_over:
            return {name: tensor.detach() for name, tensor in self.lightning_module.state_dict().items()}
        with torch.inference_mode(False), torch.no_grad(), self.consensus():
            held = self.strategy.state_dict([])["module"]
            return {name: _whole(tensor.detach()) for name, tensor in held.items()}

    def remember_modes(self) -> None:
        self._modes = {name: child.training for name, child in self.lightning_module.named_modules()}

    def restore_modes(self) -> None:
        """Every sub-module back in the mode (train or eval) it had before the evaluation."""
        for name, child in self.lightning_module.named_modules():
            child.training = self._modes.get(name, child.training)

    def restore_random_state(self) -> None:
        """Set the random generators of a resumed run, once."""
        state, self.random_state = self.random_state, None
        if state is not None:
            rng.restore(state)

    def interrupt(self, signum: int) -> NoReturn:
        """Save where training stands, between two steps and on all ranks, and leave."""
        saver = next((c for c in self.callbacks if c.saves_checkpoints and hasattr(c, "save_now")), None)
        if saver is not None and self.global_step > 0:
            saver.save_now(self)
        raise Interrupted(signum)

    def run_summary(self) -> dict[str, Any]:
        """What the run record holds of this run, as plain data.

        Raises:
            MisuseError: the workers have ended, who knew what was sent and how long that took.
        """
        if self.handed_over:
            raise MisuseError(
                "run_summary() is called where the run's workers have ended: call it in a callback's on_train_end, or"
                " read the run folder's run.json."
            )
        return run_summary(self)

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: the configuration travels, a run of this process does not."""
        fresh = dict(self.__dict__)
        if self.loop is not None:
            fresh["_adopted"] = self.loop.counters()
        for name in ("hooks", "metrics", "loop", "predict_loop", "train_source", "validation", "evaluation"):
            fresh[name] = None
        fresh["request"] = fresh["to_device"] = fresh["left_state"] = None
        fresh["_lr_scheduler_configs"], fresh["_given"], fresh["_read_elsewhere"] = [], {}, {}
        fresh["predict_sources"], fresh["test_sources"] = [], []
        return fresh


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor``, put together where ranks hold parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
