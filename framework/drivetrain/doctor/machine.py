"""What the machine allows: processors, memory, limits, loopback, names, and variables that lead astray."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from drivetrain.cli.accelerators import gpu_count, present
from drivetrain.doctor.finding import Finding
from drivetrain.errors import ConfigurationError
from drivetrain.launch.environment import detect
from drivetrain.launch.temporary import LONGEST

PART = "machine"
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 256 * 2**20  # bytes; containers often have 64 MB, which a few batches of loader workers fill
LEAST_FILES = 1024
RESOLVING = 3.0  # seconds that looking up this machine's name may take before it is called slow


def machine() -> Iterator[Finding]:
    """Everything about the machine that workers depend on."""
    yield _processors(len(os.sched_getaffinity(0)), _quota(), os.environ.get("OMP_NUM_THREADS"))
    yield _gpus(present(), gpu_count())
    yield _shared_memory(SHARED_MEMORY)
    yield _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _temporary_folder(Path(tempfile.gettempdir()))
    yield _loopback()
    yield _host_name(socket.gethostname())
    yield _interface(os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()])
    yield _launcher_variables()


def _processors(cores: int, quota: float | None, threads: str | None) -> Finding:
    found = f"{cores} cores, OMP_NUM_THREADS={threads}" if threads else f"{cores} cores, shared out among the workers"
    if quota is not None and quota < cores and threads is None:
        return Finding(
            PART,
            "processors",
            "warn",
            f"{cores} cores are seen, but the container may use {quota:g}",
            f"export OMP_NUM_THREADS={max(1, int(quota))} divided by the number of workers",
        )
    return Finding(PART, "processors", "ok", found)


def _quota() -> float | None:
    """Processors that the control group of this process may use; None without a limit."""
    try:
        used, _, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").partition(" ")
        return None if used == "max" else int(used) / int(period)
    except (OSError, ValueError):  # another version of control groups, or none
        return None


def _gpus(there: int, usable: int) -> Finding:
    if there and not usable:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        fix = (
            f"unset CUDA_VISIBLE_DEVICES (it is {mask!r}), or install a build of torch with CUDA"
            if mask is not None
            else "install a build of torch with CUDA"
        )
        return Finding(PART, "GPUs", "warn", f"{there} present, torch can use none", fix)
    return Finding(PART, "GPUs", "ok" if usable else "note", f"{usable} of {there}" if there else "none: CPU only")


def _shared_memory(place: Path) -> Finding:
    if not place.is_dir():
        return Finding(PART, "shared memory", "warn", f"no {place}", "use data loaders with num_workers=0")
    free = shutil.disk_usage(place).free
    fix = "start the container with --shm-size=1g, or use data loaders with num_workers=0"
    found = f"{free / 2**20:.0f} MiB free in {place}"
    enough = free >= LEAST_SHARED and os.access(place, os.W_OK)
    return Finding(PART, "shared memory", "ok" if enough else "warn", found, "" if enough else fix)


def _open_files(soft: int, hard: int) -> Finding:
    words = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} at once"
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        fix = f"ulimit -n {most} before training"
        if most < LEAST_FILES:  # nobody but the administrator can raise it so far
            fix = f"the hard limit is {most}: raise it in /etc/security/limits.conf (nofile), or start the container"
            fix += " with --ulimit nofile=65536"
        return Finding(PART, "open files", "warn", words, fix)
    return Finding(PART, "open files", "ok", words)


def _temporary_folder(place: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 65536)
    except OSError as error:
        fix = f"make room in {place}, or set TMPDIR to a folder that can be written"
        return Finding(PART, "temporary folder", "fail", f"{place}: {error.strerror}", fix)
    if len(os.fsencode(place)) > LONGEST:
        words = f"{place} is a path too long for the sockets of data loaders' processes"
        return Finding(PART, "temporary folder", "warn", words, f"set TMPDIR to one of at most {LONGEST} bytes")
    return Finding(PART, "temporary folder", "ok", f"{shutil.disk_usage(place).free / 2**30:.1f} GiB free in {place}")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            began = time.perf_counter()
            with socket.create_connection(server.getsockname(), timeout=2.0):
                took = 1e3 * (time.perf_counter() - began)
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(
            PART, "loopback", "fail", f"127.0.0.1: {reason}", "ip link set lo up, and let no firewall bar it"
        )
    return Finding(PART, "loopback", "ok", f"127.0.0.1 answers in {took:.2f} ms")


def _host_name(name: str) -> Finding:
    """Of consequence to jobs on several nodes only, where others may look up the name of the first."""
    addresses: list[str] = []

    def resolve() -> None:
        try:
            addresses.extend({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        except OSError:
            addresses.clear()

    # In a thread, for a resolver that is not there may take half a minute to say so.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(RESOLVING)
    if any(not address.startswith("127.") and address != "::1" for address in addresses):
        return Finding(PART, "host name", "ok", f"{name} is {', '.join(sorted(addresses))}")
    found = f"{name} is {', '.join(sorted(addresses))}" if addresses else f"{name} is not resolved"
    found += f" within {RESOLVING:g} s" if thread.is_alive() else ""
    fix = f"only for jobs of several nodes: name {name}'s outer address in /etc/hosts, or give master_addr as a number"
    return Finding(PART, "host name", "note", found, fix)


def _interface(asked: str | None, there: list[str]) -> Finding:
    listed = ", ".join(there)
    unknown = [name for name in (asked or "").split(",") if name and name not in there]
    if unknown:
        fix = f"unset GLOO_SOCKET_IFNAME, or name one of {listed}"
        return Finding(PART, "interfaces", "fail", f"GLOO_SOCKET_IFNAME={asked}: there is no {unknown[0]}", fix)
    return Finding(PART, "interfaces", "ok", listed + (f"; Gloo is told {asked}" if asked else ""))


def _launcher_variables() -> Finding:
    try:
        job = detect()
    except ConfigurationError as error:
        return Finding(PART, "launcher", "fail", "its variables are ill-formed", str(error))
    words = "none started this process" if job is None else f"{job.origin}: rank {job.rank} of {job.world_size}"
    return Finding(PART, "launcher", "ok", words)
