"""Two hosts on this machine, where it allows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_plugins.bench.namespaces import Host, LinkedHosts, unavailable
from tests.patience import LIMIT

Run = Callable[[LinkedHosts, Callable[[int, Host], list[str]]], list[str]]


@pytest.fixture(scope="session")
def possible() -> None:
    """Skips, with the reason, where no hosts can be made."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def on_both(possible: None, repository: Path, tmp_path: Path) -> Run:
    """``on_both(hosts, words)`` runs Python with ``words(number, host)`` on both hosts, in the test's folder, and
    returns what each printed."""

    def run(hosts: LinkedHosts, words: Callable[[int, Host], list[str]]) -> list[str]:
        # What holds on one host only is left out, as it would be on a machine of its own.
        own = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        own |= {"PYTHONPATH": str(repository), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        logs = [(tmp_path / f"host{number}.log").open("w+", encoding="utf-8") for number in (0, 1)]
        started = [
            host.start([sys.executable, *words(number, host)], own, tmp_path, stdout=log, stderr=subprocess.STDOUT)
            for number, (host, log) in enumerate(zip(hosts.hosts, logs, strict=True))
        ]
        codes = [process.wait(timeout=LIMIT) for process in started]
        printed = []
        for log in logs:
            log.seek(0)
            printed.append(log.read())
            log.close()
        assert codes == [0, 0], "\n".join(printed)
        return printed

    return run
