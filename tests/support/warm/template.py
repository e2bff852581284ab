"""The template (warm_start.py): imports once, and forks at request until its owner ends.

It is launched as nbgpu launches what it stands for, with the arguments FOLDER and OWNER_PID.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import warm_start

_THREADS = "OMP_NUM_THREADS"
_FOR_THE_CONTROLLER = (
    "ipyparallel.controller.app",
    "ipyparallel.controller.hub",
    "ipyparallel.controller.scheduler",
)


def main() -> None:
    """Import, then answer requests. Returns in each fork, which goes on as what was asked for."""
    folder, owner_pid, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    owner = os.pidfd_open(owner_pid)
    surroundings = warm_start._surroundings(options)
    variables = dict(os.environ)  # before imports set some
    _import_all()
    requests = socket.socket(socket.AF_UNIX)
    # It is found there only when it listens.
    requests.bind(str(folder / "not-yet"))
    requests.listen(64)
    (folder / "not-yet").rename(folder / warm_start._SOCKET)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([requests, owner, ended], [], [])[0]
        if owner in ready:
            os._exit(0)
        if ended in ready:
            os.read(ended, 4096)
            _note_ends(folder)
        if requests in ready:
            connection, _ = requests.accept()
            try:
                request, descriptors = _read(connection)
            except (OSError, ValueError):
                connection.close()
                continue  # whoever asked was killed meanwhile, as tests do it
            differs = _differences(request, surroundings, variables)
            if differs:
                _answer(connection, {"differs": differs})
            else:
                pid = os.fork()
                if pid == 0:
                    # Their numbers may be those of other descriptors from now on.
                    connection.detach()
                    requests.detach()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _become(request, descriptors)
                    return
                (folder / f"status-{pid}").unlink(missing_ok=True)
                (folder / f"owner-{pid}").write_text(str(request["owner"]))
                _answer(connection, {"pid": pid})
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)


def _import_all() -> None:
    gc.disable()
    fork_server = import_module("nbgpu.engine.process.fork_server")
    fork_server.import_what_every_engine_needs()
    from nbgpu.config import TRAIN_CONFIGS

    import_module("nbgpu.engine.train").get_ready(TRAIN_CONFIGS)
    for module in (*_FOR_THE_CONTROLLER, "nbgpu.client.engines.meeting"):
        import_module(module)
    # They run as the main module of a fork.
    for module in warm_start._WARM:
        sys.modules.pop(module, None)
    gc.enable()
    gc.freeze()


def _read(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
    with connection.makefile("rb") as request:
        data = request.read(int.from_bytes(header, "big"))
    return json.loads(data), list(descriptors)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    # A fork whose owner was killed meanwhile ends by itself.
    with suppress(OSError):
        connection.sendall(json.dumps(answer).encode())


def _differences(request: dict[str, Any], surroundings: dict[str, Any], variables: dict[str, str]) -> str:
    """What a fork would have otherwise, in words; empty where nothing is."""
    theirs = request["surroundings"]
    if theirs != surroundings:
        return ", ".join(f"{name} {theirs[name]}" for name in theirs if theirs[name] != surroundings[name])
    asked = request["variables"]
    names = {name for name in asked.keys() | variables.keys() if asked.get(name) != variables.get(name)}
    differ = sorted(name for name in names - {_THREADS} if not name.startswith(warm_start._READ_LATER))
    if _THREADS in names and not asked.get(_THREADS, "").isdigit():
        differ.append(_THREADS)
    return ", ".join(f"{name}={asked.get(name)!r}" for name in differ)


def _note_ends(folder: Path) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            (folder / f"owner-{pid}").unlink(missing_ok=True)
            part = folder / f"part-of-status-{pid}"
            part.write_text(str(os.waitstatus_to_exitcode(status)))
            part.rename(folder / f"status-{pid}")


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Have all that the process would have if it had been launched."""
    os.setsid()
    kept = request["kept"]
    above = 1 + max([2, *kept, *descriptors])
    output, *received = [_moved(descriptor, above + i) for i, descriptor in enumerate(descriptors)]
    os.closerange(3, above)
    os.closerange(above + len(descriptors), 4096)
    os.dup2(output, 1)
    os.dup2(output, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.close(output)
    for number, descriptor in zip(kept, received, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    threads_before = os.environ.get(_THREADS)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    for name in os.environ.keys() - request["variables"].keys():
        del os.environ[name]
    os.environ.update(request["variables"])
    _call_parent(request["owner"])
    tempfile.tempdir = None
    if threads_before != os.environ.get(_THREADS):
        _use_threads(int(os.environ[_THREADS]))
    import_module("numpy").random.seed()
    module = request["module"]
    sys.argv = [module, *request["arguments"]]


def _use_threads(number: int) -> None:
    """Have as many threads as the libraries would have if they were loaded with this OMP_NUM_THREADS."""
    import_module("threadpoolctl").threadpool_limits(number)
    import_module("torch").set_num_threads(number)


def _call_parent(pid: int) -> None:
    """Have os.getppid return this pid in this process, and the truth in those that it forks."""
    truth = os.getppid
    os.getppid = lambda: pid
    os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", truth))


def _moved(descriptor: int, number: int) -> int:
    os.dup2(descriptor, number, inheritable=False)
    return number


def _run() -> None:
    """Run the module that was asked for to its end, without taking MONAI's modules apart afterwards, which
    takes a second."""
    code = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python itself does it
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
    _run()
