"""Which of the saved checkpoints are kept: the best k, the newest for ``last.ckpt``, and no others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from drivetrain_plugins.callbacks.monitor import improves


@dataclass
class Kept:
    """Saved checkpoints by file name within their folder, so that the folder may move.

    Attributes:
        scores: the kept ones that have a score (with a monitor).
        best: the best of them; the newest without a monitor.
        score: score of ``best``.
        current: score at the last trigger.
        newest: the newest save, which ``last.ckpt`` means.
        spare: the newest where it is kept for ``last.ckpt`` alone.
        doomed: to be deleted; saved with the state, so that a kill before the deletion leaves nothing behind for ever.
    """

    scores: dict[str, float] = field(default_factory=dict)
    best: str = ""
    score: float | None = None
    current: float | None = None
    newest: str = ""
    spare: str = ""
    doomed: list[str] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def present(self, names: set[str], mode: str) -> Kept:
        """What is left of it when only ``names`` exist."""
        scores = {name: score for name, score in self.scores.items() if name in names}
        best = self.best if self.best in names else best_of(scores, mode)
        return Kept(
            scores=scores,
            best=best,
            score=scores.get(best),
            current=self.current,
            newest=self.newest if self.newest in names else "",
            spare=self.spare if self.spare in names else "",
        )


@dataclass(frozen=True)
class Retention:
    """The rule.

    Args:
        top_k: how many to keep; -1 for all, 0 for none.
        mode: ``"min"`` or ``"max"``.
        ranked: whether checkpoints have scores; without, the newest is the best.
    """

    top_k: int
    mode: str
    ranked: bool

    def enters(self, kept: Kept, score: float | None) -> bool:
        """Whether a checkpoint of ``score`` would be among the best k."""
        if self.top_k == 0 or (self.ranked and score is None):
            return False
        if not self.ranked or self.top_k == -1 or len(kept.scores) < self.top_k:
            return True
        assert score is not None
        return improves(self.mode, score, kept.scores[worst_of(kept.scores, self.mode)])

    def leaving(self, kept: Kept, enters: bool) -> list[str]:
        """The names that the next save makes superfluous."""
        names = [kept.spare] if kept.spare else []
        if enters and self.ranked and len(kept.scores) == self.top_k:
            names.append(worst_of(kept.scores, self.mode))
        elif enters and not self.ranked and self.top_k == 1 and kept.best:
            names.append(kept.best)
        return names

    def after(self, kept: Kept, name: str, score: float | None, enters: bool) -> Kept:
        """What is kept once ``name`` is saved."""
        leaving = self.leaving(kept, enters)
        scores = {n: s for n, s in kept.scores.items() if n not in leaving}
        best = kept.best
        if enters and self.ranked and score is not None:
            scores[name] = score
            best = best_of(scores, self.mode)
        elif enters:
            best = name
        return Kept(
            scores=scores,
            best=best,
            score=scores.get(best),
            current=score,
            newest=name,
            spare="" if enters else name,
            doomed=[n for n in dict.fromkeys(leaving) if n not in (name, best)],
        )


def best_of(scores: dict[str, float], mode: str) -> str:
    """The name with the best score, the earliest of equals; ``""`` without any."""
    return (min if mode == "min" else max)(scores, key=scores.__getitem__, default="")


def worst_of(scores: dict[str, float], mode: str) -> str:
    """The name with the worst score, the earliest of equals; ``""`` without any."""
    return (max if mode == "min" else min)(scores, key=scores.__getitem__, default="")
