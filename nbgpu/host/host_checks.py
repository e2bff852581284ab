"""Check what the host gives the ranks: cores, memory, disk, limits, the loopback interface, and a torch for
its GPUs."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from nbgpu.errors import ClusterError, ConfigError
from nbgpu.machine import cgroups
from nbgpu.machine.processes import has_pidfds
from nbgpu.protocol.records import Device

Verdict = Literal["ok", "warn", "fail"]
"""'warn': nbgpu works, but slower, or not in every case. 'fail': nbgpu, or a device, does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of `nbgpu doctor`."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """The remedy, in words; empty if nothing needs to be done."""


def ok(check: str, text: str) -> Finding:
    """A finding about which nothing needs to be done."""
    return Finding(check, "ok", text)


def warn(check: str, text: str, fix: str) -> Finding:
    """A finding about something that works, but slower than it could, or not always."""
    return Finding(check, "warn", text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """A finding about something that does not work."""
    return Finding(check, "fail", text, fix)


_GIB = 2**30
_MIN_SHARED_BYTES = _GIB
"""Enough for NCCL's buffers between GPUs without P2P and for the workers of torch's DataLoader. Docker's
default is 64 MiB."""
_MIN_DISK_BYTES = 10 * _GIB
_MIN_OPEN_FILES = 4096
_FILES_OF_CONTROLLER = 128
"""The open files and sockets of ipyparallel's controller. It needs 94 and 6 for each engine; the rest is for
clients and engines that come later."""
_FILES_FOR_EACH_ENGINE = 8
_FILES_OF_OWNER = 64
"""The files that the kernel, or a script, opens for a cluster: about 30, and more while it trains."""
_MIN_FILE_BYTES = 2**20
_MIN_PROCESSES = 2048
_MIN_MEMORY_BYTES = 2 * _GIB

_NOT_NCCLS = {
    "NCCL_TIMEOUT": "NCCL has no such variable, and nothing reads it",
    "NCCL_BLOCKING_WAIT": "it is torch's old name for TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "it is torch's old name for TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
"""Variables that guides wrongly attribute to NCCL."""


_BUILT_FOR = re.compile(r"^(cuda|hip|rocm)\b[^=\n]*=\s*(.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=\s*['\"](.+?)['\"]", re.MULTILINE)


def system() -> Finding:
    """Check the operating system. The ranks need Linux, because they use /proc and memfds."""
    text = f"{platform.system()} {platform.release()}, {platform.machine()}, glibc {platform.libc_ver()[1] or 'none'}"
    if platform.system() != "Linux":
        return fail("system", text, "nbgpu runs its ranks on Linux only (WSL 2 is one)")
    through = "pidfds" if has_pidfds() else "pipes, because pidfds (Linux 5.3 or newer) are missing here"
    return ok("system", f"{text}; processes watch each other through {through}")


def cores() -> Finding:
    """Check the cores that the ranks may use, and whether the container has a smaller quota of CPU time."""
    usable, quota = cgroups.usable_cores(), cgroups.cpu_quota()
    text = f"{len(os.sched_getaffinity(0))} of the machine's {os.cpu_count()} cores"
    if quota is not None and quota < len(os.sched_getaffinity(0)):
        counted = f"{usable} core{'s' if usable != 1 else ''}"
        text += f", and the container may use the time of {quota:g}: ranks share out {counted}"
    if usable < 2:
        return warn("cores", text, "two CPU ranks take turns on one core; take a machine with two or more")
    return ok("cores", text)


def memory() -> Finding:
    """Check the memory of the host, and the limit of the container."""
    host, limit_bytes = psutil.virtual_memory(), cgroups.memory_limit_bytes()
    text = f"{host.total / _GIB:.1f} GiB, {host.available / _GIB:.1f} GiB of it free"
    if limit_bytes is not None and limit_bytes < host.total:
        return warn(
            "memory",
            f"{text}; the container is killed above {limit_bytes / _GIB:.1f} GiB",
            "keep the ranks below it with memory_limit, so that one raises an error and is not killed",
        )
    if host.available < _MIN_MEMORY_BYTES:
        return warn("memory", text, "end other programs, or take smaller pieces")
    return ok("memory", text)


def shared_memory() -> Finding:
    """Check /dev/shm, which NCCL and the workers of torch's DataLoader use."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return fail(
            "/dev/shm", f"cannot be used ({error.strerror})", "mount it: mount -t tmpfs tmpfs /dev/shm"
        )
    text = f"{usage.free / _GIB:.2f} GiB free of {usage.total / _GIB:.2f} GiB"
    if usage.free < _MIN_SHARED_BYTES:
        return warn(
            "/dev/shm",
            text,
            "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir of medium Memory",
        )
    return ok("/dev/shm", text)


