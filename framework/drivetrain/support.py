"""What goes with what: every strategy against everything that changes a step, read from the declarations.

``python -m drivetrain support`` prints the table, ``--write`` puts it into the docs, ``--train`` sees whether it is
true. No torch here.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain import registry
from drivetrain.command_line import Parser
from drivetrain.declaration import Declaration, Plan, conflicts
from drivetrain.errors import ConfigurationError, nearest

SIZES = (1, 2, 3, 4)  # worlds that are tried, to find one that a strategy takes

# What changes a step, with the changes of a Plan that each choice means; the first of each is the plain one.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {name: {"precision": name} for name in ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")},
    "compression": {name: {"compression": name} for name in ("none", "fp16", "bf16", "int8", "topk", "powersgd")},
    "clipping": {
        "none": {"clip_value": None},
        "norm": {"clip_value": 0.5, "clip_algorithm": "norm"},
        "value": {"clip_value": 0.05, "clip_algorithm": "value"},
    },
    "accumulation": {"1": {"accumulation": 1}, "2": {"accumulation": 2}},
    "optimization": {
        "automatic": {"automatic_optimization": True, "optimizers": 1},
        "manual": {"automatic_optimization": False, "optimizers": 1},
        "several": {"automatic_optimization": False, "optimizers": 2},
        "closures": {"automatic_optimization": True, "optimizers": 1, "closures": True},
    },
    "compile": {"false": {"compile": False}, "true": {"compile": True}},
}


COMPILED = ("compile", "true")
Pair = tuple[str, str, str, str]


@dataclass(frozen=True)
class Combination:
    """A strategy and one choice of each axis."""

    strategy: str
    choices: tuple[str, ...]

    def __str__(self) -> str:
        return "-".join([self.strategy, *self.choices])

    def get(self, axis: str) -> str:
        return self.choices[list(AXES).index(axis)]

    def pairs(self) -> set[Pair]:
        """Every two choices that meet in it."""
        named = [("strategy", self.strategy), *zip(AXES, self.choices, strict=True)]
        return {(*a, *b) for a, b in itertools.combinations(named, 2)}


def declarations() -> dict[str, Declaration]:
    """The registered strategies by their own names; aliases stand for the same declaration."""
    found = (registry.load("strategies", name) for name in registry.names("strategies"))
    return {declaration.name: declaration for declaration in found}


def plain_plan(declaration: Declaration, options: Mapping[str, Any] | None = None) -> Plan:
    """The simplest plan under ``declaration``: two workers where it takes them, the plainest precision it takes."""
    plan = Plan(declaration.name, declaration.options(**(options or {})), automatic_optimization=True, optimizers=1)
    sizes = sorted(SIZES, key=lambda size: (size == 1, size))
    for size, precision in itertools.product(sizes, AXES["precision"]):
        tried = replace(plan, world_size=size, precision=precision)
        if not conflicts(tried, declaration):
            return tried
    raise ValueError(f"strategy={declaration.name} takes no plain plan at {SIZES} workers")


def plan_of(combination: Combination, declaration: Declaration, options: Mapping[str, Any] | None = None) -> Plan:
    """``combination`` as a plan."""
    changes: dict[str, Any] = {}
    for axis, choice in zip(AXES, combination.choices, strict=True):
        changes |= AXES[axis][choice]
    return replace(plain_plan(declaration, options), **changes)


def combinations(declaration: Declaration) -> Iterator[tuple[Combination, Plan]]:
    """Every combination of one strategy, allowed or not."""
    plain = plain_plan(declaration)
    for choices in itertools.product(*AXES.values()):
        changes: dict[str, Any] = {}
        for axis, choice in zip(AXES, choices, strict=True):
            changes |= AXES[axis][choice]
        yield Combination(declaration.name, choices), replace(plain, **changes)


def allowed(found: Mapping[str, Declaration] | None = None) -> list[Combination]:
    """Every combination that no declaration refuses and that a module can ask for; presets of another strategy are left
    to that one."""
    result = []
    for declaration in (found or declarations()).values():
        if declaration.preset_of is not None:
            continue
        result += [one for one, plan in combinations(declaration) if not conflicts(plan, declaration)]
    return result


def covering(found: Sequence[Combination], seed: int = 0) -> list[Combination]:
    """A small part of ``found`` in which every two choices meet that meet in ``found`` at all.

    Greedy: of some combinations that hold a pair still missing, the one that holds most missing pairs. What compiles
    nothing comes first, for compiling takes longest.
    """
    draw = random.Random(seed)
    holding: dict[Pair, list[Combination]] = {}
    for one in sorted(found, key=lambda one: one.get("compile") == "true"):
        for pair in one.pairs():
            holding.setdefault(pair, []).append(one)
    missing = dict.fromkeys(sorted(holding, key=lambda pair: (COMPILED in (pair[:2], pair[2:]), len(holding[pair]))))
    chosen = []
    while missing:
        candidates = holding[next(iter(missing))]
        sooner = [one for one in candidates if one.get("compile") == "false"] or candidates
        tried = draw.sample(sooner, min(40, len(sooner)))
        best = max(tried, key=lambda one: sum(pair in missing for pair in one.pairs()))
        chosen.append(best)
        for pair in best.pairs():
            missing.pop(pair, None)
    return chosen


# -- the table --------------------------------------------------------------------------------------------------
def table() -> str:
    """Markdown: for every strategy what it keeps, how many workers it takes and which choices go with it."""
    rows = [
        ["strategy", "fidelity", "workers", *AXES],
        ["---"] * (3 + len(AXES)),
    ]
    for declaration in declarations().values():
        support = declaration.support
        plain = plain_plan(declaration)
        able = [
            ", ".join(
                name for name, changes in choices.items() if not conflicts(replace(plain, **changes), declaration)
            )
            for choices in AXES.values()
        ]
        most = "" if support.max_world_size is None else f" to {support.max_world_size}"
        workers = f"{support.min_world_size}{most or ' or more'}" if most != " to 1" else "1"
        rows.append([f"`{declaration.name}`", support.fidelity, workers, *able])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


HEAD = """# What goes with what

