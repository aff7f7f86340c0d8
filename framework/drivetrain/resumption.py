"""Which checkpoint a stage goes on from: looked up and verified before anything starts, or else by the first rank."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.overrides import is_overridden

from drivetrain import checkpoint as store
from drivetrain import snapshot
from drivetrain.callback import Callback
from drivetrain.checkpoint import single
from drivetrain.errors import CheckpointError, ConfigurationError, MissingCheckpointError, NoCheckpointError
from drivetrain.module import TrainModule

if TYPE_CHECKING:
    from drivetrain.request import Request
    from drivetrain.trainer import Trainer

_REBUILDING = ("setup", "configure_model", "configure_sharded_model", "on_load_checkpoint")


def before_launch(trainer: Trainer, request: Request) -> None:
    """Look up what ``request.ckpt_path`` means, read every byte of it once, and compare it with the module.

    Workers take the result's word. What they alone can know is left to them: ``auto``, which starts anew rather than
    fail, and a folder that ``configure_callbacks`` of the module names.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it is of another model (exit code 2).
    """
    spec = request.ckpt_path
    if spec is None or isinstance(spec, store.Verified) or spec == "auto" or trainer.node_rank > 0:
        return
    if not isinstance(spec, str | os.PathLike) or not os.fspath(spec):
        raise ConfigurationError(f"ckpt_path={spec!r}: give a path, 'last', 'best' or 'auto'.")
    if spec in ("last", "best") and _named_later(trainer, request.module):
        return
    if snapshot.reads_itself(trainer):
        return
    try:
        path = _look(trainer, os.fspath(spec))
        if path is None:
            return
        if request.weights_only is not False:  # else what is in a file may run code
            compare(request.module, trainer.callbacks, request.stage, path, request.weights_only)
    except CheckpointError as error:
        error.exit_code = ConfigurationError.exit_code  # no worker was started for it
        raise
    except OSError as error:
        raise ConfigurationError(_refused(spec, error)) from error
    request.ckpt_path = store.Verified(path)


def named(trainer: Trainer, spec: str | Path | store.Verified | None) -> str | Path | store.Verified | None:
    """What ``ckpt_path`` means, ``"best"`` by its path where the callbacks of the stages before know it."""
    return getattr(trainer.checkpoint_callback, "best_model_path", "") or spec if spec == "best" else spec


# What the first rank tells the others of an error, besides its text; the most general last.
_KINDS = (MissingCheckpointError, NoCheckpointError, CheckpointError)


def agree(trainer: Trainer, request: Request) -> bool:
    """Let all ranks ask for the first one's checkpoint: in a script that each of them runs they may be given others, or
    none, as where one looked for a file before another had written it. Travels with the names of hooks, so it costs no
    exchange of its own. Returns whether the first rank looks for one.
    """
    spec = request.ckpt_path
    mine = None if spec is None else str(spec.path if isinstance(spec, store.Verified) else spec)
    said = trainer.hooks.agree(trainer.strategy.everyone, [mine, _goes_on_by_itself(trainer)])
    first, by_itself = said[0]
    other = next((rank for rank, (asked, _) in enumerate(said) if asked != first), None)
    if other is not None and trainer.is_global_zero:
        warnings.warn(
            f"rank 0 was given ckpt_path={first!r} and rank {other} {said[other][0]!r}: that of rank 0 counts.",
            stacklevel=2,
        )
    if mine != first:
        request.ckpt_path = first
    return first is not None or by_itself


def find(trainer: Trainer, spec: str | Path | store.Verified | None, looks: bool | None = None) -> Path | None:
    """The checkpoint that ``ckpt_path`` means; the first rank looks and the others take its word.

    Args:
        looks: what :func:`agree` returned, where there are several ranks.
    """
    if not (looks if looks is not None else spec is not None or _goes_on_by_itself(trainer)):
        return None
    everyone = trainer.strategy.everyone
    found: list[Any] = [None, None, 0]
    if everyone.rank == 0:
        try:
            path = _look(trainer, spec)
            found = [None if path is None else str(path), None, 0]
        except CheckpointError as error:
            found = [None, str(error), next(n for n, kind in enumerate(_KINDS) if isinstance(error, kind))]
    path_text, problem, kind = everyone.all_gather_plain(found)[0]
    if problem is not None:
        raise _KINDS[kind](problem)
    return None if path_text is None else Path(path_text)


def _goes_on_by_itself(trainer: Trainer) -> bool:
    """Whether a fit that is told nothing goes on where an earlier one was ended by an exception."""
    saved_then = any(callback.saved_on_exception for callback in trainer.callbacks)
    return saved_then and trainer.stage == "fit" and trainer.meanings.checkpoint == "file"


def _look(trainer: Trainer, spec: str | Path | store.Verified | None) -> Path | None:
    if isinstance(spec, store.Verified):
        return spec.path
    named_last = _last_ones(trainer) if spec in (None, "last") and trainer.meanings.checkpoint == "file" else []
    if spec is None:
        for path in named_last:
            try:
                found = path if snapshot.reads_itself(trainer) else store.resolve(path, path.parent)
            except CheckpointError as error:
                warnings.warn(f"{error}; going back to the checkpoint before it", stacklevel=2)
            else:
                warnings.warn(f"training goes on from {found}: move it away to begin anew.", stacklevel=2)
                return found
        return None
    if named_last and str(named_last[0]) in _saved_on_exception(trainer):  # and is newer than those called so
        spec = named_last[0]
    callback = trainer.checkpoint_callback
    folder = Path(getattr(callback, "dirpath", None) or trainer.checkpoint_dir)
    if spec == "last" and trainer.meanings.checkpoint == "file":
        folder = _folder_of_last(trainer) or folder
    best = getattr(callback, "best_model_path", "") or None
    if spec == "last" and trainer.meanings.checkpoint == "file" and not _any(folder):
        instead = "it starts anew" if trainer.stage == "fit" else "the weights at hand are read"
        warnings.warn(f"there is no checkpoint in {folder} to go on from: {instead}.", stacklevel=2)
        return None
    if spec not in ("last", "auto") and snapshot.reads_itself(trainer):
        path = Path(best if spec == "best" and best else spec).expanduser()
        if not path.exists():
            raise MissingCheckpointError(f"there is no checkpoint {path}; name one that exists")
        return path
    return store.resolve(spec, folder, best)


def _folder_of_last(trainer: Trainer) -> Path | None:
    """The folder of a checkpoint callback in which the newest file called ``last`` lies, where there is any."""
    folders = [
        Path(getattr(callback, "dirpath", None) or trainer.checkpoint_dir) for callback in trainer.checkpoint_callbacks
    ]
    found = [path for folder in folders for path in folder.glob(f"last*{single.EXTENSION}") if path.exists()]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def _last_ones(trainer: Trainer) -> list[Path]:
    """Files that callbacks saved when an exception ended training, and those called ``last``; newest first."""
    folder = _folder_of_last(trainer)
    found = [] if folder is None else [p for p in folder.glob(f"last*{single.EXTENSION}") if p.exists()]
    found += [Path(path) for path in _saved_on_exception(trainer) if Path(path).exists()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _saved_on_exception(trainer: Trainer) -> list[str]:
    return [str(Path(c.saved_on_exception)) for c in trainer.callbacks if c.saved_on_exception]


def _refused(spec: Any, error: OSError) -> str:
    return f"ckpt_path={str(spec)[:100]!r} cannot be read: {(error.strerror or str(error)).lower()}; name another"


def _any(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix == single.EXTENSION for path in folder.iterdir())


def _named_later(trainer: Trainer, module: TrainModule) -> bool:
    """Whether only ``setup`` says where checkpoints lie, or the module brings who keeps them."""
    if trainer.meanings.checkpoint == "file" and getattr(trainer.checkpoint_callback, "dirpath", None) is None:
        return True
    return trainer.checkpoint_callback is None and is_overridden("configure_callbacks", module, TrainModule)


def compare(
    module: TrainModule, callbacks: list[Callback], stage: str, path: Path, weights_only: bool | None = None
) -> None:
    """Refuse what is missing in the checkpoint, or other in it than in the module, unless hooks may change either.

    Raises:
        CheckpointError: they do not fit, or the checkpoint cannot be read.
    """
    shared = snapshot.outline(path, weights_only)
    if any(is_overridden(name, module, TrainModule) for name in _REBUILDING) or any(map(_may_rebuild, callbacks)):
        return
    if stage == "fit":
        snapshot.check_trains_on(module, shared)
    snapshot.check_names(module, shared["state_dict"])


def _may_rebuild(callback: Callback) -> bool:
    rebuilds = callback.rebuilds and is_overridden("setup", callback, Callback)
    return rebuilds or any(is_overridden(name, callback, Callback) for name in ("on_load_checkpoint", "before_restore"))
