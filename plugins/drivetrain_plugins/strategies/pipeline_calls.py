"""How often a step calls its network at the least, read from the step's source: what no run can escape is known before.

Every path through the step is followed, into the methods and sub-modules that it calls on ``self``. What depends on the
data (a loop of unknown length, one arm of a condition) counts as what its cheapest path calls, and what cannot be read
(a decorator, a function handed over) as nothing; so the count is never too high.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_DEPTH = 20  # calls within calls
_NOT_THE_USERS = {"drivetrain", "torch"}  # packages that call nothing of the user's twice


def least_calls(module: nn.Module, step: str, network: nn.Module) -> int:
    """The fewest calls of ``network`` that ``module.<step>(...)`` makes on any path through it."""
    method = _attribute(module, step)
    found = _Frame(method, network, 0).least() if isinstance(method, MethodType) else 0
    return int(found) if math.isfinite(found) else 0  # every path raises


def _attribute(owner: Any, name: str) -> Any:
    """What ``owner.name`` is, without running anything of the user's; None where that cannot be told."""
    if not isinstance(owner, nn.Module):
        return None
    for place in (owner._modules, vars(owner)):
        if name in place:
            return place[name]
    found = inspect.getattr_static(type(owner), name, None)
    return MethodType(found, owner) if isinstance(found, FunctionType) else None


