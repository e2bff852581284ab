"""The work of a rank's process before its first cell, and the thread that acts while its main thread is
busy."""

from __future__ import annotations

import functools
import logging
import multiprocessing.process
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from nbgpu.engine.group import group, meeting, own_groups, safe_nccl, simulated_link, torch_settings
from nbgpu.engine.ipykernel import input_requests, remains, shell, stacks
from nbgpu.engine.process import torchrun_variables
from nbgpu.engine.process.rank_spec import RankSpec
from nbgpu.machine import descendants, interpreter, numa
from nbgpu.machine.devices import is_part
from nbgpu.machine.processes import is_ending
from nbgpu.machine.transports import NCCL_SAFE, SINGLE
from nbgpu.machine.unix_sockets import MAX_PATH_BYTES, short_path
from nbgpu.machine.watched import LifetimeWatch
from nbgpu.protocol.cluster_processes import HOST_FOLDER, engine_name
from nbgpu.protocol.records import Device, GivenUp
from nbgpu.text.ranks import count_of_ranks, named_ranges

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_log = logging.getLogger("nbgpu.engine")

_NO_LIMIT_S = 3600
_GRACE_S = 0.5
"""The time between SIGTERM and SIGKILL for processes that the engine has started."""
_REPLACING_PATIENCE_S = 60.0
"""How long the search for references to groups that have ended may take."""


class Sentinel:
    """A thread that can act while the main thread is in C++, possibly for minutes.

    When its lifetime is over, the sentinel ends this engine and the processes that the engine has started. To
    a socket in the cluster's folder the client sends the generation of the group that is given up, and the
    sentinel frees the rank from the collectives of this generation. It uses no signals, because code on the
    rank may change the handlers of signals.

    Args:
        lifetime: the processes without which the engine is of no use.
        cluster_folder: the cluster's folder on this host.
    """

    def __init__(self, lifetime: LifetimeWatch, cluster_folder: Path) -> None:
        self._lifetime = lifetime
        self._cluster_folder = cluster_folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The path of a Unix socket has MAX_PATH_BYTES at most.
        with short_path(cluster_folder) as folder:
            path = folder / GivenUp.socket_name(os.getpid())
            path.unlink(missing_ok=True)  # of an engine that has ended, whose pid this one was given
            self._socket.bind(str(path))
        self._fork_server_pid = os.getppid()
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._watch, name="nbgpu-sentinel", daemon=True).start()

    def _close_in_child(self) -> None:
        """Close the sentinel's descriptors in a child that code on the rank has forked: the child has no
        sentinel, and must not keep the rank's sockets open."""
        self._socket.close()
        # The list is emptied, because this runs in a child of the child as well, where other files may have
        # these descriptors.
        while self._lifetime.fds:
            with suppress(OSError):
                os.close(self._lifetime.fds.pop())

    def _watch(self) -> None:
        """Serve the client until this engine's lifetime is over, then end the engine and the processes that
        it has started."""
        try:
            self._serve()
        except (OSError, ValueError) as error:
            # Code on the rank has closed descriptors that are not its own, and those of ipyparallel with
            # them.
            _log.error(
                "the rank's process %d ends: its sentinel has lost its descriptors (%s)", os.getpid(), error
            )
        try:
            descendants.end_all_but_those_that_finish(_GRACE_S)
            # While the fork server lives, it removes the folder when all engines have ended. A fork server
            # that was killed is still the parent for a moment after its pipe has closed.
            if os.getppid() != self._fork_server_pid or is_ending(self._fork_server_pid):
                shutil.rmtree(self._cluster_folder, ignore_errors=True)
        except OSError:
            # For example, this process has too many open files. It ends all the same.
            _log.exception("what the rank's process %d has started may be left over", os.getpid())
        finally:
            # SIGKILL, because the main thread may be in C++ and not return to Python for any other signal.
            os.kill(os.getpid(), signal.SIGKILL)

    def _serve(self) -> None:
        """Give up each generation of the group that the client sends, until the lifetime is over."""
        socket_fd = self._socket.fileno()
        while not self._lifetime.over(ready := select.select([*self._lifetime.fds, socket_fd], [], [])[0]):
            if socket_fd in ready:
                message = self._socket.recv(GivenUp.MAX_BYTES)
                try:
                    group.give_up(int(message))
                except Exception:  # noqa: BLE001 - it is logged
                    # Without this thread nothing could free or end the rank any more.
                    _log.exception("generation %r of the process group could not be given up", message)


