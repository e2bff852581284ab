"""Checks of the host for `nbgpu doctor` and before a start: cores, memory, disk, resource limits, the
loopback interface, environment variables, and whether torch is built for GPUs."""

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

_GIB = 2**30
_MIN_SHARED_BYTES = _GIB
"""Enough for NCCL's buffers between GPUs without P2P and for the workers of torch's DataLoader. Docker's
default is 64 MiB."""
_MIN_DISK_BYTES = 10 * _GIB
_MIN_OPEN_FILES = 4096
_FILES_OF_CONTROLLER = 128
"""The open files and sockets of ipyparallel's controller, without those of engines. It uses 94 of them; the
rest is for clients and engines that come later."""
_FILES_PER_ENGINE = 8
"""The open files of the controller for each engine. It uses 6 of them."""
_FILES_OF_OWNER = 64
"""The files that the notebook's kernel, or a script, opens for a cluster: about 30, and more in a training
run."""
_MIN_FILE_BYTES = 2**20
_MIN_PROCESSES = 2048
_MIN_MEMORY_BYTES = 2 * _GIB

_NOT_NCCLS = {
    "NCCL_TIMEOUT": "NCCL has no such variable, and nothing reads it",
    "NCCL_BLOCKING_WAIT": "it is torch's old name for TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "it is torch's old name for TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
"""Variables that guides wrongly attribute to NCCL, with the reason why they have no effect on it."""

_BUILT_FOR = re.compile(r"^(cuda|hip|rocm)\b[^=\n]*=\s*(.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=\s*['\"](.+?)['\"]", re.MULTILINE)
"""Lines of torch/version.py."""


@dataclass(frozen=True)
class Finding:
    """One line of `nbgpu doctor`."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """The remedy; empty if nothing needs to be done."""


def ok(check: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "ok", text)


def warn(check: str, text: str, fix: str) -> Finding:
    """Return a finding about something that works, but slower than it could, or not always."""
    return Finding(check, "warn", text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding(check, "fail", text, fix)


def system() -> Finding:
    """Check the operating system. The ranks need Linux, because they use /proc and memfds."""
    text = f"{platform.system()} {platform.release()}, {platform.machine()}, glibc {platform.libc_ver()[1] or 'none'}"
    if platform.system() != "Linux":
        return fail("system", text, "nbgpu runs its ranks on Linux only (WSL 2 is one)")
    means = "pidfds" if has_pidfds() else "pipes, because pidfds (Linux 5.3 or newer) are missing here"
    return ok("system", f"{text}; processes watch each other through {means}")


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
    for name, number in (("data", resource.RLIMIT_DATA), ("address space", resource.RLIMIT_AS)):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY:
            yield warn(
                name,
                f"limited to {limit / _GIB:.1f} GiB",
                "ulimit -v unlimited -d unlimited; CUDA maps a lot",
            )


def _at_least(name: str, number: int, enough: int, fix: str) -> Finding:
    """Check that a resource limit is high enough.

    Args:
        name: the name of the limit.
        number: the number of the limit, RLIMIT_...
        enough: the smallest limit that needs no action.
        fix: the remedy.
    """
    limit, _ = resource.getrlimit(number)
    if limit != resource.RLIM_INFINITY and limit < enough:
        return warn(name, f"at most {limit}", fix)
    return ok(name, f"at most {_format_limit(limit, '')}")


def _format_limit(limit: int, unit: str) -> str:
    return "as many as there are" if limit == resource.RLIM_INFINITY else f"{limit:,} {unit}".strip()


def loopback() -> Finding:
    """Check that processes of this host can connect on 127.0.0.1, on a port that the system chooses."""
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
    """Raise an error under conditions in which no cluster can start.

    Args:
        variables: the environment variables.
        backends: the backends of torch.distributed that the ranks may use.
        num_engines: the number of engine processes, including spare ones.

    Raises:
        ConfigError: a variable names a network interface that does not exist.
        ClusterError: the limits of this process, which the cluster inherits, allow too few open files, or
            only too small files.
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
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    needed = max(_FILES_OF_CONTROLLER + _FILES_PER_ENGINE * num_engines, num_open + _FILES_OF_OWNER)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ClusterError(
            f"a process here may have at most {limit} open files and sockets, and a cluster of {num_engines} process(es) "
            f"needs {needed}. Raise the limit before the notebook or the command starts: ulimit -n {_MIN_OPEN_FILES}"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < _MIN_FILE_BYTES:
        raise ClusterError(
            f"a file that is written here may have at most {limit} bytes, and a cluster's logs alone need more. Raise the "
            "limit before the notebook or the command starts: ulimit -f unlimited"
        )


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check the environment variables that affect how ranks communicate and which devices they see."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in variables and (missing := _missing_interfaces(name, variables[name])):
            yield fail(
                "environment",
                f"{name}={variables[name]}, and there is no interface {missing}",
                f"unset {name}, or name one of {', '.join(interfaces())}",
            )
    for name, reason in _NOT_NCCLS.items():
        if name in variables:
            yield warn("environment", f"{name}={variables[name]}: {reason}", f"unset {name}")
    set_variables = [
        f"{name}={value}"
        for name, value in sorted(variables.items())
        if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_VISIBLE", "PYTORCH_"))
        or name == "OMP_NUM_THREADS"
    ]
    yield ok("environment", ", ".join(set_variables) or "nothing of CUDA, NCCL, gloo or torch is set")


def interfaces() -> list[str]:
    """Return the names of the host's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _missing_interfaces(variable: str, value: str) -> str:
    """Return the names in a variable that no interface has. NCCL's names are prefixes, unless the value
    begins with '='; a value that begins with '^' excludes interfaces."""
    if variable == "NCCL_SOCKET_IFNAME":
        if value.startswith("^"):
            return ""
        names = value.lstrip("=").split(",")
        # One matching name is enough for NCCL.
        is_found = any(
            interface == name if value.startswith("=") else interface.startswith(name)
            for name in names
            for interface in interfaces()
        )
        return "" if is_found else ", ".join(names)
    return ", ".join(name for name in value.split(",") if name not in interfaces())


def without_home(path: Path) -> str:
    """Return a path with ~ for the home folder, so that a bug report does not contain the user's name."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def require_torch_for(devices: Sequence[Device]) -> None:
    """Raise a ClusterError if these devices are GPUs and torch is built for the CPU only.

    This is read from torch/version.py, without importing torch. If it cannot be read, the error appears on
    the ranks.
    """
    if any(device.kind == "cuda" for device in devices) and (version := _cpu_only_torch()):
        raise ClusterError(
            f"torch {version} is built for the CPU only, and there are GPUs: {devices[0].name}. Install a torch that is "
            "built for the driver's CUDA (nbgpu doctor says which that is, https://pytorch.org/get-started how), or "
            "start on the CPU: gpus='none', %nbgpu start --gpus none"
        )


def _cpu_only_torch() -> str:
    """Return the version of torch if it is built for the CPU only; empty if it is not, or not known."""
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
