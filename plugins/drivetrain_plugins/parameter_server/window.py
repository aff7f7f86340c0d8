"""Memory that a server and the workers of its host share: gradients and weights lie in it, and messages only say where.

It has no name in any file system (Linux's memfd), so nothing is left behind however its processes end, and a small
``/dev/shm`` is no bound. Workers reach it through the owner's table of open files, which the kernel shows to the same
user only.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from drivetrain_plugins.parameter_server.layout import Layout

_ALIGNED = 64  # bytes, to which the tensors of an area are
_HOST_REGISTER_PORTABLE = 1  # CUDA's name for memory that is pinned for all of a process's contexts


class Window:
    """Areas that are all laid out alike: one for each worker, then one of the server.

    Attributes:
        areas: their flat tensors, as :meth:`Layout.flatten` makes them.
        handle: by which :meth:`open` finds this memory.
    """

    def __init__(self, layout: Layout, workers: int, descriptor: int, handle: str) -> None:
        self.descriptor, self.handle = descriptor, handle
        self.step = _step(layout)
        memory = mmap.mmap(descriptor, _size(layout, workers))
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the mapping
        self.areas = [self._area(layout, number) for number in range(workers + 1)]
        self.pinned: set[int] = set()

    def _area(self, layout: Layout, number: int) -> list[Tensor]:
        found, start = [], mmap.PAGESIZE + number * self.step
        for dtype, count in layout.sizes:
            found.append(self.bytes[start : start + count * dtype.itemsize].view(dtype))
            start += _up(count * dtype.itemsize, _ALIGNED)
        return found

    @classmethod
    def create(cls, layout: Layout, workers: int) -> Window | None:
        """New memory; None where this system has none of this kind, or not enough."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            descriptor = os.memfd_create("drivetrain-parameters", os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, _size(layout, workers))  # what were missing later would kill the process
            nonce = secrets.token_hex(16)
            os.pwrite(descriptor, nonce.encode(), 0)
            handle = json.dumps({"path": f"/proc/{os.getpid()}/fd/{descriptor}", "nonce": nonce})
            return cls(layout, workers, descriptor, handle)
        except OSError:
            os.close(descriptor)
            return None

    @classmethod
    def open(cls, handle: str, layout: Layout, workers: int) -> Window | None:
        """The memory that another process made; None where it is out of reach, as in a container of its own."""
        if not handle:
            return None
        told = json.loads(handle)
        try:
            descriptor = os.open(told["path"], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        same = os.fstat(descriptor).st_size == _size(layout, workers)
        if not same or os.pread(descriptor, len(told["nonce"]), 0).decode("ascii", "replace") != told["nonce"]:
            os.close(descriptor)  # a process number means another process elsewhere
            return None
        return cls(layout, workers, descriptor, handle)

    def pin(self, numbers: Iterable[int], device: torch.device) -> None:
        """Let ``device`` copy from and to these areas by itself; what cannot be pinned is copied the slower way."""
        if device.type != "cuda" or self.step == 0:
            return
        for number in set(numbers) - self.pinned:
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(self._address(number), self.step, _HOST_REGISTER_PORTABLE)) == 0:
                self.pinned.add(number)
            else:
                with suppress(RuntimeError):  # takes the error from where the next kernel would find it
                    torch.zeros(1, device=device)

    def _address(self, number: int) -> int:
        return self.bytes.data_ptr() + mmap.PAGESIZE + number * self.step

    def close(self) -> None:
        """Nothing may be under way to a device. The memory goes when no tensor lies in it any more."""
        for number in self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address(number))
        self.pinned.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _step(layout: Layout) -> int:
    """Bytes from one area to the next: whole pages, which is what can be pinned."""
    return _up(sum(_up(count * dtype.itemsize, _ALIGNED) for dtype, count in layout.sizes), mmap.PAGESIZE)


def _size(layout: Layout, workers: int) -> int:
    return mmap.PAGESIZE + (workers + 1) * _step(layout)  # the first page holds the nonce