_sentinel: Sentinel | None = None


def begin(number: int, lifetime: LifetimeWatch, cluster_folder: Path) -> NoReturn:
    """Run ipyparallel's engine in this process, watched by a sentinel, until the client ends it.

    Args:
        number: ipyparallel's id of the engine.
        lifetime: the processes without which the engine is of no use.
        cluster_folder: the cluster's folder on this host.
    """
    global _sentinel
    descendants.adopt_orphans()
    _sentinel = Sentinel(lifetime, cluster_folder)
    stacks.start_answering(cluster_folder)
    _redirect_multiprocessing_sockets(cluster_folder)
    from ipyparallel.engine import app

    from nbgpu.engine.ipykernel.kernel import RankKernel

    # An engine makes its kernel of the class that it finds under this name.
    app.Kernel = RankKernel

    class Engine(app.IPEngine):  # type: ignore[misc]
        """An engine that looks for modules where a notebook's kernel does, and that SIGTERM ends like any
        process."""

        def init_signal(self) -> None:
            """Leave SIGTERM its default action, which ends a process at once. ipyparallel's handler ends an
            engine only when the main thread gets to it, which may be a cell later, and it does not end forked
            children, which inherit it."""
            super().init_signal()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def to_work_dir(self) -> None:
            """Stay in the present folder. ipyparallel would change to its own, and put it before the standard
            library on the import path."""

        def init_engine(self) -> None:
            """Set up the engine, and put the working folder behind the standard library on the import
            path."""
            super().init_engine()
            # ipyparallel has put the working folder before the standard library here, too.
            sys.path.remove("")
            interpreter.look_in([""])

    Engine.launch_instance(
        argv=[
            "--IPEngine.enable_nanny=False",
            f"--IPEngine.id={number}",
            # The process that starts the cluster gives up in time, with an error message. On a busy host the
            # 5 and 10 s that an engine waits by default are too short.
            f"--IPEngine.timeout={_NO_LIMIT_S}",
            f"--IPEngine.wait_for_url_file={_NO_LIMIT_S}",
            # A silent controller may have been stopped together with the host. The sentinel notices its end.
            "--IPEngine.max_heartbeat_misses=0",
            f"--Session.session={engine_name(os.getpid(), os.environ.get(HOST_FOLDER, ''))}",
        ]
    )
    os._exit(0)


def _redirect_multiprocessing_sockets(folder: Path) -> None:
    """Have multiprocessing put its sockets into the cluster's folder: its own temporary folder would stay
    when an engine is killed."""
    temporary = tempfile.mkdtemp(prefix="pymp-", dir=folder)
    if len(f"{temporary}/listener-12345678".encode()) > MAX_PATH_BYTES:
        # The descriptor stays open for the engine's life, and the path has the engine's pid, because its
        # worker processes use the folder as well.
        descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        temporary = f"/proc/{os.getpid()}/fd/{descriptor}"
    # multiprocessing looks here first, and would otherwise make a folder of its own at the first socket.
    multiprocessing.process.current_process()._config["tempdir"] = temporary  # type: ignore[attr-defined]


