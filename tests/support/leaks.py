"""A test leaves the machine as it found it: fails whatever leaves something behind.

Looked at are processes, threads, sockets, entries of the temporary folder, and environment variables, around
every test, around every module (after its module-scoped fixtures are gone) and around the whole session. What
a longer-lived fixture starts before a test is there before and after it, and so is nobody's leak; it counts
when that fixture's own scope ends. A fixture whose belongings change while tests use it, such as a cluster
that replaces an engine, says which are its own with `holding`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import warm_start

GRACE_S = 60.0
"""How long something may take to go away by itself: a socket is closed by another thread, a process exits."""

MARKER = "NBGPU_TEST_SESSION"
"""Every process of the session inherits this variable, so that one is found even when its parent has died."""

KINDS = ("process", "thread", "socket", "temp", "variable")

_PASSING_VARIABLES = frozenset(
    {"PYTEST_CURRENT_TEST", "PYDEVD_USE_FRAME_EVAL", "CUBLAS_WORKSPACE_CONFIG", warm_start.FOLDER}
)
"""The second is set by debugpy, which ipykernel 6 imports, and the third by MONAI, for good, when it is
imported first. The last is not there during tests that are marked `cold`."""
_LASTING_THREADS = frozenset({"TMonitor", "GarbageCollectorThread"})
"""Threads that a library keeps for the life of the process: tqdm's from the first progress bar on, pyzmq's
from the first message on that it sends without copying it."""

_lasting_processes = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python starts one of these when it is first needed and ends it when the interpreter ends."""


@dataclass(frozen=True)
class Leftover:
    """One thing that was not there before. `key` tells it from all others of its kind."""

    kind: str
    key: str
    text: str
    pid: int | None = None


Snapshot = dict[str, Leftover]

_reported: set[str] = set()
"""Threads and sockets that were reported once: they cannot be taken away, and are not to be reported
again."""

_holders: list[Callable[[Leftover], bool]] = []


@contextlib.contextmanager
def holding(is_mine: Callable[[Leftover], bool]) -> Iterator[None]:
    """While this is open, what `is_mine` answers True for is not a leak, whenever it appeared."""
    _holders.append(is_mine)
    try:
        yield
    finally:
        _holders.remove(is_mine)


@contextlib.contextmanager
def holding_family_of(pid: int) -> Iterator[None]:
    """While this is open, no descendant of this process is a leak, such as an engine that took another's
    place."""

    def is_descendant(leftover: Leftover) -> bool:
        try:
            return leftover.pid is not None and pid in set(_family_above(leftover.pid))
        except psutil.NoSuchProcess:
            return True  # it has ended meanwhile

    with holding(is_descendant):
        yield


@contextlib.contextmanager
def holding_connections_to(ports: Collection[int]) -> Iterator[None]:
    """While this is open, the only connection to one of these ports is not a leak: on a busy machine ZeroMQ
    connects some time after it was asked to, and again where a connection was lost. A second one is."""

    def is_the_only_one(leftover: Leftover) -> bool:
        if leftover.kind != "socket":
            return False
        there = _connections()
        remote = there[leftover.text].raddr if leftover.text in there else None
        return bool(remote) and remote.port in ports and [c.raddr for c in there.values()].count(remote) == 1

    with holding(is_the_only_one):
        yield


def _family_above(pid: int) -> Iterator[int]:
    """The parents of a process, and those for which the template has forked one of them."""
    for process in [psutil.Process(pid), *psutil.Process(pid).parents()]:
        yield process.pid
        if owner := warm_start.owner_of(process.pid):
            yield owner
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from _family_above(owner)


def session_marker() -> str:
    return os.environ[MARKER]


def snapshot(kinds: tuple[str, ...] = KINDS) -> Snapshot:
    """What there is now of each kind, by key."""
    found: list[Leftover] = []
    if "process" in kinds:
        found += _processes()
    if "thread" in kinds:
        found += _threads()
    if "socket" in kinds:
        found += _sockets()
    if "temp" in kinds:
        found += [
            Leftover("temp", f"temp {path}", f"{path} in the temporary folder")
            for path in Path(tempfile.gettempdir()).iterdir()
        ]
    if "variable" in kinds:
        found += [
            Leftover("variable", f"variable {name}={value}", f"environment variable {name}={value!r}")
            for name, value in os.environ.items()
            if name not in _PASSING_VARIABLES
        ]
    return {leftover.key: leftover for leftover in found}


def _processes() -> Iterator[Leftover]:
    own = os.getpid()
    there = dict(_pids_with_stat())
    children: dict[int, list[int]] = {}
    for pid, stat in there.items():
        children.setdefault(stat.parent, []).append(pid)
    _is_marked.update({key: _has_marker(key[0]) for key in _keys(there) if key not in _is_marked})
    for gone in _is_marked.keys() - _keys(there):
        del _is_marked[gone]
    candidates = {pid for (pid, _), is_marked in _is_marked.items() if is_marked}
    of_family = list(children.get(own, ()))
    while of_family:
        pid = of_family.pop()
        candidates.add(pid)
        of_family += children.get(pid, ())
    for pid in sorted(candidates - _ancestors - {own, warm_start.template_pid()}):
        # A zombie has ended, and holds nothing but its number.
        if there[pid].state == "Z":
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(name in command for name in _lasting_processes):
                continue
            yield Leftover(
                "process",
                f"process {pid} {there[pid].started_ticks}",
                f"process {pid}: {command[:300].strip() or Path(f'/proc/{pid}/comm').read_text().strip()}",
                pid,
            )


class _Stat(NamedTuple):
    """What the kernel says of a process (proc_pid_stat(5))."""

    state: str
    parent: int
    started_ticks: int


