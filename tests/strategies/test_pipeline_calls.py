"""The fewest calls of a network that a step makes, read from its source."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import TrainModule
from drivetrain_plugins.strategies.pipeline_calls import least_calls


class Base(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.nets = nn.ModuleDict({"one": self.net})
        self.around = Around(self.net)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def once(self, x: Any) -> Any:
        return self.net(x)


class Around(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.inner = net

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        return y + self.inner(y)


class Suppressed(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        with suppress(ValueError):
            if batch_idx:
                raise ValueError
            self.net(x)
        return self.net(x)


class Zero(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        return self.around.inner.weight.sum()


class One(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        self.log("a", 1.0)
        return self.net(x)


class OneOfTwoArms(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        if batch_idx % 2:
            return self.net(x)
        y = self.net(x) if x is not None else self.net(0)
        return y or self.net(y)


class EarlyEnd(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        y = self.net(x)
        if y.isnan():
            return None
        return self.net(y)


class ByData(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        while batch_idx:
            self.net(x)
        for part in x:
            self.net(part)
        later = lambda: self.net(x)
        return [self.net(part) for part in x], later, (self.net(part) for part in (x, x))


class Handled(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        try:
            return self.net(x)
        except ValueError:
            return self.net(x) + self.net(x)


class Renamed(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        net = self.net
        net = self.around.inner.weight.sum
        return net(), net()


class Replaces(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        self.net = nn.Identity()
        return self.net(x), self.net(x)


class Decorated(Base):
    @torch.no_grad()
    def training_step(self, x: Any, batch_idx: int) -> Any:
        return self.net(x), self.net(x)


class Raises(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        raise ValueError(self.net(x), self.net(x))


class Recursive(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        return self.training_step(x, batch_idx)


class Straight(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        a = self.net(x)
        with torch.no_grad():
            b = self.net.forward(a)
        return a + b


class ThroughMethods(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        return self.once(x), self(x)


class Inherited(ThroughMethods):
    def once(self, x: Any) -> Any:
        return super().once(x), self.nets["one"](x)


class ThroughOther(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        return self.around(x)


class Aliased(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        net, y = None, x
        model = self.net
        for _ in range(2):
            y = model(y)
        return net, [self.net(part) for part in (x, y)]


class BothArms(Base):
    def training_step(self, x: Any, batch_idx: int) -> Any:
        y = self.net(x)
        if batch_idx:
            return self.net(y)
        else:
            z = self.once(x)
        return z


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        *((kind, 0) for kind in (Zero, ByData, Handled, Renamed, Replaces, Decorated, Raises, Recursive)),
        *((kind, 1) for kind in (One, OneOfTwoArms, EarlyEnd, Suppressed)),
        *((kind, 2) for kind in (Straight, ThroughMethods, ThroughOther, BothArms)),
        (Inherited, 3),
        (Aliased, 4),
    ],
)
def test_the_fewest_calls(kind: type[Base], calls: int) -> None:
    module = kind()
    assert least_calls(module, "training_step", module.net) == calls


def test_the_module_itself_is_the_network() -> None:
    module = ThroughMethods()
    assert least_calls(module, "training_step", module) == 1
    assert least_calls(module, "validation_step", module) == 0