def disk(runs_dir: str) -> Finding:
    """Check the folder for runs."""
    folder = Path(runs_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    shown = without_home(Path(runs_dir).absolute())
    if not os.access(folder, os.W_OK):
        return fail(
            "runs folder", f"{shown} cannot be written", "name another one with runs_dir (--runs-dir)"
        )
    free_bytes = shutil.disk_usage(folder).free
    text = f"{shown}: {free_bytes / _GIB:.1f} GiB free"
    if free_bytes < _MIN_DISK_BYTES:
        return warn("runs folder", text, "name a larger disk with runs_dir, or keep fewer checkpoints")
    return ok("runs folder", text)


def limits(has_gpus: bool) -> Iterator[Finding]:
    """Check the limits of this process, which the ranks inherit."""
    yield _at_least(
        "open files", resource.RLIMIT_NOFILE, _MIN_OPEN_FILES, "ulimit -n 65536 before the notebook starts"
    )
    yield _at_least("processes", resource.RLIMIT_NPROC, _MIN_PROCESSES, "ulimit -u 65536; threads count too")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_gpus and locked != resource.RLIM_INFINITY:
        yield warn(
            "locked memory",
            f"{locked / 2**20:.0f} MiB",
            "InfiniBand needs more: docker run --ulimit memlock=-1; GPUs of one machine do without",
        )
    else:
        yield ok("locked memory", _format_limit(locked, "bytes"))
    for name, limit in (("data", resource.RLIMIT_DATA), ("address space", resource.RLIMIT_AS)):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield warn(
                name, f"limited to {most / _GIB:.1f} GiB", "ulimit -v unlimited -d unlimited; CUDA maps a lot"
            )


def _at_least(name: str, limit: int, enough: int, fix: str) -> Finding:
    most, _ = resource.getrlimit(limit)
    if most != resource.RLIM_INFINITY and most < enough:
        return warn(name, f"at most {most}", fix)
    return ok(name, f"at most {_format_limit(most, '')}")


def _format_limit(most: int, unit: str) -> str:
    return "as many as there are" if most == resource.RLIM_INFINITY else f"{most:,} {unit}".strip()


def loopback() -> Finding:
    """Check that processes of this host reach one another on 127.0.0.1, on a port that the system chooses."""
    if "lo" not in interfaces():
        return fail(
            "loopback",
            "there is no interface lo",
            "ip link set lo up, as root or in the container's settings",
        )
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"?")
                    if accepted.recv(1) != b"?":
                        return fail(
                            "loopback", "127.0.0.1 answers something else", "look for a proxy or a firewall"
                        )
    except OSError as error:
        return fail(
            "loopback",
            f"127.0.0.1 does not answer ({error})",
            "let the firewall pass 127.0.0.1 on every port",
        )
    first, last = (int(port) for port in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    text = f"127.0.0.1 answers; {last - first + 1} ports to choose from"
    if last - first < 1000:
        return warn("loopback", text, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    return ok("loopback", text)


def require_startable(variables: Mapping[str, str], backends: Iterable[str], num_engines: int) -> None:
    """Raise an error in conditions under which no cluster can start.

    Args:
        variables: the environment variables.
        backends: the backends of torch.distributed that the ranks may use.
        num_engines: the number of engine processes, including spare ones.

    Raises:
        ConfigError: a variable names a network interface that does not exist.
        ClusterError: the limits of this process, which the cluster inherits, allow too few open files or too
            short files.
    """
    names = dict.fromkeys(f"{backend.upper()}_SOCKET_IFNAME" for backend in backends)
    problems = [
        f"{name}={variables[name]}, and there is no interface {missing}. Unset {name}, or name one of "
        f"{', '.join(interfaces())}"
        for name in names
        if name in variables and (missing := _missing_interfaces(name, variables[name]))
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    needed = max(_FILES_OF_CONTROLLER + _FILES_FOR_EACH_ENGINE * num_engines, num_open + _FILES_OF_OWNER)
    if most != resource.RLIM_INFINITY and most < needed:
        raise ClusterError(
            f"a process here may have at most {most} open files and sockets, and a cluster of {num_engines} process(es) "
            f"needs {needed}. Raise the limit before the notebook or the command starts: ulimit -n {_MIN_OPEN_FILES}"
        )
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < _MIN_FILE_BYTES:
        raise ClusterError(
            f"a file that is written here may have at most {most} bytes, and a cluster's logs alone need more. Raise the "
            "limit before the notebook or the command starts: ulimit -f unlimited"
        )


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check the variables that the user has set and that decide how ranks communicate or which devices they
    see."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in variables and (missing := _missing_interfaces(name, variables[name])):
            yield fail(
                "environment",
                f"{name}={variables[name]}, and there is no interface {missing}",
                f"unset {name}, or name one of {', '.join(interfaces())}",
            )
    for name, why in _NOT_NCCLS.items():
        if name in variables:
            yield warn("environment", f"{name}={variables[name]}: {why}", f"unset {name}")
    set_variables = [
        f"{name}={value}"
        for name, value in sorted(variables.items())
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE", "PYTORCH_"))
        or name == "OMP_NUM_THREADS"
    ]
    yield ok("environment", ", ".join(set_variables) or "nothing of CUDA, NCCL, gloo or torch is set")


def interfaces() -> list[str]:
    """The names of the host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _missing_interfaces(variable: str, value: str) -> str:
    """The names in a variable that no interface has. NCCL's names are prefixes, unless they begin with '=';
    '^' excludes."""
    if variable == "NCCL_SOCKET_IFNAME":
        if value.startswith("^"):
            return ""
        exactly, names = value.startswith("="), value.lstrip("=").split(",")
        # One matching name is enough for NCCL.
        fits = any(
            there == name if exactly else there.startswith(name) for name in names for there in interfaces()
        )
        return "" if fits else ", ".join(names)
    return ", ".join(name for name in value.split(",") if name not in interfaces())


def without_home(path: Path) -> str:
    """A path with the home folder written as ~, for bug reports."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def require_torch_for(devices: Sequence[Device]) -> None:
    """Raise a ClusterError if these devices are GPUs and torch is built for the CPU only.

    torch writes what it is built for into torch/version.py. Where nothing can be read there, the ranks find
    out.
    """
    if any(device.kind == "cuda" for device in devices) and (version := _for_the_cpu_only()):
        raise ClusterError(
            f"torch {version} is built for the CPU only, and there are GPUs: {devices[0].name}. Install a torch that is "
            "built for the driver's CUDA (nbgpu doctor says which that is, https://pytorch.org/get-started how), or "
            "start on the CPU: gpus='none', %nbgpu start --gpus none"
        )


def _for_the_cpu_only() -> str:
    """The version of a torch without GPUs; empty for any other, and where it is not known."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    built_for = dict(_BUILT_FOR.findall(text))
    version = _VERSION.search(text)
    if version is None or "cuda" not in built_for or any(value != "None" for value in built_for.values()):
        return ""
    return version[1]