def join(spec: Mapping[str, Any], generation: int) -> list[str]:
    """Make this engine a rank of the first group, and define `rank`, `world_size`, `device` and the like for
    its cells.

    Args:
        spec: the fields of the rank's RankSpec.
        generation: the number of this forming of the group: the number of transports that were tried before
            without success.

    Returns:
        The environment variables that were set for the transport, as 'NAME=value'.
    """
    _form(group.form, _become_rank(RankSpec(**spec)), generation)
    return _settings_of_transport


def become_rank_for_replay(spec: Mapping[str, Any]) -> None:
    """Make an engine the successor of a rank that has died, in a group of torch's backend 'fake', in which
    every collective does nothing.

    In this group the rank's earlier cells can run again without the other ranks. `join_again` ends the group.
    """
    group.form_alone(_membership(_become_rank(RankSpec(**spec))))


def join_again(spec: Mapping[str, Any], generation: int, healthy: Sequence[int]) -> list[str]:
    """Take part in the next generation of the group, after a failure or a change of the number of ranks. A
    collective: every rank calls it, a new one included.

    Args:
        spec: the fields of the rank's RankSpec.
        generation: the number of this forming of the group.
        healthy: the ranks whose state is trusted where the ranks differ.

    Returns:
        A line for each variable that could not be moved to the new group, or whose state differed.
    """
    from nbgpu.engine.variables import library_objects, references, replicas, sharded, user_groups
    from nbgpu.engine.variables.persons_objects import run_limited

    global _spec
    new_spec = RankSpec(**spec)
    # Apply the changes of the spec in a process that was a rank before.
    reason = "this belonged to the old process group; make it again"
    variables = shell.current().user_ns
    library_lines = []
    is_resized = _spec is not None and _spec.world_size != new_spec.world_size
    if _spec is not None and _spec != new_spec:
        reason = _reason_after_resize(_spec.world_size, new_spec.world_size, bool(new_spec.interface))
        _adopt_spec(_spec, new_spec, shell.current())
        if is_resized:
            library_lines = library_objects.how_to_make_again(variables)
        _spec = new_spec
    _become_rank(new_spec)
    # List the variables that belong to the groups that are about to end.
    owned = user_groups.owned(variables)
    # With another number of ranks no group of the person's can be as it was.
    persons_groups = [] if is_resized else own_groups.living()
    before: Any = dist.group.WORLD
    name_before = None if before is None else before.group_name
    _form(group.form_again, new_spec, generation)
    remains.forget_failure()
    with simulated_link.not_simulated():
        # Make the person's groups again, and put each in the place of the one that has ended.
        pairs = group.make_own_groups_again(persons_groups)
        now: Any = dist.group.WORLD
        if now.group_name == name_before:
            pairs.append((before, now))
        # The search goes through all objects of the process, which may take long, and so has a time limit.
        _, problem = run_limited(None, functools.partial(references.replace, pairs), _REPLACING_PATIENCE_S)
        # Move the models, and list the variables that cannot be moved. A rank that was replaced has no shard
        # of a sharded variable.
        moved = {new.group_name for _, new in pairs}
        lost = sharded.reset()
        if problem:
            lost.append(f"some variables may still hold a group that has ended ({problem})")
        lost += [f"{reason}: {line}" for line in [*user_groups.lost(owned, moved), *library_lines]]
        lost += sharded.unequal([thing for thing in owned if thing.groups <= moved])
        lost += replicas.move(variables, healthy, before)
    # This function may not keep the old groups alive.
    ended = [before, *(old for old, _ in pairs)]
    del persons_groups, before, pairs, owned
    group.let_go(ended)
    return lost


_spec: RankSpec | None = None
_settings_of_transport: list[str] = []


