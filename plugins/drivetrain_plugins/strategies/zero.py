"""ZeRO on DeepSpeed: the engine reduces, clips and steps when our loop says so; states are saved whole and by name.

What differs from a replica: gradients live within the engine, so ``on_before_optimizer_step`` finds none on the
parameters from stage 2 on, and this rank's own before. Every backward pass is one of all ranks in stages 2 and 3: a
rank that skips a batch by itself (``training_step`` returning None) brings zeros in stage 2, and cannot in stage 3. In
the stages before, where gradients are reduced when the engine steps, it does so at the end of a window of which it has
no loss at all.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.declaration import Plan
from drivetrain.errors import CheckpointError, ConfigurationError, TrainingError
from drivetrain.launch import Job
from drivetrain.module import TrainModule
from drivetrain.named_optimizer import load_named_state, named_state, parameter_names
from drivetrain.optimizer import ELEMENTWISE, is_torchs
from drivetrain.precision import Precision
from drivetrain.strategy import Shard, SkipStep, Strategy
from drivetrain_plugins.strategies.averaging import has_mean
from drivetrain_plugins.strategies.complex_numbers import refuse_complex
from drivetrain_plugins.strategies.empty_reads import WAY_OUT as _GATHER
from drivetrain_plugins.strategies.empty_reads import EmptyReads
from drivetrain_plugins.strategies.first_step import FirstStep
from drivetrain_plugins.strategies.going_along import zero_loss
from drivetrain_plugins.strategies.gradient_hooks import tell_of_empty_weights, tell_which_gradients
from drivetrain_plugins.strategies.loss_on_all import LossOnAll, WindowOnAll
from drivetrain_plugins.strategies.new_groups import refuse_new_groups
from drivetrain_plugins.strategies.own_parts import refuse_different, refuse_own_parts
from drivetrain_plugins.strategies.plain_parameters import refuse_uncuttable
from drivetrain_plugins.strategies.reached import Reached
from drivetrain_plugins.strategies.sparse import refuse_sparse
from drivetrain_plugins.strategies.zero_engine import Guest, build, full_parameters
from drivetrain_plugins.strategies.zero_state import Fragments, Slices, Whole, trained


class _Model(nn.Module):
    """What DeepSpeed is given: it runs the module's step with the module's parameters registered.

    The precision is entered in here, since DeepSpeed turns off whatever autocast its engine is called under.
    """

    def __init__(self, module: TrainModule, precision: Precision, reads: EmptyReads | None) -> None:
        super().__init__()
        self.module = module
        self._precision, self._reads = precision, reads

    def forward(self, call: Callable[[Any], Any], batch: Any) -> Any:
        with self._precision.forward_context(), self._reads.at_hand if self._reads is not None else nullcontext():
            return call(batch)


class Zero(Strategy):
    """Exact data parallelism in fp32, with less memory the higher the stage."""

    _guest: Guest | None = None
    _engine: Any = None
    _whole: Whole | None = None
    _fragments: Fragments | None = None
    _slices: Slices | None = None
    _reached: Reached | None = None
    _reads: EmptyReads | None = None
    _losses: LossOnAll | None = None  # where a pass reduces gradients
    _windows: WindowOnAll | None = None  # where a step does
    _model: Any = None

    @property
    def _stage(self) -> int:
        """A lone worker's part of the parameters is all of them: the third stage would be the second with more work."""
        return min(self.options.stage, 2) if self.job.world_size == 1 else self.options.stage

    @property
    def _sharded(self) -> bool:
        return self._stage == 3

    def check_module(self, module: TrainModule, plan: Plan) -> None:
        if "fit" in plan.stages:
            refuse_complex(module, "strategy=zero")
        if self.options.stage and "fit" in plan.stages:
            refuse_sparse(module, f"strategy=zero with stage={self.options.stage}")
        if self.options.stage == 3 and plan.world_size > 1 and "fit" in plan.stages:
            self._refuse_for_slices(module)

    @staticmethod
    def _refuse_for_slices(module: TrainModule) -> None:
        refuse_uncuttable(module.named_parameters(), "strategy=zero with stage=3")
        dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds, and who compiled has it
        compiled = (name for name, one in module.named_modules() if dynamo and isinstance(one, dynamo.OptimizedModule))
        for name in compiled:
            raise ConfigurationError(
                f"{name} is what torch.compile made of a module, whose weights strategy=zero with stage=3 does not find"
                f" there: compile it in place ({name}.compile()), or use strategy.stage=2."
            )

    def connect(self, job: Job) -> None:
        super().connect(job)
        if self.options.stage < 3:  # parameters are whole: an error of a module's does not come of how they are held
            self.support = replace(self.support, explains={})
        self._set_data(sharded=False)

    def _invite(self) -> None:
        if self._guest is None:
            self._guest = Guest(self.job, self.device)
            self._deepspeed = self._guest.deepspeed

    def _see_off(self, failed: bool) -> None:
        if self._guest is not None:
            self._guest.leave(failed)
            self._guest = None

    def _set_data(self, sharded: bool) -> None:
        self.data = Shard(self.communicator.rank, self.communicator.world_size, lockstep=sharded)

    def prepare(self, module: TrainModule, stage: str) -> None:
        self._invite()
        self._release()
        super().prepare(module, stage)
        self._average_buffers = stage == "fit" and self.data.size > 1
        self._set_data(sharded=stage == "fit" and self._sharded)
        if stage == "fit" and module.overrides_backward:
            raise ConfigurationError(
                f"{type(module).__name__} overrides backward, which DeepSpeed runs itself: remove it or use"
                " strategy=ddp."
            )
        if stage == "fit" and self._sharded:  # configure_model may have made them
            self._refuse_for_slices(module)
        if self._average_buffers:
            for buffer in module.buffers():
                self.communicator.broadcast(buffer.detach())

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        optimizers, module = make(), self.module
        if module.trainer.nonfinite == "skip":
            raise ConfigurationError(
                "strategy=zero does not know a gradient's norm before it steps, so it cannot skip one: set"
                " trainer.nonfinite=raise or use strategy=ddp."
            )
        if not optimizers:
            raise ConfigurationError(
                f"{type(module).__name__} configures no optimizer and strategy=zero shares out an optimizer's states:"
                " configure one or use strategy=ddp."
            )
        if self._stage:
            refuse_own_parts(optimizers[0], f"strategy=zero with stage={self.options.stage}")
            self._refuse_shapes(optimizers[0])
        where = f"strategy=zero with stage={self.options.stage}"
        if self._stage >= 2 or self.data.size > 1:
            found = "no gradients" if self._stage >= 2 else "this rank's own gradients, and not their average,"
            tell_which_gradients(module, where, found)
        if self._sharded:
            tell_of_empty_weights(module, where, _GATHER)
        names = parameter_names(module)
        self._group_names = [[names.get(id(p), "?") for p in g["params"]] for g in optimizers[0].param_groups]
        self._reads = EmptyReads(module, self.communicator.is_master) if self._sharded else None
        model = _Model(module, self.precision, self._reads)
        if self._sharded:
            for parameter in module.parameters(recurse=False):  # no sub-module's forward would gather these
                self._deepspeed.zero.register_external_parameter(model, parameter)
        self._first = FirstStep(self.communicator, "strategy=zero", _flat, of_all=True)
        self._own = {parameter: set(vars(parameter)) for parameter in module.parameters()}
        compute = self.precision.compute_dtype if self.options.narrow_gather else None
        begun = named_state(module, optimizers[0])["state"]
        self._engine = build(self._deepspeed, model, optimizers[0], self._stage, self.options, compute)
        self._model, self._optimizer = model, optimizers[0]
        self.holds_part = self._sharded
        if self._stage:
            layout: Fragments | Slices
            if self._sharded:
                layout = self._slices = Slices(self._engine, self.communicator.rank)
            else:
                layout = self._fragments = Fragments(self._engine)
            optimized = {name for group in self._group_names for name in group}
            parameters = {n: p for n, p in trained(module.named_parameters()).items() if n in optimized}
            self._whole = Whole(layout, self._optimizer, parameters, self.communicator)
            self._reached = Reached(parameters)
            if begun:
                self._begin_with(begun)
        if self.data.size > 1:
            if self._stage >= 2:
                self._losses = LossOnAll(self.job)
            else:
                self._windows = WindowOnAll(self.job)
        return optimizers

    def _begin_with(self, states: dict[str, dict[str, Any]]) -> None:
        """Of an optimizer that has states from its beginning (Adagrad)."""
        assert self._whole is not None
        for parameter in self.module.parameters():
            self._optimizer.state.pop(parameter, None)
        self._whole.load_states(states)

    def _refuse_shapes(self, optimizer: Optimizer) -> None:
        if is_torchs(optimizer) and type(optimizer) not in ELEMENTWISE:
            raise ConfigurationError(
                f"{type(optimizer).__name__} makes of a parameter's rows and columns what it steps by, and"
                f" strategy=zero with stage={self.options.stage} gives it parts of flat tensors: use strategy=ddp."
            )

    # -- a step -------------------------------------------------------------------------------------------------
    def forward(self, call: Callable[[Any], Any], batch: Any) -> Any:
        if self._engine is None:
            return super().forward(call, batch)
        return self._engine(call, batch)

    def forward_backward(self, step: Any) -> Tensor | None:
        if step.first and self._dirty:  # an epoch ended within a window, whose gradients are not wanted
            self._clear()
        if self._losses is not None:
            self._losses.step()
        with self._reads.watching("training") if self._reads is not None else nullcontext():
            loss = super().forward_backward(step)
        if loss is None and self._losses is not None:
            self._without_loss(self._losses)
        return loss

    def _without_loss(self, losses: LossOnAll) -> None:
        """Bring zeros to the others' backward pass, in the order of this rank's last one: gradients are reduced as they
        come, whatever their names."""
        if self._sharded or not self._order:
            losses.none(_WAY_OUT)
            return
        order, self._dirty = self._order, True
        named = dict(self.module.named_parameters())
        loss = zero_loss((named[name] for name in order), self.device)
        losses.backward()
        self._backward_pass(loss)
        found = losses.went_along(_told(order), (), _WAY_OUT)
        self.contributed, self.weighted = self.contributed or found[0], self.weighted or found[1]

    _order: Sequence[str] = ()  # in which parameters got their gradients in the last pass from a loss

    _dirty = False

    def _clear(self) -> None:
        self._engine.optimizer.zero_grad()
        self._model.zero_grad()
        self._dirty = False

    def backward(self, loss: Tensor, share: float, sync: bool, *, weighted: bool = False, **options: Any) -> None:
        factor = share * self.data.size  # the engine averages over ranks
        self._dirty = True
        if self._losses is not None:
            self._losses.backward()
        self._backward_pass(loss if factor == 1.0 else loss * factor, **options)
        if self._losses is not None and self._reached is not None:
            self._order = self._reached.names
            self._losses.over(weighted, _told(self._order))

    def _backward_pass(self, loss: Tensor, **options: Any) -> None:
        try:
            with self._reached.required(loss, self.job.rank) if self._reached is not None else nullcontext():
                self._engine.backward(loss, scale_wrt_gas=False, **options)
        except RuntimeError as error:
            if not self._sharded or "got [0] but expected shape" not in str(error):
                raise
            raise TrainingError(
                "a loss is computed of parameters beside their layers' own forward pass, where they are empty under"
                " strategy=zero with stage=3: let the optimizer see to a penalty on weights (weight_decay), or use"
                " strategy.stage=2."
            ) from error

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, before_step: Callable[[], None]
    ) -> bool:
        refuse_new_groups(self._optimizer, len(self._group_names), "zero")
        if closure is not None:
            closure()
        self._set_clip(0.0)
        try:
            weight = self._window_weight()
            before_step()
        except SkipStep:
            return False
        if weight:
            self._divide(weight)
        stepped = self._first.step(self._optimizer, self._engine_step) if self._stage else self._engine_step()
        if weight and self._stage:
            self._engine.optimizer.override_loss_scale(1.0)
        return stepped

    def _engine_step(self) -> bool:
        if self._fragments is not None:
            self._fragments.take_up(self.communicator.rank)
        if self._slices is not None:
            self._slices.empty(self._optimizer)
        self._engine.step()
        if self._slices is not None:
            self._slices.fill(self._optimizer)
        self._dirty = False
        return bool(self._engine.was_step_applied())

    def _window_weight(self) -> float:
        """The window's total weight where the module weights its losses, else 0."""
        if self._windows is not None:
            had, self.weighted = self._windows.over(self.contributed, self.weighted)
            if not had:
                raise SkipStep
            if not self.contributed:
                self.contributed, self._dirty = True, True
                self._backward_pass(zero_loss(trained(self.module.named_parameters()).values(), self.device))
        if self.contributed and not self.weighted:
            return 0.0
        known = torch.tensor([self.weight, float(self.contributed)], dtype=torch.float64)
        weight, contributed = self.communicator.all_reduce(known.to(self.communicator.device)).tolist()
        if not contributed:
            raise SkipStep
        return weight

    def _divide(self, weight: float) -> None:
        """Divide the gradients, which the engine still has to reduce, by ``weight``."""
        if self._stage:
            self._engine.optimizer.override_loss_scale(weight)  # undone before it clips and steps
        else:
            torch._foreach_mul_([p.grad for p in self._model.parameters() if p.grad is not None], 1.0 / weight)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """The engine clips when it steps."""
        self._set_clip(value)

    def _set_clip(self, value: float) -> None:
        if self._stage:
            self._engine.optimizer.clip_grad = value
        else:
            self._engine._config.gradient_clipping = value

    # -- evaluation and state -----------------------------------------------------------------------------------
    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        if self._engine is None or self._reads is None:
            return super().forward(call, batch)
        # Parameters are gathered on the way, which needs ordinary tensors.
        with torch.inference_mode(False), torch.no_grad(), self._reads.watching("evaluation"):
            return self._model(call, batch)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Each rank saw other batches, so running statistics (BatchNorm) differ: their mean is evaluated and saved."""
        if self._average_buffers:
            for buffer in self.module.buffers():
                if has_mean(buffer):
                    self.communicator.all_reduce(buffer.detach(), "average")
        yield

    _average_buffers = False

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        if self._engine is None:  # the states of several ranks went with it
            return super().state_dict(optimizers if self.job.world_size == 1 else [])
        module = self._weights()
        states = []
        if optimizers and self._whole is None:
            states = [named_state(self.module, self._optimizer)]
        elif optimizers:
            groups = zip(self._optimizer.param_groups, self._group_names, strict=True)
            named = {
                "state": self._whole.states() if self._whole else {},
                "param_groups": [{**group, "params": names} for group, names in groups],
            }
            refuse_different(self.communicator, self._optimizer, "strategy=zero")
            beside = self._beside()
            states = [named | ({"beside": beside} if beside else {})]
        return {"module": module, "optimizers": states, "precision": self.precision.state_dict()}

    def _beside(self) -> dict[Any, Any]:
        """What the optimizer's state holds under keys of its own."""
        return {key: value for key, value in self._optimizer.state.items() if not isinstance(key, Tensor)}

    def _destroy(self) -> None:
        """End the engine, which looks for tensors in all that the optimizer's state holds and takes it for parameters'
        states: what is none is put aside."""
        beside = self._beside()
        for key in beside:
            del self._optimizer.state[key]
        self._engine.destroy()
        # It would do so again when it is collected, whenever that is: a later engine of the same parameters would lose
        # what it knows of where they lie.
        self._engine.destroy = _nothing
        self._optimizer.state.update(beside)

    def _weights(self) -> dict[str, Any]:
        """The module's whole state; in stage 3 a copy, as the module has slices only."""
        if not self._sharded:
            return self.module.state_dict()
        with self._gathered():
            return {name: t.detach().clone() for name, t in self.module.state_dict().items()}

    @contextmanager
    def _gathered(self, modifier: int | None = None) -> Iterator[None]:
        parameters = list(self.module.parameters())
        with self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier):
            yield

    def load_state_dict(self, state: dict[str, Any], optimizers: list[Optimizer], strict: bool = True) -> None:
        if self._engine is None:
            super().load_state_dict(state, optimizers, strict)
            return
        with self._gathered(0) if self._sharded else nullcontext():
            try:
                self.module.load_state_dict(state["module"], strict=strict)
            except RuntimeError as error:
                raise CheckpointError(
                    f"the checkpoint does not fit {type(self.module).__name__} ({str(error).splitlines()[-1].strip()}):"
                    " build the module as it was saved."
                ) from error
        saved = state.get("optimizers", [])
        if self._whole is None:
            for optimizer, one in zip(optimizers, saved, strict=False):
                load_named_state(self.module, optimizer, one)
        else:
            self._whole.set_master(state["module"])
            for one in saved[:1]:
                self._load_groups(one["param_groups"])
                self._whole.load_states(one["state"])
                self._optimizer.state.update(one.get("beside", {}))
        if "precision" in state:
            self.precision.load_state_dict(state["precision"])

    def _load_groups(self, saved: list[dict[str, Any]]) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(saved):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(groups)}: configure"
                " the same groups or load the weights only."
            )
        for group, one in zip(groups, saved, strict=True):
            group.update({key: value for key, value in one.items() if key != "params"})

    def own_state(self) -> dict[str, Any]:
        """In which order a pass comes to the parameters, by which this rank goes along without a loss."""
        return {"order": list(self._order)} if self._order else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        if "order" not in state or self._reached is None:
            return
        order, names = state["order"], self._reached.parameters.keys()
        fits = isinstance(order, list) and len(order) == len(names) and all(name in order for name in names)
        self._order = order if fits else ()

    def load_first_state(self, state: dict[str, Any]) -> None:
        self.load_own_state(state)  # the order is one for all ranks

    def finish(self) -> None:
        """The module is left whole; in stage 3 its slices are gathered and stay so."""
        if self._engine is not None and self._sharded:
            parameters: list[Any] = list(self.module.parameters())
            parameters[0].all_gather(parameters)

    def give_back(self, optimizers: list[Optimizer]) -> None:
        self._release()
        self._see_off(failed=False)
        super().give_back(optimizers)

    def _release(self) -> None:
        """Take the module back from an engine of a stage before; of a lone worker its optimizer, too."""
        if self._engine is None:
            return
        alone = self.job.world_size == 1 and self._whole is not None
        saved = self.state_dict([self._optimizer])["optimizers"] if alone else []
        if self._sharded:
            self.finish()
        self._destroy()
        if self._sharded:
            full_parameters(self._model)
        if self._reached is not None:
            self._reached.remove()
        for parameter, own in self._own.items():  # what was put on them holds the engine, and with it its groups
            for name in set(vars(parameter)) - own:
                delattr(parameter, name)
        self._own.clear()
        self._engine, self._whole, self._model, self._reached, self.holds_part = None, None, None, None, False
        self._reads = None
        self._losses, self._windows, self._fragments, self._slices, self._order = None, None, None, None, ()
        if saved:
            named = dict(self.module.named_parameters(remove_duplicate=False))
            for group, names in zip(self._optimizer.param_groups, self._group_names, strict=True):
                group["params"] = [named[name] for name in names]
            load_named_state(self.module, self._optimizer, saved[0])

    def close(self, error: BaseException | None = None) -> None:
        if self.job.world_size == 1:  # nobody else to wait for
            self._release()
        elif self._engine is not None and error is None:
            self._destroy()
        self._see_off(failed=error is not None)
        super().close(error)


_WAY_OUT = "use strategy.stage=1"


def _nothing() -> None:
    """What is left to do of an engine that has ended."""


def _flat(optimizer: Optimizer) -> dict[int, str]:
    """Names of what the engine has in the place of parameters: each rank has a part of everything."""
    return {id(key): f"part {index}" for index, key in enumerate(k for k in optimizer.state if isinstance(k, Tensor))}


def _told(order: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16]
