"""What a rank's process does before the first cell.

`python -m nbgpu.engine.boot N` is the nursery: it imports torch and ipyparallel once and forks N engines,
each with the number of its rank. Importing once takes a fraction of the time that N imports on a busy host
take, and runs while ipyparallel's controller starts. `join` then makes an engine a rank of the group.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from nbgpu.engine import whereabouts
from nbgpu.records import CONTROLLER_PID
from nbgpu.vigil import Vigil

OWNER_PID = "NBGPU_OWNER_PID"
"""Environment variable: the process that started the cluster, usually the notebook's kernel."""
CLUSTER_FOLDER = "NBGPU_CLUSTER_FOLDER"
"""Environment variable: the cluster's private folder."""

_NEEDED_BY_EVERY_ENGINE = (
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "ipyparallel.engine.app",
    "nbgpu.engine.group",
    "torch.nn.parallel",
)
_STOP_GRACE_S = 1.0
_SEVER_PATIENCE_S = 5.0


class Sentinel:
    """A thread that can act while the main thread sits in C++, which it may do for minutes.

    When the vigil is over it takes the cluster's folder away and ends this engine. And it takes SIGUSR1, on which it
    severs the rank from its process groups.
    """

    def __init__(self, vigil: Vigil, cluster_folder: Path) -> None:
        self._vigil = vigil
        self._cluster_folder = cluster_folder
        self._signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        self._wakeup = wakeup  # kept open
        self._severed = threading.Condition()
        self._num_severed = 0
        threading.Thread(target=self._watch, name="nbgpu-sentinel", daemon=True).start()

    def take_signals(self) -> None:
        """From now on SIGUSR1 severs. Called on the main thread, when its event loop is set up.

        Python runs a signal's handler on the main thread between two bytecodes, which is too late for a thread
        that sits in C++; but the number of the signal is written to a file descriptor at once.
        """
        previous = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        assert previous == -1, "another part of the engine waits for signals"
        signal.signal(signal.SIGUSR1, lambda *_: None)

    def _watch(self) -> None:
        signals_fd = self._signals.fileno()
        while not self._vigil.over(ready := select.select([*self._vigil.fds, signals_fd], [], [])[0]):
            if signals_fd in ready and signal.SIGUSR1 in self._signals.recv(64):
                import_module("nbgpu.engine.group").sever()
                with self._severed:
                    self._num_severed += 1
                    self._severed.notify_all()
        shutil.rmtree(self._cluster_folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_until_severed(self, times: int) -> None:
        """Waits until the rank was severed so many times: a cut that comes late would hit the next group."""
        with self._severed:
            if not self._severed.wait_for(lambda: self._num_severed >= times, _SEVER_PATIENCE_S):
                raise RuntimeError(f"the rank was severed {self._num_severed} times and not {times}")


_sentinel: Sentinel | None = None


def join(
    rank: int, world_size: int, local_rank: int, backend: str, device: str, rendezvous: str, threads: int
) -> dict[str, Any]:
    """Makes this engine rank `rank` of the first generation, and gives its cells their names.

    Args:
        device: 'cuda:N' among the GPUs that the cluster chose, or 'cpu'.
        rendezvous: folder in which the ranks meet; only the user can enter it.
        threads: CPU threads for torch's operators on this rank.

    Returns:
        What the client says of the rank: pid, torch's version, device name.
    """
    import torch
    import torch.distributed as dist
    from IPython.core.getipython import get_ipython

    from nbgpu.engine import debug, group, interrupts, memory, tracebacks

    torch.set_num_threads(threads)
    assert _sentinel is not None, "join is for engines that the nursery forked"
    _sentinel.take_signals()
    debug.mend_ddp()
    group.remember_what_is_made()
    member = group.Membership(rank, world_size, local_rank, torch.device(device), backend)
    group.form(member, Path(rendezvous))
    shell = get_ipython()
    assert shell is not None, "join is for engines, which have an IPython shell"
    tracebacks.install(shell)
    interrupts.reach_only_the_persons_code(shell.kernel)  # type: ignore[attr-defined]
    memory.watch_cells(shell, rank, member.device)
    shell.events.register("pre_run_cell", lambda _: group.note_traffic())
    shell.events.register("post_run_cell", _note_end_of_cell)
    shell.user_ns.update(
        rank=rank, local_rank=local_rank, world_size=world_size, device=member.device, torch=torch, dist=dist
    )
    # A plain str: torch's own version object would make the client import torch to unpickle it.
    return {"pid": os.getpid(), "torch": str(torch.__version__)}


_last_cell_failed = False


def _note_end_of_cell(result: Any) -> None:
    global _last_cell_failed
    _last_cell_failed = not result.success


def last_cell_failed() -> bool:
    """Whether this rank's last cell raised, and the group was not formed anew since; for a client that has just come."""
    return _last_cell_failed


def regroup(generation: int, num_severed: int) -> list[str]:
    """Forms the group anew after a failure; returns what could not be moved to it (`group.form_again`).

    Args:
        generation: which forming of the group this is.
        num_severed: how often the client has severed the ranks so far.
    """
    from IPython.core.getipython import get_ipython

    from nbgpu.engine import group

    shell = get_ipython()
    assert shell is not None, "regroup is for engines, which have an IPython shell"
    assert _sentinel is not None, "regroup is for engines that the nursery forked"
    _sentinel.wait_until_severed(num_severed)
    global _last_cell_failed
    _last_cell_failed = False
    return group.form_again(generation, shell.user_ns)


def main() -> None:
    """The nursery: forks the engines, and ends with the last of them or when it is told to stop."""
    num_engines = int(sys.argv[1])
    owner_pid = int(os.environ[OWNER_PID])
    folder = Path(os.environ[CLUSTER_FOLDER])
    # Everything that an engine needs anyway, before the fork, so that it is paid for once. torch starts no
    # thread and does not touch a GPU when it is imported, which is what makes forking after it safe.
    gc.disable()  # while modules are imported there is nothing to collect, and looking for it takes time
    for module in _NEEDED_BY_EVERY_ENGINE:
        import_module(module)
    gc.enable()
    gc.freeze()  # keeps the collector from copying the pages that the engines share
    pids: set[int] = set()
    controller_pid = _controller_pid(folder, owner_pid)
    if os.getppid() == owner_pid:  # else it went while this process was importing
        pids.update(_fork_engine(rank, owner_pid, controller_pid) for rank in range(num_engines))

    def stop(*_: int | FrameType | None) -> NoReturn:
        _end(pids)
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        # Only a parent is told how a process ended; the client reads it here.
        with suppress(FileNotFoundError):
            (folder / f"ended-{pid}").write_text(str(os.waitstatus_to_exitcode(status)))
    if os.getppid() != owner_pid:
        # The last process of the cluster: what the others wrote while they ended goes with it.
        shutil.rmtree(folder, ignore_errors=True)


def _controller_pid(folder: Path, owner_pid: int) -> int:
    """The controller's process, once the owner has started it; 0 where the owner goes before that."""
    while os.getppid() == owner_pid:
        with suppress(FileNotFoundError):
            return int((folder / CONTROLLER_PID).read_text())
        time.sleep(0.01)
    return 0


def _fork_engine(rank: int, owner_pid: int, controller_pid: int) -> int:
    """Forks one engine, which runs until it is told to stop; returns its pid."""
    nursery_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    global _sentinel
    folder = Path(os.environ[CLUSTER_FOLDER])
    _sentinel = Sentinel(Vigil(folder, owner_pid, [nursery_pid, controller_pid]), folder)
    whereabouts.answer_from(folder)
    from ipyparallel.engine.app import IPEngine

    IPEngine.launch_instance(argv=["--IPEngine.enable_nanny=False", f"--IPEngine.id={rank}"])
    os._exit(0)


def _end(pids: set[int]) -> None:
    """Asks the engines to stop, and makes those stop that are still there after a moment."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    give_up_s = time.monotonic() + _STOP_GRACE_S
    while pids and time.monotonic() < give_up_s:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        pids.discard(pid)
        if not pid:
            time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    # Under its own name, and not as __main__: the engines import this module, and must find their sentinel in it.
    import_module("nbgpu.engine.boot").main()
