"""The weights of a DeepSpeed run as a checkpoint of their own, under the name of Lightning's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from drivetrain.checkpoint import single
from drivetrain.errors import CheckpointError

_TRAINING_ONLY = ("optimizer_states",)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path, output_file: str | Path, tag: str | None = None
) -> dict[str, Any]:
    """Write the checkpoint without its optimizers' states and with floating-point weights in fp32, for
    ``load_from_checkpoint``. A checkpoint holds whole weights under every strategy, so nothing is put together.

    Args:
        checkpoint_dir: the checkpoint: a file here, where Lightning has a directory.
        output_file: the file to write; may be the same.
        tag: which of several in one directory; there is one here.

    Returns:
        What was written.

    Raises:
        CheckpointError: there is no such file, it is damaged or not the Trainer's, or DeepSpeed itself wrote it.
    """
    if Path(checkpoint_dir).is_dir():
        raise CheckpointError(
            f"{checkpoint_dir} is a directory, and drivetrain's checkpoints are files: shards that DeepSpeed wrote are"
            " put together by the script zero_to_fp32.py that it left beside them"
        )
    content = single.read(Path(checkpoint_dir))
    if "state_dict" not in content:
        raise CheckpointError(f"{checkpoint_dir} has no 'state_dict': name a checkpoint that the Trainer saved")

    def single_precision(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    kept = {key: value for key, value in content.items() if key not in _TRAINING_ONLY}
    kept["state_dict"] = apply_to_collection(content["state_dict"], torch.Tensor, single_precision)
    single.write(kept, Path(output_file))
    return kept
