"""Which checkpoints Lightning's ModelCheckpoint keeps: the best k, the newest, ``last.ckpt``."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain_plugins.callbacks.lightning_checkpoint_files import CheckpointFiles, with_counters
from drivetrain_plugins.callbacks.monitor import missing, worst

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

log = logging.getLogger(__name__)
_STATE = ("best_model_score", "current_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


class CheckpointRanking(CheckpointFiles):
    """Saves, ranks and forgets by the rules of Lightning's ModelCheckpoint. The state is set before a save, of which it
    is part, and put back where the save fails."""

    def _fresh(self) -> None:
        super()._fresh()
        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(worst(self.mode))
        self.current_score: Tensor | None = None
        self.last_model_path = ""

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """The metrics, epoch and step; the first worker's, on every worker."""
        known = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
        communicator = trainer.communicator
        if communicator.world_size > 1:
            plain = {name: float(value) for name, value in known.items()}
            first = communicator.all_gather_plain(plain)[0]
            kind = torch.get_default_dtype()
            known = {n: torch.tensor(v, dtype=known[n].dtype if n in known else kind) for n, v in first.items()}
        return with_counters(trainer, known)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        current = monitor_candidates.get(self.monitor)
        if current is None and trainer.validation is not None and trainer.validation.has_run:
            raise missing("ModelCheckpoint", self.monitor, trainer.callback_metrics, trainer.global_step)
        if current is None:
            error = missing("ModelCheckpoint", self.monitor, trainer.callback_metrics, trainer.global_step)
            warnings.warn(str(error), stacklevel=2)
        self._save_monitor_checkpoint(trainer, monitor_candidates)

    def _save_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        current = monitor_candidates.get(str(self.monitor))
        if current is not None and self.check_monitor_top_k(trainer, current):
            self._update_best_and_save(current, trainer, monitor_candidates)
        elif current is not None and self.verbose and trainer.is_global_zero:
            log.info(
                "epoch %d, step %d: %s is not among the best %d",
                trainer.current_epoch,
                trainer.global_step,
                self.monitor,
                self.save_top_k,
            )

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a checkpoint of this score would be kept."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        kth = self.best_k_models[self.kth_best_model_path]
        return bool(current < kth if self.mode == "min" else current > kth)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, self.best_model_path)
        previous, self.best_model_path = self.best_model_path, path  # it is part of the state that is saved
        self._save_checkpoint(trainer, path)
        if self.save_top_k == 1 and previous:
            self._remove(trainer, previous, path)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        before = {name: getattr(self, name) for name in (*_STATE, "best_model_path")}
        models, leaving = dict(self.best_k_models), None
        if self.save_top_k != -1 and len(models) == self.save_top_k:
            leaving = self.kth_best_model_path
            del models[leaving]
        if torch.isnan(current):
            current = torch.full_like(current, worst(self.mode))
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, leaving)
        models[path] = current
        lowest, highest = min(models, key=lambda p: float(models[p])), max(models, key=lambda p: float(models[p]))
        best, last = (lowest, highest) if self.mode == "min" else (highest, lowest)
        self.best_k_models, self.current_score = models, current
        if self.save_top_k == -1 or len(models) == self.save_top_k:
            self.kth_best_model_path, self.kth_value = last, models[last]
        self.best_model_path, self.best_model_score = best, models[best]
        try:
            self._save_checkpoint(trainer, path)
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise
        if leaving:
            self._remove(trainer, leaving, path)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if not self.save_last:
            return
        path = self._free_name(trainer, monitor_candidates, self.CHECKPOINT_NAME_LAST, self.last_model_path)
        previous, self.last_model_path = self.last_model_path, path
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            self._link_checkpoint(trainer, self._last_checkpoint_saved, path)
        else:
            self._save_checkpoint(trainer, path)
        if previous:
            self._remove(trainer, previous, path)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write path and score of the checkpoints that are kept, by default to ``best_k_models.yaml`` beside them."""
        import yaml

        path = Path(filepath) if filepath is not None else Path(str(self.dirpath)) / "best_k_models.yaml"
        path.write_text(yaml.dump({name: score.item() for name, score in self.best_k_models.items()}), encoding="utf-8")

    # -- resuming -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        names = ("monitor", *_STATE, "best_model_path", "dirpath")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the folder of the checkpoint; where another one is used now, only its best is remembered. A
        callback that was never set up takes the folder over: the caller's own, once its workers are done."""
        if self.dirpath is None:
            self.dirpath = state_dict.get("dirpath")
            self.current_score = state_dict.get("current_score")
        if self.dirpath == state_dict.get("dirpath", self.dirpath):
            for name in _STATE:
                if name != "current_score":
                    setattr(self, name, state_dict.get(name, getattr(self, name)))
        else:
            warnings.warn(
                f"checkpoints were kept in {state_dict['dirpath']} and are now in {self.dirpath}: of the former ones"
                " only the best is remembered.",
                stacklevel=2,
            )
        self.best_model_path = state_dict["best_model_path"]