Made by `python -m drivetrain support --write docs/support.md` from the strategies' declarations; a test holds it to
them. What is not listed is refused before anything starts. Each column is read with the other columns at their first
choice; `python -m drivetrain support --refusals` prints all combinations that are refused, with the reason.

Four things show only while training. One is a `training_step` that returns `None` to skip a batch on some ranks only.
Where parameters or gradients are in shards the ranks gather weights and reduce gradients together, block by block, in
every forward and backward pass, so a rank without a loss has its part to do in the others' pass. Under `fsdp`, `mesh`
with `shard` above 1 and `zero` with `stage=2` it does that part with zeros, whether it returned before its forward pass
or after, also where what it computed is not finite: it goes through the same blocks in the same order as in its last
step with a loss, without running the module's code, so that it draws nothing and its buffers stay. The result is that
of `ddp`. Every rank writes in the job's store how far it is, up to three short messages a pass that it does not wait
for; a rank without a loss waits until the others have come to the end of theirs. What a rank has to go through is kept
in checkpoints, for any number of ranks. The job ends instead, with a sentence that says so, where the rank had no step
with a loss yet (with `reduce_every_micro_batch=false`: no window), also none before a checkpoint that it went on from
under the same strategy, on several ranks and with the same parts of the module, where the others' pass went through
other blocks (where these differ in size a collective may fail first, or wait for its time-out), where blocks are called
within checkpoints with `use_reentrant=True`, with `narrow_gather` under `bf16-mixed`, where only some ranks of a tensor
group return `None`, and under `zero` with `stage=3`. There `return loss * 0.0` takes part, where the loss is a number.
Under `zero` with `stage=0` or `stage=1` gradients are reduced when a window of accumulation ends: a rank that had no
loss in all of it brings zeros there, also in its first one, and each window has one such message. A batch that no rank
has a loss of is left out, as everywhere.

Likewise a loss that leaves out parameters which other ranks use, as experts do that only some samples go to, ends the
job under `fsdp`, `mesh` with `shard` and `zero` from stage 1 on; `strategy=ddp strategy.find_unused_parameters=true`
trains it. What no rank uses in a step is left as it is, but `zero` refuses that, too.

The third is an optimizer that keeps more than states of parameters, where each rank or server steps a part of the
parameters. A count of steps is saved and comes back. One that looks at parameters together (Prodigy and D-Adaptation
find a step size from all of them) would train otherwise than on one process under `parameter_server` with several
servers, `pipeline`, `fsdp`, `mesh`, `tensor_parallel` and `zero` from stage 1 on: what its first step changed of the
numbers in its groups and states is compared once, and it is refused where two ranks or servers made something else of
one number. An optimizer that keeps no such number (a norm over all gradients that it only clips by) is not found out.
`zero` refuses from stage 1 on what of torch's own looks at rows and columns (`Adafactor`, `Muon`), as its ranks have
parts of flat tensors. `Muon` computes in bf16 whatever the precision is, so that under `fsdp` and `tensor_parallel`,
which sum in another order, it agrees with one process to bf16's precision only.
Parts of `state_dict` that only the optimizer knows (weights kept a second time) are refused under `parameter_server`
with several servers, `pipeline` and `zero` from stage 1 on; tensors in shards, when `fsdp`, `mesh` or `tensor_parallel`
save them.