class _Frame:
    """One call of a method.

    A path's count is a float; ``inf`` stands for a path that is not there.
    """

    def __init__(self, method: MethodType, network: nn.Module, depth: int) -> None:
        self.method, self.network, self.depth = method, network, depth
        self.names: dict[str, Any] = {}  # what local names stand for
        self.once: set[str] = set()  # those that are assigned at one place only
        self.returned = math.inf  # the fewest calls before any return

    def least(self) -> float:
        body = self._body()
        return 0 if body is None else min(self._block(body, 0.0), self.returned)

    def _body(self) -> list[ast.stmt] | None:
        """The statements of the method; None where they are not to be read, or not what runs."""
        function: Any = self.method.__func__
        if self.depth > _DEPTH or function.__module__.partition(".")[0] in _NOT_THE_USERS:
            return None
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):
            return None
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or inspect.isgeneratorfunction(function):
            return None
        stored = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        changed = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
        given = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]
        if not given or given[0] in stored or any(_attribute(self.method.__self__, n) is self.network for n in changed):
            return None
        self.names = {given[0]: self.method.__self__}
        self.once = {name for name in stored if stored.count(name) == 1} - set(given)
        return tree.body

    # -- statements: the count before them in, after them out -----------------------------------------------------
    def _block(self, body: Sequence[ast.stmt], count: float) -> float:
        for statement in body:
            count = self._statement(statement, count)
        return count

    def _statement(self, one: ast.stmt, count: float) -> float:
        if isinstance(one, ast.Return):
            self.returned = min(self.returned, count + self._value(one.value))
            return math.inf
        if isinstance(one, ast.Raise):
            return math.inf
        if isinstance(one, ast.If):
            count += self._value(one.test)
            return min(self._block(one.body, count), self._block(one.orelse, count))
        if isinstance(one, ast.For | ast.While):
            return self._loop(one, count)
        if isinstance(one, ast.With):
            count += sum(self._value(item.context_expr) for item in one.items)
            if all(_lets_raise(item.context_expr) for item in one.items):
                return self._block(one.body, count)
            self._uncertain(one, count)  # such as contextlib.suppress, which may go on after a part of it
            return count
        if isinstance(one, ast.Try):
            if not one.handlers:
                return self._block(one.finalbody, self._block(one.orelse, self._block(one.body, count)))
            self._uncertain(one, count)
            return self._block(one.finalbody, count)
        if isinstance(one, ast.Match):
            self._uncertain(one, count)
            return count + self._value(one.subject)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and one.targets[0].id in self.once:
            self.names[one.targets[0].id] = self._meant(one.value)  # another name of the same thing
        if any(isinstance(node, ast.stmt) for node in ast.iter_child_nodes(one)):  # a definition, or of another kind
            self._uncertain(one, count)
            return count
        return count + sum(self._value(node) for node in ast.iter_child_nodes(one))

    def _loop(self, one: ast.For | ast.While, count: float) -> float:
        leaves = any(isinstance(n, ast.Break | ast.Continue | ast.Return) for n in ast.walk(one))
        if isinstance(one, ast.While) or leaves:
            self._uncertain(one, count)
            return count
        count += self._value(one.iter)
        times, each = _times(one.iter), self._block(one.body, 0.0)
        return self._block(one.orelse, count + (times * each if times else 0.0))

    def _uncertain(self, one: ast.stmt, count: float) -> None:
        """Nothing of ``one`` is sure to run, and it may return."""
        if any(isinstance(n, ast.Return) for n in ast.walk(one)):
            self.returned = min(self.returned, count)

    # -- expressions: how many calls evaluating them makes at the least ------------------------------------------
    def _value(self, node: ast.AST | None) -> float:
        if node is None or isinstance(node, ast.Lambda):
            return 0
        if isinstance(node, ast.BoolOp):
            return self._value(node.values[0])
        if isinstance(node, ast.IfExp):
            return self._value(node.test) + min(self._value(node.body), self._value(node.orelse))
        if isinstance(node, ast.Compare):
            return self._value(node.left) + self._value(node.comparators[0])
        if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            first = node.generators[0]
            times = _times(first.iter) if isinstance(node, ast.ListComp) and len(node.generators) == 1 else 0
            each = self._value(node.elt) if isinstance(node, ast.ListComp) and times and not first.ifs else 0
            return self._value(first.iter) + times * each
        inner = sum(self._value(child) for child in ast.iter_child_nodes(node))
        return inner + self._called(node) if isinstance(node, ast.Call) else inner

    def _called(self, call: ast.Call) -> float:
        target = self._meant(call.func)
        if isinstance(target, nn.Module):
            if target is self.network:
                return 1
            target = _attribute(target, "forward")
        if not isinstance(target, MethodType):
            return 0
        if target.__self__ is self.network and target.__name__ == "forward":
            return 1
        least = _Frame(target, self.network, self.depth + 1).least()
        return least if math.isfinite(least) else 0

    def _meant(self, node: ast.AST) -> Any:
        """The module or method that ``node`` is, or None."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()":
                return self._inherited(node.attr)
            return _attribute(self._meant(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, key = self._meant(node.value), node.slice.value
            if isinstance(owner, nn.ModuleDict | nn.ModuleList | nn.Sequential):
                return owner._modules.get(str(key))
        return None

    def _inherited(self, name: str) -> Any:
        owner, function = self.method.__self__, self.method.__func__
        classes = type(owner).__mro__
        here = next((n for n, cls in enumerate(classes) if function in vars(cls).values()), len(classes))
        found = next((vars(cls)[name] for cls in classes[here + 1 :] if name in vars(cls)), None)
        return MethodType(found, owner) if isinstance(found, FunctionType) else None


def _lets_raise(context: ast.expr) -> bool:
    """Whether what is raised within ``context`` leaves it, as it does those of torch (``no_grad``, ``autocast``)."""
    while isinstance(context, ast.Call | ast.Attribute):
        context = context.func if isinstance(context, ast.Call) else context.value
    return isinstance(context, ast.Name) and context.id == "torch"


def _times(node: ast.AST) -> int:
    """How often a loop over ``node`` runs, where it says so itself; else 0."""
    if isinstance(node, ast.Tuple | ast.List):
        return 0 if any(isinstance(one, ast.Starred) for one in node.elts) else len(node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        ends = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, int)]
        return max(0, ends[0]) if len(node.args) == 1 and ends else 0
    return 0
