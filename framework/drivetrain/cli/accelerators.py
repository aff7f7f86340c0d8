"""How many GPUs this process may use, asked by another process: a fork of one that the driver has its threads and files
in would not be sound, and workers are forked from this one."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def gpu_count() -> int:
    """Number of NVIDIA GPUs that torch would see, honouring ``CUDA_VISIBLE_DEVICES``; 0 where torch has no CUDA."""
    return visible(present(), os.environ.get("CUDA_VISIBLE_DEVICES")) if _torch_has_cuda() else 0


def visible(present: int, mask: str | None) -> int:
    """How many of ``present`` GPUs the environment variable's value leaves: the list ends at its first bad entry."""
    if mask is None:
        return present
    count = 0
    for entry in (part.strip() for part in mask.split(",")):
        index_fits = entry.isdigit() and int(entry) < present
        if not index_fits and not (present and entry.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


_NVML = "libnvidia-ml.so.1"
_COUNT = f"""
import ctypes
nvml, count = ctypes.CDLL({_NVML!r}), ctypes.c_uint(0)
print(count.value if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else "unknown")
"""


@cache
def present() -> int:
    """Number of NVIDIA GPUs of this machine, whatever torch can use."""
    try:
        ctypes.CDLL(_NVML)  # is there a driver at all? This alone starts nothing
        asked = [sys.executable, "-I", "-S", "-c", _COUNT]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return _listed_by_driver()
    return int(said) if said.isdigit() else _listed_by_driver()


def _listed_by_driver() -> int:
    gpus = Path("/proc/driver/nvidia/gpus")
    return len(list(gpus.iterdir())) if gpus.is_dir() else 0


def _torch_has_cuda() -> bool:
    """Read from torch's version file: importing torch takes seconds and is not needed to refuse a request."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*(.+)$", text, re.MULTILINE)
    return found is not None and found.group(1).strip() != "None"