def _set_environment(spec: RankSpec) -> None:
    """Set the environment of the transport before CUDA, NCCL or gloo read it."""
    device = Device(**spec.described)
    # The cluster may have got other GPUs, and another number of ranks, since the fork server was started.
    os.environ["CUDA_VISIBLE_DEVICES"] = device.uuid if is_part(device) else spec.visible_gpus
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    torchrun_variables.set_from_spec(spec)
    if spec.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", spec.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", spec.interface)
    if spec.transport == NCCL_SAFE:
        _settings_of_transport[:] = safe_nccl.apply(one_host=not spec.interface)
    if spec.transport == SINGLE:
        # A single rank talks to nobody, so the interface that the person named does not matter.
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _become_rank(spec: RankSpec) -> RankSpec:
    """Make this engine the rank of this spec, and install everything that a rank needs; do nothing if it is
    that rank already."""
    global _spec
    if _spec is not None:
        assert _spec == spec, f"this engine is rank {_spec.rank} already"
        return spec
    assert _sentinel is not None, "only engines that the fork server forked become ranks"
    from nbgpu.engine.process.installers import INSTALLERS

    _spec = spec
    # Before torch is used, because CUDA, NCCL and gloo read it once.
    _set_environment(spec)
    for install in INSTALLERS:
        install(spec, shell.current())
    return spec


def _form(
    form: Callable[[group.Membership, meeting.Store, int], None], spec: RankSpec, generation: int
) -> None:
    """Form a generation of the group with `group.form` or `group.form_again`, set MASTER_ADDR and
    MASTER_PORT, and begin the simulation of a link, if any. A collective."""
    store = meeting.open_store(spec.store, Path(spec.store_keys), generation)
    torchrun_variables.publish_master(spec, store)
    form(_membership(spec), store, generation)
    torchrun_variables.set_master(store)
    simulated_link.begin(Path(spec.folder), generation)


def _membership(spec: RankSpec) -> group.Membership:
    """Return this rank's place in the process group."""
    return group.Membership(
        spec.rank,
        spec.world_size,
        spec.local_rank,
        torch.device(spec.device),
        spec.backend,
        transport=spec.transport,
        simulated=spec.simulated,
        timeout_s=spec.collective_timeout_s,
        described=Device(**spec.described),
    )


def _reason_after_resize(num_before: int, num_now: int, on_several_hosts: bool) -> str:
    """Return the beginning of a message about a variable that belonged to a group with another number of
    ranks. The line of code that made the variable completes the message."""
    gone = ""
    if num_now < num_before and on_several_hosts:
        # A host that is lost need not have had the last ranks.
        gone = ", without what the lost ranks held of it"
    elif num_now < num_before:
        gone = f", without what {named_ranges(range(num_now, num_before))} held of it"
    return f"this belonged to the process group of {count_of_ranks(num_before)}; make it again for {num_now}{gone}. It was"


def _adopt_spec(before: RankSpec, spec: RankSpec, rank_shell: InteractiveShell) -> None:
    """Apply the differences between the old and the new spec of this rank: the names `rank` and `world_size`,
    torchrun's variables, threads, cores and memory limit.

    Values that the person has changed stay.

    Raises:
        ConfigError: the rank has more memory than the new limit allows.
    """
    from nbgpu.engine.memory import limit as memory_limit
    from nbgpu.engine.variables import replicas

    assert spec.described == before.described, f"rank {before.rank} has another device"
    if spec.memory_limit_bytes is not None and spec.memory_limit_bytes != before.memory_limit_bytes:
        memory_limit.enforce(spec.memory_limit_bytes, torch.device(spec.device))
    numa.follow(spec.binding)
    if torch.get_num_threads() == before.threads:
        torch.set_num_threads(spec.threads)
    torch_settings.note_threads(spec.threads)
    if os.environ.get("OMP_NUM_THREADS") == str(before.threads):
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    torchrun_variables.set_from_spec(spec)
    for name, then, now in (
        ("rank", before.rank, spec.rank),
        ("world_size", before.world_size, spec.world_size),
    ):
        present = rank_shell.user_ns.get(name)
        if type(present) is int and present == then:
            rank_shell.push({name: now}, interactive=False)
    if spec.rank != before.rank:
        input_requests.follow(Path(spec.folder), spec.rank)
    replicas.report_again()
