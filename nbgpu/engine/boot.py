"""What a rank's process does before the first cell, and what it can do while its main thread is busy."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nbgpu.backends import NCCL_SAFE, SINGLE
from nbgpu.devices import is_part
from nbgpu.engine import interrupts, whereabouts
from nbgpu.records import Device
from nbgpu.vigil import Vigil

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbgpu.engine.group import Membership

_SEVER_PATIENCE_S = 5.0
_NO_LIMIT_S = 3600


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


def begin(number: int, vigil: Vigil, cluster_folder: Path) -> NoReturn:
    """Runs ipyparallel's engine in this process, under the eyes of a sentinel, until it is told to stop."""
    global _sentinel
    _sentinel = Sentinel(vigil, cluster_folder)
    whereabouts.answer_from(cluster_folder)
    from ipyparallel.engine.app import IPEngine

    IPEngine.launch_instance(
        argv=[
            "--IPEngine.enable_nanny=False",
            f"--IPEngine.id={number}",
            # Whoever starts the cluster gives up in time, and says why; on a busy host the 5 and 10 s that an engine
            # waits by itself are too few.
            f"--IPEngine.timeout={_NO_LIMIT_S}",
            f"--IPEngine.wait_for_url_file={_NO_LIMIT_S}",
        ]
    )
    os._exit(0)


@dataclass(frozen=True)
class Seat:
    """An engine's place in the group, as the client assigns it."""

    rank: int
    world_size: int
    local_rank: int
    backend: str
    rung: str
    """The way to talk that the cluster took, as `nbgpu.backends` names it."""
    device: str
    """'cuda:N' among the GPUs that the cluster chose, or 'cpu'."""
    described: Mapping[str, Any]
    """The fields of that device's `records.Device`."""
    rendezvous: str
    """Folder in which the ranks meet; only the user can enter it."""
    threads: int
    """CPU threads for torch's operators on this rank."""
    collective_timeout_s: float
    memory_limit_bytes: int | None
    """The most that the rank may take on its device; None for no limit."""
    cell_seed: int | None
    """Of the random numbers that cells draw, as `ClusterConfig` has it."""


def join(seat: Mapping[str, Any], generation: int) -> list[str]:
    """Makes this engine a rank of the first group, and gives its cells their names.

    Args:
        seat: the rank's place.
        generation: 0, or how many ways to talk were tried before in vain.

    Returns:
        The variables that were set for the way to talk, as 'NAME=value'.
    """
    from nbgpu.engine import group

    taken = _take(Seat(**seat))
    group.form(_membership(taken), Path(taken.rendezvous), generation)
    return _settings_of_rung


def rehearse(seat: Mapping[str, Any]) -> None:
    """Gives an engine that takes over a rank its names, and a group in which every collective does nothing.

    In it the cells that the rank had seen can run again with nobody at the other end; `join_again` ends it.
    """
    from nbgpu.engine import group

    group.form_alone(_membership(_take(Seat(**seat))))


def join_again(
    seat: Mapping[str, Any], generation: int, num_severed: int, healthy: Sequence[int]
) -> list[str]:
    """Takes part in the next generation of the group; every rank calls it, also one that has just come.

    Args:
        seat: the rank's place.
        generation: which forming of the group this is.
        num_severed: how often the client has severed this engine so far.
        healthy: the ranks whose state is to be trusted where the ranks differ.

    Returns:
        A line for each variable that could not be moved to the new group, or whose state differed.
    """
    from nbgpu.engine import belongings, group, replicas

    assert _sentinel is not None, "join_again is for engines that the nursery forked"
    _sentinel.wait_until_severed(num_severed)
    taken = _take(Seat(**seat))
    variables = _shell().user_ns
    lost = [
        f"this belonged to the old process group; make it again: {line}"
        for line in belongings.how_to_make_again(variables)
    ]
    group.form_again(_membership(taken), Path(taken.rendezvous), generation)
    global _last_cell_failed
    _last_cell_failed = False
    return lost + replicas.move(variables, healthy)


