"""The learning rate for more workers than it was found with. No torch here."""

from __future__ import annotations

import math
from typing import Literal, get_args

from drivetrain.comm.arguments import number, require_name, require_workers
from drivetrain.errors import ConfigurationError

Rule = Literal["linear", "sqrt"]


def scale_lr(lr: float, workers: int, rule: Rule = "linear") -> float:
    """The learning rate for ``workers`` times the batch that ``lr`` was found with.

    ``linear``: ``lr * workers``, which keeps the way gone per epoch (Goyal et al., "Accurate, Large Minibatch SGD",
    2017; with their warm-up of some epochs, and for SGD). ``sqrt``: ``lr * sqrt(workers)``, which keeps the variance of
    the step (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014; the usual one for
    Adam and its kin). Under ``Trainer(batch="global")`` the batch does not grow with the workers: nothing to scale.

    Raises:
        ConfigurationError: ``lr`` is not a positive number, ``workers`` is below 1, or there is no such rule.
    """
    found = number(lr)
    if found is None or not 0 < found < math.inf:
        raise ConfigurationError(f"lr={lr!r} cannot be scaled: give a number above 0.")
    require_workers(workers)
    require_name("rule to scale a learning rate", rule, get_args(Rule))
    scaled = found * (workers if rule == "linear" else math.sqrt(workers))
    if not scaled < math.inf:
        raise ConfigurationError(f"lr={lr!r} cannot be scaled for {workers} workers: the result is not finite.")
    return scaled
