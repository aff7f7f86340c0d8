from __future__ import annotations

import os
import signal
import threading

import pytest

from drivetrain.launch import handling, pending


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_a_flag_and_handlers_come_back(signum: signal.Signals) -> None:
    former = signal.getsignal(signum)
    with handling():
        assert pending() is None
        os.kill(os.getpid(), signum)
        assert pending() == signum
    assert pending() is None
    assert signal.getsignal(signum) is former


def test_second_interrupt_raises() -> None:
    with handling():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert pending() is None


def test_inner_handling_keeps_the_flag() -> None:
    with handling():
        with handling():
            os.kill(os.getpid(), signal.SIGTERM)
        assert pending() == signal.SIGTERM


def test_off_the_main_thread_nothing_happens() -> None:
    former = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def enter() -> None:
        with handling():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [former]
