"""The weighted mean of the clients' models (McMahan et al., FedAvg, arXiv 1602.05629)."""

from __future__ import annotations

import torch

from drivetrain_plugins.strategies.averaging import Averaging, has_mean


class WeightedMean:
    """``w + sum_k n_k (w_k - w) / sum_k n_k`` over the clients *k* of all ranks, from the model *w* that all began at.

    Differences are added, not models: with half-precision weights they are kept in fp32. Running statistics are
    averaged like weights; whole numbers (counters) become the largest of any client.
    """

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        self.start = start
        self.sums = {
            name: torch.zeros_like(t, dtype=torch.float32 if t.dtype.itemsize == 2 else t.dtype)
            for name, t in start.items()
            if has_mean(t)
        }
        self.counters = {name: t.to(torch.int64, copy=True) for name, t in start.items() if not has_mean(t)}

    def add(self, model: dict[str, torch.Tensor], samples: int) -> None:
        """Take in a client's ``model``, trained on ``samples`` samples."""
        for name, total in self.sums.items():
            total.add_(model[name] - self.start[name], alpha=samples)
        for name, largest in self.counters.items():
            torch.maximum(largest, model[name].long(), out=largest)

    def into(self, model: dict[str, torch.Tensor], samples: int, averaging: Averaging) -> None:
        """Write the mean over all ranks into ``model``; ``samples`` are those of all clients of the round."""
        averaging.sum(list(self.sums.values()))
        for name, total in self.sums.items():
            model[name].copy_(self.start[name] + total / samples)
        for name, largest in self.counters.items():
            model[name].copy_(averaging.communicator.all_reduce(largest, "max"))
