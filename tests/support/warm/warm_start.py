"""Cluster processes of the tests come from a process that has imported torch and MONAI once.

A start of a cluster costs 3.4 s of CPU, 2.3 of them for imports, and the first training of each rank another
6. A session of tests pays that hundreds of times. So each pytest process starts one **template**: a process
that imports what the fork server, the controller and every training need, and forks at request. Where a
process of the tests (pytest itself, a notebook's kernel, `nbgpu train`) would launch a fork server or a
controller, `_ask` asks the template for a fork of it that then runs the same module with the same
arguments, variables, folder and descriptors, in a session of its own. Everything after the imports is
the product's own code.

While the template imports, launches wait for it, so that a test has the same processes alone and among
others. A launch is a cold one, as it is for a person, where the fork would not be the same: other
namespaces, limits, niceness or cores, or a variable that is read while modules are imported (`_READ_LATER`
has those that are not). Tests of the start itself are marked `cold`, and `pytest --cold` starts every
process that way.

The differences that are left: the template is the parent in place of the process that launched, and the
command line is the template's. `owner_of` says for whom a process was forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import launch_hook
import psutil

FOLDER = "NBGPU_TESTS_TEMPLATE"
"""Environment variable: the template's folder, with its socket and a file for each process that it has
forked. Not set: all launches are cold."""

_LOGS = "NBGPU_TESTS_LOGS"
"""Environment variable: the folder in which the logs of clusters stay."""

COLD_LAUNCHES = Path(__file__).resolve().parents[2] / "_artifacts" / "cold-launches.log"
"""The launches for which the template could not be taken, with the reasons."""

_LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]

_folder: Path | None = None
_template: subprocess.Popen[bytes] | None = None

_SOCKET = "requests"
_PID = "pid"
_LOG = "template.log"
_IMPORTS_PATIENCE_S = 120.0
_WARM = ("nbgpu.engine.process.fork_server", "nbgpu.client.engines.controller")
_READ_LATER = (
    *("NBGPU_", "IPP_", "PYTEST_", "SLURM_", "NCCL_", "GLOO_", "WANDB_", "CUDA_VISIBLE_DEVICES"),
    "TORCH_DIST_USE_NCCL2",
    *("JPY_", "JUPYTER", "IPYTHONDIR", "MPLBACKEND", "PYDEVD_", "PYTHONFAULTHANDLER"),
    *("HOME", "TMPDIR", "PATH", "PWD", "OLDPWD", "SHLVL", "_"),
    *("TERM", "COLUMNS", "LINES", "CLICOLOR", "FORCE_COLOR", "NO_COLOR", "PAGER", "GIT_PAGER"),
)
"""The first letters of variables that nothing reads while modules are imported."""


def is_on() -> bool:
    """Whether launches of this process are warm where they can be."""
    return FOLDER in os.environ


def change(launch: Any) -> None:
    """Have `nbgpu.host.launch` ask the template first."""
    cold = launch._started

    def started(
        command: Sequence[str], folder: Path, log: str, variables: Mapping[str, str], *kept: int
    ) -> Any:
        path = folder / "profile" / "log" / log
        module = next((word for word in command if word in _WARM), None)
        process = (module and _ask(command, module, path, variables, kept)) or cold(
            command, folder, log, variables, *kept
        )
        # The folder goes with the cluster; whoever asks why a test failed wants to read the log then.
        with contextlib.suppress(OSError):
            os.link(path, logs() / f"{folder.name}-{log}")
        return process

    launch._started = started


def owner_of(pid: int) -> int | None:
    """The process for which the template has forked this one; None where it has not."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return int((Path(os.environ[FOLDER]) / f"owner-{pid}").read_text())
    return None


def launcher_of(pid: int) -> int:
    """The process that has launched this one."""
    return owner_of(pid) or psutil.Process(pid).ppid()


def family_of(pid: int) -> set[int]:
    """A process, its descendants, and those that the template has forked for one of them."""
    assert _folder is not None
    forked: dict[int, list[int]] = {}
    for file in _folder.glob("owner-*"):
        with contextlib.suppress(OSError, ValueError):
            forked.setdefault(int(file.read_text()), []).append(int(file.name.rpartition("-")[2]))
    family, to_look_at = set(), [pid]
    while to_look_at:
        member = to_look_at.pop()
        family.add(member)
        with contextlib.suppress(psutil.NoSuchProcess):
            to_look_at += [child.pid for child in psutil.Process(member).children()]
        to_look_at += forked.get(member, ())
    return family


def set_up(folder: Path) -> None:
    """Have this process and those that it starts look for the template in a new folder."""
    global _folder
    folder.mkdir()
    (folder / "logs").mkdir()
    os.environ[_LOGS] = str(folder / "logs")
    _folder = folder
    turn(on=True)
    launch_hook.install()
    here = str(Path(__file__).parent)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, *path]))


def logs() -> Path:
    """The folder with second names of the logs of all clusters of this session."""
    return Path(os.environ[_LOGS])


def turn(*, on: bool) -> None:
    """Have launches from now on be warm where they can be, or cold."""
    if on:
        os.environ[FOLDER] = str(_folder)
    else:
        os.environ.pop(FOLDER, None)