_last_cell_failed = False


def _note_end_of_cell(result: Any) -> None:
    global _last_cell_failed
    _last_cell_failed = not result.success


def last_cell_failed() -> bool:
    """Whether this rank's last cell raised, and the group was not formed anew since; for a client that has just come."""
    return _last_cell_failed


_taken: Seat | None = None
_settings_of_rung: list[str] = []


def _settle_variables(seat: Seat) -> None:
    """Sets the environment of the way to talk, before CUDA, NCCL or gloo read it."""
    from nbgpu.engine import safe_nccl

    device = Device(**seat.described)
    if is_part(device):
        os.environ["CUDA_VISIBLE_DEVICES"] = device.uuid
    if seat.rung == NCCL_SAFE:
        _settings_of_rung[:] = safe_nccl.apply()
    if seat.rung == SINGLE:
        # It talks to nobody, so that it does not matter which interface the person named for that.
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _take(seat: Seat) -> Seat:
    """Prepares this engine to be a rank, once."""
    global _taken
    if _taken is not None:
        assert _taken == seat, f"this engine is rank {_taken.rank} already"
        return seat
    import torch
    import torch.distributed as dist

    from nbgpu.engine import (
        answers,
        bars,
        cell_options,
        clearing,
        debug,
        debugger,
        group,
        habits,
        import_times,
        memory,
        memory_limit,
        questions,
        quiet,
        replicas,
        seeds,
        tracebacks,
    )

    _taken = seat
    _settle_variables(seat)
    torch.set_num_threads(seat.threads)
    seeds.seed_cells(seat.cell_seed, seat.rank)
    assert _sentinel is not None, "only engines that the nursery forked become ranks"
    _sentinel.take_signals()
    debug.mend_ddp()
    import_times.note()
    group.note_connections()
    replicas.note()
    shell = _shell()
    tracebacks.install(shell)
    habits.take_over(shell)
    clearing.clear_only_own_displays(shell)
    questions.go_to_the_notebook(shell, Path(seat.rendezvous), seat.rank)
    answers.answer_cells(shell.kernel)  # type: ignore[attr-defined]
    cell_options.follow(shell.kernel)  # type: ignore[attr-defined]
    bars.draw_as_text()
    interrupts.reach_only_the_persons_code(shell.kernel)  # type: ignore[attr-defined]
    # After a cell that failed, ipykernel drops what comes before it has come to rest. The client sends the call that
    # forms the group anew, and the next cell, as soon as it has the answer. (A private name, from 6.29 to 7.4.)
    shell.kernel._abort_queues = lambda *_: None  # type: ignore[attr-defined]
    quiet.say_only_what_is_heard(shell.kernel)  # type: ignore[attr-defined]
    bars.keep_in_order_with_lines(shell)
    memory.watch_cells(shell, seat.rank, torch.device(seat.device))
    debugger.install(shell)
    if seat.memory_limit_bytes is not None:
        memory_limit.enforce(seat.memory_limit_bytes, torch.device(seat.device))
    shell.events.register("pre_run_cell", lambda _: group.note_traffic())
    shell.events.register("post_run_cell", _note_end_of_cell)
    given = {
        "rank": seat.rank,
        "local_rank": seat.local_rank,
        "world_size": seat.world_size,
        "device": torch.device(seat.device),
        "torch": torch,
        "dist": dist,
    }
    # Not the person's own: `%who` and `%nbgpu vars` leave them out.
    shell.push(given, interactive=False)
    return seat


def _membership(seat: Seat) -> Membership:
    import torch

    from nbgpu.engine.group import Membership

    return Membership(
        seat.rank,
        seat.world_size,
        seat.local_rank,
        torch.device(seat.device),
        seat.backend,
        rung=seat.rung,
        timeout_s=seat.collective_timeout_s,
        described=Device(**seat.described),
    )


def _shell() -> InteractiveShell:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None, "an engine has an IPython shell"
    return shell
