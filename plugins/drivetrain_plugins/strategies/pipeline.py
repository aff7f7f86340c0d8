"""Pipeline parallelism: each rank trains consecutive blocks of one network, on torch.distributed.pipelining.

Every rank reads the whole batch and cuts it into the same pieces. On the first rank the module's step is run up to the
network, to learn what the network is given; on the last rank it is run with what came out of the pipeline, and its loss
is where backward starts. So losses, logged values and predictions come from the last rank; the loops bring them to all.
An evaluation's step ends on all ranks where the project looks at more of it than that.
Between steps a rank's parameters of other stages are stale; they are brought up to date where they are saved and when
training ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.comm.communicator import Communicator
from drivetrain.comm.synchronize import broadcast_tensors
from drivetrain.declaration import Plan
from drivetrain.errors import ConfigurationError, TrainingError
from drivetrain.in_parts import InParts
from drivetrain.launch import Job
from drivetrain.module import TrainModule
from drivetrain.named_optimizer import named_state, parameter_names
from drivetrain.sharding import batch_size, take
from drivetrain.strategy import Run, Shard, SkipStep, Step, Strategy
from drivetrain_plugins.strategies.first_step import FirstStep
from drivetrain_plugins.strategies.gradient_hooks import hooks_of_the_project, tell_which_gradients
from drivetrain_plugins.strategies.kept_on_module import KeptOnModule
from drivetrain_plugins.strategies.own_parts import refuse_different, refuse_own_parts
from drivetrain_plugins.strategies.pipeline_answers import Answers
from drivetrain_plugins.strategies.pipeline_calls import least_calls
from drivetrain_plugins.strategies.pipeline_capture import Call, Capture, called_again, name_of
from drivetrain_plugins.strategies.pipeline_cut import cut, find_network
from drivetrain_plugins.strategies.pipeline_random import stream
from drivetrain_plugins.strategies.pipeline_schedule import Schedules, runs
from drivetrain_plugins.strategies.slopes import watched
from drivetrain_plugins.strategies.spread import gather_states
from drivetrain_plugins.strategies.stale_reads import StaleReads

# Hooks that are called seldom, in which projects save weights, measure or average them.
_AT_REST = (
    *("on_train_epoch_end", "on_train_end"),
    *(f"on_validation_{when}" for when in ("start", "epoch_start", "epoch_end", "end")),
)
STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class Pipeline(Strategy):
    """Exact: micro-batches of any size, weights by samples, tied weights summed over the stages that share them.

    A layer that looks across samples (BatchNorm) sees those of a piece. ``training_step`` is called with each piece: on
    the first rank as far as what goes into the network, on the last for the loss of what comes out.
    """

    def connect(self, job: Job) -> None:
        super().connect(job)
        self.data = Shard(lockstep=True)
        self.line = self.communicator  # the ranks that one batch flows through
        self.lines = [range(self.communicator.world_size)]  # those of every pipeline
        # Numbers that the hosts read at every step go round the devices, which then need not be waited for.
        self.hosts = self.communicator
        if self.communicator.device.type != "cpu":
            self.hosts = Communicator(dist.new_group(None, self.communicator.timeout, "gloo"), "cpu", "pipeline hosts")
        self.predicts = self.line.rank == self.line.world_size - 1
        self.alike = self.lines

    # -- cutting ------------------------------------------------------------------------------------------------
    @property
    def _each(self) -> int:
        """Stages on each rank."""
        return self.options.virtual_stages if self.options.schedule == "interleaved_1f1b" else 1

    def check_module(self, module: TrainModule, plan: Plan) -> None:
        if not any(True for _ in module.parameters()):  # configure_model makes the network
            return
        path, network = find_network(module, self.options.network)
        cut(path, network, self._each * plan.world_size)
        for stage in plan.stages:
            if least_calls(module, STEPS[stage], network) > 1:
                raise called_again(module, name_of(path))

    def prepare(self, module: TrainModule, stage: str) -> None:
        self.module = module
        if stage == "fit" and module.overrides_backward:
            raise ConfigurationError(
                f"{type(module).__name__} overrides backward, which a pipeline runs in pieces of its own: remove it or"
                " use strategy=ddp."
            )
        self._trains = stage == "fit"
        if stage == "fit":
            tell_which_gradients(module, f"strategy={self.name}", "the gradients of this rank's stages only")
        shown = f"on_{'validation' if stage in ('fit', 'validate') else stage}_batch_end"
        have = [bool(hooks_of_the_project(module, hooks)) for hooks in (("on_train_batch_end",), _AT_REST, (shown,))]
        # A callback may be one rank's only, and all of them bring together what it is shown.
        known = [any(one) for one in zip(*self.communicator.all_gather_plain(have), strict=True)]
        self._shows_loss, self._looked_at = (self._trains and one for one in known[:2])
        self.precision.convert_module(module)
        path, network = find_network(module, self.options.network)
        each, ranks = self._each, self.line.world_size
        stages = cut(path, network, each * ranks, self.precision.forward_context)
        self.mine = [self.line.rank + i * ranks for i in range(each)]
        self._place(stages)
        self.capture = Capture(module, path, network)
        self.answers = Answers(self.line, self.device, shown=known[2])
        assert self.line.group is not None
        self.schedules = Schedules(stages, self.mine, self.options, self.line.group, self.device)
        self.logs = self.schedules.last
        self._own(stages)
        self.align()

    def _place(self, stages: list[Any]) -> None:
        """This rank's stages, and what lies outside of the network, go to the device; other stages stay on the host."""
        cut_up = {id(child) for stage in stages for block in stage.blocks for child in block.modules()}

        def place(part: nn.Module) -> None:
            if id(part) in cut_up:
                return
            if cut_up.isdisjoint(id(child) for child in part.modules()):
                part.to(self.device)
                return
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = buffer.to(self.device)
            for child in part.children():
                place(child)

        place(self.module)
        for index in self.mine:
            stages[index].to(self.device)

    def _own(self, stages: list[Any]) -> None:
        """Who holds which parameter and buffer; parameters that stages of several ranks share are tied."""
        ranks = self.line.world_size
        names = parameter_names(self.module)
        holders: dict[str, list[int]] = {}
        buffers: dict[int, int] = {}
        for index, stage in enumerate(stages):
            for parameter in stage.parameters():
                known = holders.setdefault(names[id(parameter)], [])
                if index % ranks not in known:
                    known.append(index % ranks)
            buffers |= {id(b): index % ranks for b in stage.buffers()}
        self.holders = {name: sorted(known) for name, known in holders.items()}
        self.parameters = {name: p for name, p in self.module.named_parameters() if name in self.holders}
        self.held = {id(self.parameters[n]) for n, known in self.holders.items() if self.line.rank in known}
        self.counted = {id(self.parameters[n]) for n, known in self.holders.items() if self.line.rank == known[0]}
        self.elsewhere = {name: p for name, p in self.parameters.items() if id(p) not in self.held}
        self._reads = {}
        if self._trains:
            trained = {name: p for name, p in self.elsewhere.items() if p.requires_grad}
            self._reads = {kind: StaleReads(trained) for kind in ("training", "evaluation")}
        self.ties: list[tuple[Tensor, Communicator]] = []
        groups = sorted({tuple(known) for known in self.holders.values() if len(known) > 1})
        for members in groups:
            # Every rank of the job takes part in making every pipeline's group.
            made = [self.communicator.sub([line[m] for m in members], f"tied {members}") for line in self.lines]
            for group in (one for one in made if one is not None):
                tied = [self.parameters[n] for n, known in self.holders.items() if tuple(known) == members]
                self.ties += [(p, group) for p in tied if p.requires_grad]
        self.sources: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        for name, parameter in self.parameters.items():
            self.sources[self.holders[name][0]][name] = parameter
        for name, buffer in self.module.named_buffers():
            self.sources[buffers.get(id(buffer), ranks - 1)][name] = buffer

    def align(self) -> None:
        """All begin with the weights of who holds them: ranks of a job that was started elsewhere may have built their
        modules from different seeds, and two of them may hold one tied weight."""
        self.spread()

    def build_optimizers(self, make: Callable[[], list[Optimizer]]) -> list[Optimizer]:
        optimizers = make()
        names = parameter_names(self.module)
        self.group_names: list[list[list[str]]] = []
        for optimizer in optimizers:
            if self.line.world_size > 1:
                refuse_own_parts(optimizer, "strategy=pipeline")
            listed = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
            self.group_names.append(listed)
            for group in optimizer.param_groups:
                others = [p for p in group["params"] if id(p) not in self.held]
                group["params"] = [p for p in group["params"] if id(p) in self.held]
                for parameter in others:  # some have states from their beginning
                    optimizer.state.pop(parameter, None)
        self._first = FirstStep(self.line, f"strategy={self.name}", lambda _: names, of_all=False)
        return optimizers

    # -- a step -------------------------------------------------------------------------------------------------
    def forward_backward(self, step: Step) -> Tensor | None:
        if step.first:
            self.weight, self.contributed = 0.0, False
        step.zero_grad()
        total, share = batch_size(step.batch) or 1, step.share
        losses: list[Tensor] = []
        weights: list[float] = []

        def loss_of(output: Tensor, piece: Any, fraction: float) -> Tensor:
            kept = KeptOnModule(self.module) if "training" in self._reads and not losses else None
            slopes = watched(self._is_elsewhere, "other ranks of a pipeline hold")
            with self.precision.forward_context(), self._watched("training"), slopes:
                loss = self.capture.answer(lambda b: step.call(b, fraction), piece, output)
            if kept is not None and self.line.world_size > 1:
                self._tell_of_kept(kept.changed(draws=False))
            if loss is None:  # this piece is skipped; the other stages wait for gradients all the same
                return output.sum() * 0.0
            weight = step.share if step.weighted else share * fraction
            step.before_backward(loss)
            losses.append(loss.detach())
            weights.append(weight)
            return loss * weight

        trainer = self.module.trainer
        for parameter in self.elsewhere.values():
            parameter.grad = None  # a hook may have given it one
        self._flow(step.batch, total, ("fit", trainer.current_epoch, step.index), step.call, loss_of)
        self._refuse_stale()
        self._tell_of_reads("training")
        step.after_backward()
        if not losses:
            loss = None
        elif len(losses) == 1:
            loss = losses[0]
        else:
            loss = torch.stack([one * weight for one, weight in zip(losses, weights, strict=True)]).sum() / sum(weights)
            step.whole = loss  # the step's output is that of the last piece
        if self._shows_loss:
            self._show_loss(step, losses, weights)
        if loss is None:
            return None
        self.contributed = True
        if step.weighted:
            step.share = sum(weights)
            self.weight += step.share
        return loss

    _shows_loss = False  # whether a hook of the project's own is given what steps return

    def _show_loss(self, step: Step, losses: list[Tensor], weights: list[float]) -> None:
        """Tell every rank of the line the loss of the whole batch, which the last rank has, in pieces."""
        known = torch.zeros(2, dtype=torch.float64, device=self.line.device)
        for loss, weight in zip(losses, weights, strict=True):
            known += torch.stack([loss.double() * weight, loss.new_tensor(weight, dtype=torch.float64)]).to(known)
        total, weight = self.line.all_reduce(known)
        if weight > 0:
            double = any(p.dtype == torch.float64 for p in self.parameters.values())
            step.whole = (total / weight).to(self.device, torch.float64 if double else torch.float32)

    def _is_elsewhere(self, one: Any) -> bool:
        return any(one is parameter for parameter in self.elsewhere.values())

    def _watched(self, kind: str) -> AbstractContextManager[Any]:
        """Around what the user's step does in its first batch of a fit, of training or of evaluation."""
        return self._reads.get(kind) or nullcontext()

    def _tell_of_reads(self, kind: str) -> None:
        """Warn where it computed with weights of which this rank has an old copy. Later steps do as the first did."""
        reads = self._reads.pop(kind, None)
        if reads is not None and reads.found:
            names = [*reads.found]
            warnings.warn(
                f"a step of {type(self.module).__name__} computes with weights beside the network's output"
                f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}), which other ranks of a pipeline train:"
                " here they are as they were when they were last saved. Leave it out, or use strategy=ddp.",
                stacklevel=2,
            )

    def _tell_of_kept(self, names: list[str]) -> None:
        if names:
            warnings.warn(
                f"{type(self.module).__name__}.training_step keeps what it computes on the module ({', '.join(names)}):"
                " under a pipeline that is there on the last rank only, and of pieces of each batch. Log it, or use"
                " what on_train_batch_end is given, or strategy=ddp.",
                stacklevel=2,
            )

    def _refuse_stale(self) -> None:
        """Refuse a loss that has a gradient for parameters whose stages other ranks hold: this rank's copies are of an
        earlier step, and the gradient would be lost."""
        given = {name: p.grad for name, p in self.elsewhere.items() if p.grad is not None}
        stale = [name for name, gradient in given.items() if gradient.any()]  # 0.0 * weights.sum() does no harm
        if stale:
            raise TrainingError(
                f"{type(self.module).__name__}.training_step computes its loss with parameters beside the network's"
                f" output ({', '.join(stale[:3])}{', ...' if len(stale) > 3 else ''}), which other ranks of a pipeline"
                " hold and train: let the optimizer do it (weight_decay), or use strategy=ddp."
            )

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        self._stepped = True
        return self._first.step(optimizer, lambda: super(Pipeline, self)._step(optimizer, closure))

    def _flow(
        self,
        batch: Any,
        total: int,
        key: tuple[int | str, ...],
        call: Callable[[Any], Any],
        loss_of: Callable[[Tensor, Any, float], Tensor] | None,
    ) -> list[Any]:
        """Run a batch through the pipeline. ``key`` names it for the random streams. Gives the outputs on the last
        rank where nothing is trained; else ``loss_of(output, piece, its fraction of the samples)`` is called there."""
        key = (self.module.trainer.data_seed, self.data.rank, *key)
        outputs, start = [], 0
        for pieces, size in runs(total, self.options.microbatches):
            rows = slice(start, start + pieces * size)

            def record(piece: Any, number: int, start: int = start) -> Call:
                watched = self._watched("evaluation" if loss_of is None else "training")
                with self.precision.forward_context(), stream(self.device, *key, "step", start, number), watched:
                    counts = self.schedules.first and (loss_of is not None or self.answers.everywhere is False)
                    return self.capture.record(call, piece, counts)

            def loss(output: Tensor, number: int, start: int = start, size: int = size) -> Tensor:
                piece = take(batch, total, slice(start + number * size, start + (number + 1) * size))
                assert loss_of is not None
                with stream(self.device, *key, "step", start, number):
                    return loss_of(output, piece, size / total)

            with stream(self.device, *key, "stage", start, self.line.rank):
                outputs.append(
                    self.schedules.run(batch, rows, pieces, record, None if loss_of is None else loss, total)
                )
            start = rows.stop
        return outputs

    def reduce_gradients(self, optimizer: Optimizer, manual: bool) -> None:
        for parameter, group in self.ties:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group.all_reduce(parameter.grad)

    def normalise(self, optimizer: Optimizer) -> None:
        """A last rank knows what its window weighed and whether it had any loss; the others add nothing."""
        known = torch.tensor([self.weight, float(self.contributed)], dtype=torch.float64)
        weight, contributed = self.hosts.all_reduce(known).tolist()
        if not contributed:
            raise SkipStep
        if weight:
            self.scale_gradients(optimizer, 1.0 / weight)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        if algorithm == "value":
            return super().clip_gradients(optimizer, value, algorithm)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None and id(p) in self.counted]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1, device=self.device)
        square = norms.to(torch.float64).square().sum()
        norm = self.line.all_reduce(square.to(self.line.device)).sqrt().to(self.device)
        if value != float("inf"):
            self.scale_gradients(optimizer, torch.clamp(value / (norm + 1e-6), max=1.0))
        return norm

    # -- evaluation and state -----------------------------------------------------------------------------------
    def evaluation_step(self, call: Callable[[Any], Any], batch: Any) -> Any:
        self._evaluated += 1
        read = self.module.trainer.metrics.batch
        if read is not None and read.index == 0:
            self.answers.begin()
        outputs = self._flow(batch, batch_size(batch) or 1, ("evaluation", self._evaluated), call, None)

        def finish(output: Tensor) -> Any:
            place = stream(self.device, self.data.rank, "evaluation", self._evaluated)
            with self.precision.forward_context(), place, self._watched("evaluation"):
                return self.capture.answer(call, batch, output, logs=self.schedules.last)

        answer = self.answers.of(torch.cat(outputs) if self.schedules.last else None, self.module, finish)
        self._tell_of_reads("evaluation")
        return answer

    _trains = False  # whether weights change between steps
    _evaluated = 0  # batches so far, which name their random streams

    def own_state(self) -> dict[str, Any]:
        return {"evaluated": self._evaluated}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._evaluated = state.get("evaluated", 0)

    def state_dict(self, optimizers: list[Optimizer]) -> dict[str, Any]:
        self.spread()
        states = []
        for optimizer, listed in zip(optimizers, self.group_names if optimizers else [], strict=True):
            refuse_different(self.line, optimizer, "strategy=pipeline")
            names = parameter_names(self.module)
            for group in optimizer.param_groups[len(listed) :]:  # it was given while training
                listed.append([names.get(id(p), "?") for p in group["params"]])
                group["params"] = [p for p in group["params"] if id(p) in self.held]
            named = named_state(self.module, optimizer)
            groups = [{**g, "params": names} for g, names in zip(named["param_groups"], listed, strict=True)]
            states.append({**named, "state": gather_states(self.line, named["state"]), "param_groups": groups})
        return {"module": self.module.state_dict(), "optimizers": states, "precision": self.precision.state_dict()}

    _looked_at = False  # whether a hook of the project's own is called where an epoch ends or is validated
    _stepped = False  # whether weights changed since they were brought up to date

    def run_epoch(self, run: Run, source: Iterable[Any]) -> None:
        super().run_epoch(run, source)
        self._refresh()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._refresh()
        yield

    def _refresh(self) -> None:
        """Whoever saves or looks at weights in a hook, between many steps, finds those of now."""
        if self._looked_at and self._stepped:
            with torch.inference_mode(False), torch.no_grad():
                self.spread()

    def spread(self) -> None:
        """Bring every rank's copy of every stage up to date."""
        for rank, tensors in enumerate(self.sources):
            broadcast_tensors(self.line, tensors, rank)
        self._stepped = False

    def close(self, error: BaseException | None = None) -> None:
        if self._trains and self._stepped and self.hangs_up(error):
            InParts(self.module, type(self.module), self, self._from_holders, lambda: None)
        super().close(error)

    def _from_holders(self, ranks: Communicator) -> None:
        """Bring every copy up to date in a later job, whose ranks are those of the one that failed."""
        for holder, tensors in zip(self.lines[0], self.sources, strict=True):
            broadcast_tensors(ranks, tensors, holder)

    def traffic(self) -> dict[str, int]:
        """Activations and their gradients as this rank sent them while training."""
        sent = self.schedules.bytes_sent
        return {"bytes_sent": sent, "bytes_dense": sent, "messages": self.schedules.messages}

    def finish(self) -> None:
        self.spread()