def begin() -> None:
    """Start this process's template in the background. Launches wait until it is ready."""
    global _template
    from nbgpu.machine import interpreter

    if _template is not None:
        return
    assert _folder is not None
    command = interpreter.command("template")
    options = command[: command.index("template")]
    with (_folder / _LOG).open("wb") as log:
        _template = subprocess.Popen(
            [*command, str(_folder), str(os.getpid()), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
    part = _folder / f"part-of-{_PID}"
    part.write_text(str(_template.pid))
    part.rename(_folder / _PID)


def wait_until_ready() -> None:
    """Wait until the template has imported all."""
    assert _folder is not None
    _wait_for_template(_folder)
    assert (_folder / _SOCKET).exists(), f"the tests' template has ended:\n{(_folder / _LOG).read_text()}"


def _wait_for_template(folder: Path) -> None:
    """Wait while a template imports."""
    give_up_s = time.monotonic() + _IMPORTS_PATIENCE_S
    while not (folder / _SOCKET).exists() and time.monotonic() < give_up_s:
        try:
            template = psutil.Process(int((folder / _PID).read_text()))
            if template.status() == psutil.STATUS_ZOMBIE:
                return
        except (FileNotFoundError, psutil.NoSuchProcess):
            return
        time.sleep(0.02)


def template_pid() -> int | None:
    """The process of this process's template."""
    return _template.pid if _template is not None else None


def end() -> None:
    """End the template. What it has forked ends as its owners do."""
    global _template
    if _template is not None:
        _template.kill()
        _template.wait()
        _template = None


class Forked:
    """A process that the template has forked, with what is used of a `subprocess.Popen`."""

    def __init__(self, pid: int, status_file: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status_file = status_file

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        if self.returncode is None:
            with contextlib.suppress(FileNotFoundError):
                self.returncode = int(self._status_file.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after so many seconds.
        """
        give_up_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_s is not None and time.monotonic() > give_up_s:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid} of the template", timeout)
            time.sleep(0.005)
        return code


def on_ranks(function: Callable[..., None], world_size: int, *arguments: object) -> None:
    """Call a function of a test's file with (rank, world_size, *arguments) in a process for each rank, and
    wait until all have returned. The arguments are what JSON has."""
    if is_on():
        begin()
        wait_until_ready()
    file = function.__code__.co_filename
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _start("called", [file, function.__name__, json.dumps([rank, world_size, *arguments])], log)
            for rank, log in enumerate(Path(folder, f"{rank}.log") for rank in range(world_size))
        ]
        codes = [process.wait() for process in processes]
        said = "\n".join(log.read_text() for log in sorted(Path(folder).iterdir()))
        assert not any(codes), f"the ranks of {function.__name__} ended with {codes}:\n{said}"


def _start(module: str, arguments: Sequence[str], log: Path) -> Forked | subprocess.Popen[bytes]:
    """Start a module of the tests, which writes to `log`."""
    from nbgpu.machine import interpreter

    command = interpreter.command(module, *arguments)
    variables = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    with log.open("wb") as output:
        return _ask(command, module, log, variables, ()) or subprocess.Popen(
            command, stdout=output, stderr=output, env=variables
        )


def _ask(
    command: Sequence[str], module: str, log: Path, variables: Mapping[str, str], kept: Sequence[int]
) -> Forked | None:
    """The process, forked by the template; None where a fork would not be the same, or there is no
    template yet."""
    if not is_on():
        return None
    folder = Path(os.environ[FOLDER])
    _wait_for_template(folder)
    request = {
        "module": module,
        "arguments": list(command[command.index(module) + 1 :]),
        "variables": dict(variables),
        "surroundings": _surroundings(command[: command.index(module)]),
        "cwd": str(Path("/proc/self/cwd").readlink()),
        "umask": _umask(),
        "kept": list(kept),
        "owner": os.getpid(),
    }
    with socket.socket(socket.AF_UNIX) as connection, log.open("ab") as output:
        try:
            connection.connect(str(folder / _SOCKET))
        except OSError:
            return _noted_as_cold(module, "there is no template")
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], [output.fileno(), *kept])
        connection.sendall(data)
        with connection.makefile() as answered:
            answer = json.loads(answered.read())
    if "pid" not in answer:
        return _noted_as_cold(module, answer["differs"])
    return Forked(answer["pid"], folder / f"status-{answer['pid']}")


def _noted_as_cold(module: str, why: str) -> None:
    """Note a launch that could have been a warm one, for whoever wonders where the time of the tests goes."""
    COLD_LAUNCHES.parent.mkdir(exist_ok=True)
    with COLD_LAUNCHES.open("a") as file:
        file.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')} {module}: {why}\n")


def _surroundings(options: Sequence[str]) -> dict[str, Any]:
    """What a fork has of the template that it cannot change as easily as a folder.

    Args:
        options: how Python is called.
    """
    return {
        "options": list(options),
        "limits": [list(resource.getrlimit(limit)) for limit in _LIMITS],
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "ignored signals": [
            int(n) for n in sorted(signal.valid_signals()) if signal.getsignal(n) == signal.SIG_IGN
        ],
        "namespaces": [str(space.readlink()) for space in sorted(Path("/proc/self/ns").iterdir())],
    }


def _umask() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
