"""A script that ends, or forks, while the transport's threads let go of tensors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time

import pytest

from drivetrain.launch import transport_threads


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")
@pytest.mark.parametrize("then", ["end", "fork"])
def test_threads_that_are_at_work_are_waited_for(then: str) -> None:
    done = threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME, as Gloo names its own
        data, began = bytes(1 << 20), time.monotonic()
        started.set()
        while time.monotonic() - began < 0.2:
            hashlib.sha256(data)  # without Python's lock
        done.set()

    started = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    if then == "end":
        transport_threads.await_rest()
    else:
        transport_threads.await_them()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert done.is_set()
    thread.join()