_is_marked: dict[tuple[int, int], bool] = {}
"""Whether a process has the session's marker, by its number and start: it has it from its beginning or never,
and to read the variables of all processes around every test took a tenth of all the tests' time."""


def _keys(there: Mapping[int, _Stat]) -> set[tuple[int, int]]:
    return {(pid, stat.started_ticks) for pid, stat in there.items()}


def _pids_with_stat() -> Iterator[tuple[int, _Stat]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name of the program, in brackets, may have blanks and brackets.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield int(folder.name), _Stat(fields[0], int(fields[1]), int(fields[19]))


def _has_marker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # A session inside a session (the tests of this file) has a marker that begins with the outer one's.
        beginning = f"{MARKER}={session_marker()}".encode()
        return any(
            variable.startswith(beginning)
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    return False


def _threads() -> Iterator[Leftover]:
    for thread in threading.enumerate():
        if type(thread).__name__ not in _LASTING_THREADS and thread is not threading.main_thread():
            yield Leftover(
                "thread", f"thread {thread.ident} {id(thread)}", f"thread {thread.name!r} ({thread!r})"
            )


def _sockets() -> Iterator[Leftover]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            # The inode, because a number of a descriptor is given again to the next that is opened.
            inode = str(descriptor.readlink())
            if inode.startswith("socket:"):
                yield Leftover("socket", f"socket {inode}", inode)


def _connections() -> dict[str, Any]:
    """The connections of this process (psutil), by what the link of their descriptor says."""
    found = {}
    for connection in psutil.Process().net_connections(kind="all"):
        if connection.fd >= 0:
            with contextlib.suppress(OSError):
                found[str(Path(f"/proc/self/fd/{connection.fd}").readlink())] = connection
    return found


def _described(leftover: Leftover) -> str:
    """The text of a leftover, for a message. What a socket is connected to takes long to find out."""
    if leftover.kind == "socket" and (connection := _connections().get(leftover.text)) is not None:
        return f"{connection.status} socket {connection.laddr} -> {connection.raddr} ({leftover.text})"
    return leftover.text


def _left_behind(before: Snapshot, kinds: tuple[str, ...]) -> list[Leftover]:
    """What is there now, was not there before, and is held by nobody."""
    now = snapshot(kinds)
    gone = [
        Leftover("variable", key, f"{leftover.text} was removed or changed")
        for key, leftover in before.items()
        if leftover.kind == "variable" and key not in now
    ]
    new = [leftover for key, leftover in now.items() if key not in before and key not in _reported]
    return [
        leftover
        for leftover in gone + new
        if leftover.kind in kinds and not any(is_mine(leftover) for is_mine in _holders)
    ]


def _end(leftover: Leftover) -> None:
    """Takes a leftover away where that is possible, so that the next test is not blamed or disturbed."""
    if leftover.kind == "process" and leftover.pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(leftover.pid).kill()
    elif leftover.kind == "temp":
        path = Path(leftover.key.removeprefix("temp "))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    elif leftover.kind in {"thread", "socket"}:
        _reported.add(leftover.key)


@contextlib.contextmanager
def free_of(*kinds: str) -> Iterator[None]:
    """Fails the test when the block leaves behind anything of these kinds; of any kind when none is named.

    with free_of("process", "socket"):
        with nbgpu.Cluster(ranks=2):
            ...
    """
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"{sorted(unknown)} are no kinds of leftovers. Kinds: {', '.join(KINDS)}")
    watched = kinds or KINDS
    before = snapshot(watched)
    environment = dict(os.environ)
    yield
    deadline_s = time.monotonic() + GRACE_S
    while left := _left_behind(before, watched):
        if time.monotonic() > deadline_s:
            listed = "\n".join(f"  {_described(leftover)}" for leftover in left)
            for leftover in left:
                _end(leftover)
            if any(leftover.kind == "variable" for leftover in left):
                _restore(environment)
            pytest.fail(f"left behind:\n{listed}", pytrace=False)
        # Sockets and processes may hang on a cycle of objects that nobody refers to any more.
        gc.collect()
        time.sleep(0.05)


def _restore(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment) - _PASSING_VARIABLES:
        del os.environ[name]
    os.environ.update({n: v for n, v in environment.items() if n not in _PASSING_VARIABLES})


def seen_by_ranks() -> Path:
    """A folder of the session for small files, which ranks see also where they are on test hosts."""
    return Path(tempfile.gettempdir()) / "seen-by-ranks"


def _begin_session() -> Path:
    """Gives this session a marker and a temporary folder of its own, which engines inherit too."""
    # pytest's own folders stay where they always are, so that a failed test's tmp_path can be looked at.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ[MARKER] = "/".join(filter(None, [os.environ.get(MARKER), uuid.uuid4().hex[:12]]))
    folder = Path(tempfile.mkdtemp(prefix="nbgpu-test-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # torch keeps its compiler's cache there, for all of the session to share.
    compiler_cache = folder / "torchinductor"
    compiler_cache.mkdir()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiler_cache)
    seen_by_ranks().mkdir()
    # The person's own clusters are no test's business.
    state = folder / "state"
    state.mkdir()
    os.environ["NBGPU_STATE_DIR"] = str(state)
    warm_start.set_up(folder / "template")
    return folder


_ancestors = frozenset(parent.pid for parent in psutil.Process().parents())
_session_folder = _begin_session()


def pytest_unconfigure() -> None:
    warm_start.end()
    shutil.rmtree(_session_folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing() -> Iterator[None]:
    with free_of():
        yield


@pytest.fixture(scope="module", autouse=True)
def module_leaves_nothing(session_leaves_nothing: None) -> Iterator[None]:
    with free_of():
        yield


@pytest.fixture(autouse=True)
def test_leaves_nothing(module_leaves_nothing: None) -> Iterator[None]:
    with free_of():
        yield
