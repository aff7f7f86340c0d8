"""What workers that have ended leave of a fit, so that their caller can save a checkpoint to go on from."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain import snapshot
from drivetrain.checkpoint import from_safe, layout, to_safe
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

# Of what all ranks share; weights, hyper-parameters and the like are the caller's own.
_KEPT = ("optimizer_states", "precision", "lr_schedulers", "loops", "run", "metrics")
_SHARED, _OWN = "left.pt", "left_{rank}.pt"


@dataclass
class LeftState:
    """
    Attributes:
        shared: parts of what :func:`drivetrain.snapshot.capture` gives as ``shared``; not to be changed.
        owns: what belongs to each rank, packed by :func:`drivetrain.checkpoint.layout.pack`.
    """

    shared: dict[str, Any]
    owns: list[torch.Tensor]

    def copy_of_shared(self) -> dict[str, Any]:
        """``shared`` in dictionaries and lists of its own, which the hooks that see a checkpoint may change."""
        copied: dict[str, Any] = layout.replace_tensors(self.shared, lambda tensor: tensor)
        return copied


def leave(trainer: Trainer, folder: Path) -> None:
    """Write it to ``folder``, in each worker at the end of a fit, after all else that the caller needs. Nothing is left
    where no rank has the whole state, the caller wants no weights or does not see all workers' files, or a state is no
    plain data. Callbacks whose states are none are left out.

    A run that is done must not fail of it, whatever the project's objects answer after their teardown and however full
    the disk is: that is told, and nothing is left.
    """
    job, fit = trainer.job, trainer.loop
    assert job is not None
    if not trainer.strategy.support.replicated or not trainer.return_weights or job.num_nodes > 1:
        return
    if fit is None or not (fit.between_steps or trainer.meanings.checkpoint == "file"):
        return
    own, shared = folder / _OWN.format(rank=job.rank), folder / _SHARED
    try:
        _write(trainer, own, shared if job.rank == 0 else None)
    except Exception as error:
        for file in [own, shared] if job.rank == 0 else [own]:
            file.unlink(missing_ok=True)
        warnings.warn(
            f"what a later save_checkpoint of this script would need was not kept: {type(error).__name__}: {error}",
            stacklevel=2,
        )


def _write(trainer: Trainer, own_file: Path, shared_file: Path | None) -> None:
    with torch.inference_mode(False), torch.no_grad(), trainer.consensus():
        shared, own = snapshot.capture(trainer)
    shared["callbacks"] = {key: state for key, state in shared["callbacks"].items() if _plain(state)}
    if not _plain(shared.get("datamodule")):
        del shared["datamodule"]
    kept = {name: shared[name] for name in (*_KEPT, "callbacks", "datamodule") if name in shared}
    if not (_plain(own) and _plain(kept)):
        return
    torch.save(layout.pack(own), own_file)
    if shared_file is not None:
        torch.save(to_safe(layout.replace_tensors(kept, lambda tensor: tensor.detach().cpu())), shared_file)


def _plain(state: Any) -> bool:
    try:
        to_safe(state, tensor=lambda path, tensor: None)
    except CheckpointError:
        return False
    return True


def found(folder: Path, workers: int) -> LeftState | None:
    """What ``workers`` have left in ``folder``; None where one of them has not."""
    files = [folder / _SHARED, *(folder / _OWN.format(rank=rank) for rank in range(workers))]
    if not all(file.is_file() for file in files):
        return None
    # Mapped, not read: mostly nobody asks for it.
    shared, *owns = (torch.load(file, mmap=True, weights_only=True) for file in files)
    return LeftState(from_safe(shared), owns)
