"""Two hosts on one machine: Linux namespaces of their own network, name and mounts, joined by a link of a given rate.

A host lives as long as a process of it does. The one that keeps it ends when the pipe to whoever made it closes, so
namespaces and link vanish with their maker, however that ends; nothing has a name that could be left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drivetrain.errors import ConfigurationError

SUBNET = "10.77.0"  # seen inside the namespaces only
INTERFACE = "link0"
ADMINISTRATOR = "/usr/sbin:/sbin"  # where these lie, though not on every user's path


@dataclass
class Host:
    """One end of the link.

    Attributes:
        name: its host name, which both hosts resolve.
        address: its IPv4 address on the link.
        keeper: the process that keeps its namespaces.
        started: what was started in it.
    """

    name: str
    address: str
    keeper: subprocess.Popen[bytes]
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        """``words`` as a command of this host, in ``folder`` (default: the present one)."""
        # To enter mounts is to land in their root.
        place = f"--wdns={(folder or Path.cwd()).absolute()}"
        return [_tool("nsenter"), f"--target={self.keeper.pid}", "--net", "--uts", "--mount", place, "--", *words]

    def run(self, *words: str) -> str:
        """Run a short command here and return what it printed.

        Raises:
            ConfigurationError: it failed.
        """
        return _run(self.command(*words))

    def start(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """Start a command here, leader of a process group of its own; ``how`` is for :class:`subprocess.Popen`."""
        # Else it would outlive a maker that is killed, and its host with it: also one that was killed before it asked
        # to hear of that.
        alive = f'[ "$PPID" = {os.getpid()} ] && exec "$@"'
        bound = (_tool("setpriv"), "--pdeathsig", "KILL", "sh", "-c", alive, "sh", *words)
        process = subprocess.Popen(
            self.command(*bound, folder=folder),
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            **how,
        )
        self.started.append(process)
        return process

    def bytes_sent(self) -> int:
        """Bytes that this host has put on the link so far, frames and acknowledgements included, by its own counter."""
        return sent_bytes(self.run("cat", "/proc/net/dev"))

    def cut(self) -> None:
        """Pull this end of the link's cable: nothing comes through any more, and no connection is closed."""
        self.run(_tool("ip"), "link", "set", INTERFACE, "down")

    def close(self) -> None:
        """End all processes of this host, and with them the host."""
        for process in self.started:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        # Workers lead groups of their own, but nobody leaves a network.
        while others := [pid for pid in self._processes() if pid != self.keeper.pid]:
            for pid in others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.started:
                process.poll()
            time.sleep(0.01)
        for process in self.started:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.keeper.kill()
        self.keeper.wait()
        for stream in (self.keeper.stdin, self.keeper.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _processes(self) -> list[int]:
        """Processes in this host's network that still run."""
        try:
            network = os.readlink(f"/proc/{self.keeper.pid}/ns/net")
        except OSError:  # the keeper is gone
            return []
        found = []
        for entry in os.listdir("/proc"):
            with suppress(OSError):  # gone meanwhile
                # Those that have ended and were not reaped have no namespace any more: reading it fails.
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == network:
                    found.append(int(entry))
        return found


class LinkedHosts:
    """Two hosts, ``host0`` and ``host1``, as a context manager.

    Args:
        megabits: rate of the link in either direction, in 10^6 bits a second; None for no limit.
        resolved: whether the hosts know each other's names. Without it not even their own has an address, as on many
            machines.
        private: folders that exist and of which each host has an empty one of its own, as without a shared file system.

    Raises:
        ConfigurationError: this machine or this user cannot make them; the sentence says why.
    """

    def __init__(self, megabits: float | None = None, *, resolved: bool = True, private: Sequence[Path] = ()) -> None:
        self.megabits, self.resolved, self.private = megabits, resolved, private
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        self._names = Path(tempfile.mkdtemp(prefix="drivetrain-hosts-"))
        try:
            lines = ["127.0.0.1 localhost", *(f"{SUBNET}.{i + 1} host{i}" for i in (0, 1) if self.resolved)]
            (self._names / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
            for number in (0, 1):
                self.hosts.append(_host(number))
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def _join(self) -> None:
        for host in self.hosts:
            host.run(_tool("mount"), "--bind", str(self._names / "hosts"), "/etc/hosts")
            for folder in self.private:
                host.run(_tool("mount"), "-t", "tmpfs", "none", str(folder))
        ip, peer = _tool("ip"), str(self.hosts[1].keeper.pid)
        self.hosts[0].run(ip, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", peer)
        for host in self.hosts:
            host.run(ip, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run(ip, "link", "set", INTERFACE, "up")
            # Some of the others give one of two flows most of the link, and each waits for the slower.
            host.run("sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control")
            if self.megabits is not None:
                # The bucket holds what the rate gives in 10 ms, and at least some of the largest packets.
                burst = max(256 * 1024, int(self.megabits * 1e6 / 8 * 0.01))
                shape = ("rate", f"{self.megabits:g}mbit", "burst", str(burst), "latency", "100ms")
                host.run(_tool("tc"), "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)

    def close(self) -> None:
        """Nothing of the hosts remains."""
        for host in self.hosts:
            host.close()
        self.hosts = []
        shutil.rmtree(self._names, ignore_errors=True)


def unavailable() -> str | None:
    """Why no hosts can be made here, or None where they can."""
    try:
        with LinkedHosts(100):
            return None
    except ConfigurationError as error:
        return str(error)


def sent_bytes(table: str) -> int:
    """Bytes sent over the link, from the text of ``/proc/net/dev``."""
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise ConfigurationError(f"there is no interface {INTERFACE} here: run inside of one of the linked hosts.")


def _host(number: int) -> Host:
    name = f"host{number}"
    # It reads until the pipe closes: then its maker is gone.
    script = f"hostname {name} && {_tool('ip')} link set lo up && echo up && exec cat"
    keeper = subprocess.Popen(
        [_tool("unshare"), "--net", "--uts", "--mount", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert keeper.stdout is not None and keeper.stderr is not None
    if keeper.stdout.readline() != b"up\n":
        keeper.kill()
        _, problem = keeper.communicate()
        words = problem.decode(errors="replace").strip().splitlines()
        raise ConfigurationError(
            f"no host can be made here ({words[0] if words else 'unshare failed'}): run as root on Linux."
        )
    keeper.stderr.close()
    return Host(name, f"{SUBNET}.{number + 1}", keeper)


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{ADMINISTRATOR}")
    if found is None or sys.platform != "linux":
        raise ConfigurationError(
            f"hosts are made by {name}, which is not here: install util-linux and iproute2 on Linux."
        )
    return found


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise ConfigurationError(f"{' '.join(command)} failed ({reason}): run as root on Linux.")
    return done.stdout