The fourth is what hooks find in gradients. Replicas that train by themselves (`local_sgd`, `elastic_averaging`,
`gossip`, `federated`) find their own. Under exact strategies every parameter has in `on_before_optimizer_step` its
gradient of the whole window, averaged over the ranks (a part of it where it is in shards), but under `zero` from
`stage=2` on, where there is none, under `zero` before that, where it is this rank's own, and under `pipeline`, where a
rank has those of its stages: there a warning names each `on_after_backward` and `on_before_optimizer_step` of the
module and its callbacks. In `on_after_backward` gradients may be this rank's own under other strategies, too, where
they are averaged later. Weights that a hook writes to between steps are what the next step starts from, but under
`zero` with `stage=3`, whose parameters are empty between passes: there, too, a warning names such hooks, and but for
`parameter.data = values` under `fsdp`, `mesh` and `tensor_parallel`, which is refused: `parameter.data.copy_(values)`
reaches the part that a rank holds. A step that computes with weights beside their layers' forward pass (a penalty on
them) ends in a sentence where a rank has a part of them only or none; where no gradient follows from it, a warning
tells of it in a pipeline and under `zero` with `stage=3`. A norm of weights or gradients in shards can be logged: the
ranks put it together at each call, so that all of them have to log it, and a value of a rank's own samples that was
added to it before counts as the ranks' mean.
Under `pipeline` parameters of other ranks' stages are those of an earlier step in hooks of a batch (for a project's
hooks of an epoch's end and of validation the ranks bring them together), and `training_step` is called with each piece
of a batch; collectives of a module's own (`self.all_gather`, a metric's `compute()`) are refused in steps, of which
ranks run different parts, and a project's `on_train_batch_end` is given the loss of the whole batch (one small exchange
a batch), and nothing else of what the step returned. An evaluation's step ends on the last rank, and on every rank
where a project's hook is given what it returns or where it keeps something on the module (a list of outputs): then the
network's output goes to all ranks. Of what several ranks of one pipeline log under one name the last one's counts.
Under `tensor_parallel` and `mesh` ranks that compute each batch together have the same values, and `self.all_gather`
gives each rank's: what is summed over it counts them so often.

"""


def page(trained: Mapping[str, str]) -> str:
    """The page of the docs, with the lines on what was trained."""
    from drivetrain import support_report

    return HEAD + table() + "\n" + support_report.section(trained)


def parser() -> Parser:
    made = Parser(prog="python -m drivetrain support", description=__doc__)
    made.add_argument("--write", type=Path, default=None, help="write the page to this file instead of printing it")
    made.add_argument("--refusals", action="store_true", help="print every refused combination of two with its reason")
    made.add_argument(
        "--covering", action="store_true", help="the combinations that the tests train; alone: print them"
    )
    made.add_argument("--train", action="store_true", help="train every allowed combination and compare with single")
    made.add_argument(
        "--only", action="append", metavar="STRATEGY", help="train those of this strategy; may be repeated"
    )
    made.add_argument("--jobs", type=int, default=1, help="train so many combinations at a time")
    made.add_argument("--json", type=Path, default=None, help="add each outcome to this file; what is there is kept")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    if arguments.only and not arguments.train:
        raise ConfigurationError("--only chooses what --train trains: give both")
    if arguments.train:
        try:
            return _train(arguments)
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    if arguments.covering:
        print(*covering(allowed()), sep="\n")
    elif arguments.refusals:
        for declaration in declarations().values():
            plain = plain_plan(declaration)
            for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2):
                for x, y in itertools.product(xs, ys):
                    for conflict in conflicts(replace(plain, **xs[x], **ys[y]), declaration):
                        print(f"{declaration.name} {a}={x} {b}={y}: {conflict}")
    elif arguments.write is not None:
        _write(arguments.write, {})
    else:
        print(table())
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from drivetrain import support_report

    known = declarations()
    for name in arguments.only or []:
        if name not in known:
            raise ConfigurationError(f"--only {name}: {nearest(name, known)}")
    if arguments.jobs < 1:
        raise ConfigurationError(f"--jobs {arguments.jobs}: give 1 or more.")
    combinations = covering(allowed()) if arguments.covering else allowed()
    combinations = [one for one in combinations if one.strategy in (arguments.only or known)]
    found = support_report.run(combinations, arguments.jobs, arguments.json)
    amiss = sum(one.status != "trained" for one in found)
    print(f"{len(found) - amiss} of {len(found)} combinations trained")
    if arguments.write is not None:
        _write(arguments.write, support_report.rows(found, known))
    return 1 if amiss else 0


def _write(path: Path, trained: Mapping[str, str]) -> None:
    """Lines on what was trained stay where they are not replaced, in the order of the table."""
    from drivetrain import support_report

    former = support_report.kept(path.read_text(encoding="utf-8")) if path.exists() else {}
    lines = {**former, **trained}
    path.write_text(page({name: lines[name] for name in declarations() if name in lines}), encoding="utf-8")
