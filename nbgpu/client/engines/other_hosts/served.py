"""A folder of this host for ranks of other hosts that do not see it.

Each such host has a copy of the folder (host/served_folder.py). A thread brings here what the ranks write
there, in pieces that take a fraction of a second each, so that Stop and other calls of the host do not wait.
A checkpoint gets its name here once all of it has come. No host is asked for more before its last answer has
come: a slow one delays itself alone. Nothing is deleted here because it is missing there: a host that ends
removes its copy, and that must not look like the removal of checkpoints.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nbgpu.client.engines.other_hosts.arriving_files import ArrivingFiles
from nbgpu.client.engines.other_hosts.other_host import HostLostError, OtherHost
from nbgpu.errors import ClusterError
from nbgpu.machine.signals import take_interrupt
from nbgpu.protocol.calls import Call
from nbgpu.protocol.served import Changes, Piece
from nbgpu.run_folder.checkpoint_files import BEST, MANIFEST
from nbgpu.text.sizes import in_words

_log = logging.getLogger("nbgpu.run")

_PERIOD_S = 0.25
_REST = 5
"""A host rests so many times as long as it has worked to find out what is new."""
_POLL_PERIOD_S = 0.02
_RETRY_S = 1.0
_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES = 2**18, 2**16, 2**23
_SHORT_S, _LONG_S = 0.1, 0.3
"""A piece that took less time is followed by a larger one, and a piece that took more by a smaller one."""
_NO_PROGRESS_S = 60.0
_PUT_PATIENCE_S = 60.0
_PUT_BYTES = 2**20
_WORTH_SAYING_BYTES = 2**26


@dataclass
class _Source:
    """A host, and how far its copy has been read."""

    host: OtherHost
    asked: Any = None
    """The request that is not answered yet; None if there is none."""
    asked_mono_s: float = 0.0
    heard_s: float = 0.0
    """When its last answer was asked for, in seconds since the epoch."""
    due_mono_s: float = 0.0
    num_bytes: int = _FIRST_BYTES
    num_bytes_here: dict[str, int] = field(default_factory=dict)
    """By file how many bytes are here, where that is fewer than were sent."""
    num_bytes_left: int = 0
    has_new_checkpoint: bool = False
    is_last: bool = False
    """Whether it was asked after the ranks had ended."""
    is_done: bool = False
    problem: str = ""


@dataclass
class _Relayed:
    """A file of this host that grows, and of which another host needs each line."""

    path: Path
    name: str
    """The file in the copy."""
    offset_bytes: int = 0


class Served:
    """A folder, served for the hosts that do not see it; if all of them see it, every call does nothing.

    Args:
        folder: the folder, an absolute path.
        blind: the hosts that do not see it.
    """

    def __init__(self, folder: Path, blind: Sequence[OtherHost]) -> None:
        self.folder = folder
        self._sources = [_Source(host) for host in blind]
        self._files = ArrivingFiles(folder)
        self._closing = threading.Event()
        """Set once the ranks have ended: what is left is brought here."""
        self._gives_up = threading.Event()
        """Set when what is left is not waited for any more."""
        self._thread: threading.Thread | None = None
        self._on_file: Callable[[str], None] = lambda name: None
        self._on_checkpoints: Callable[[], None] = lambda: None
        self._on_answer: Callable[[str], None] = lambda host: None
        self._relay_to: OtherHost | None = None
        """The host that gets the lines of `_relayed`; None for no host."""
        self._relayed: list[_Relayed] = []
        self._sending: Any = None
        """The request that carries the last of these lines; None if they have arrived."""
        self._sent_file: _Relayed | None = None
        """The file of which these lines are."""
        self._progress_mono_s = 0.0
        """When bytes last arrived."""
        self._problems: list[str] = []

    @property
    def is_needed(self) -> bool:
        """Whether there is a host that does not see the folder."""
        return bool(self._sources)

    @property
    def hosts(self) -> list[str]:
        """The names of those hosts."""
        return [source.host.name for source in self._sources]

    @property
    def problems(self) -> list[str]:
        """What could not be brought here, in sentences."""
        return list(self._problems)

    # ---- before the ranks begin ----

    def begin(self, keep: Iterable[Path] = ()) -> Self:
        """Make empty copies, in which ranks may write, and remove those of earlier folders.

        Args:
            keep: folders of which the copies stay.

        Raises:
            ClusterError: a host is lost, or cannot write.
        """
        self._on_all(Call.REMOVE_COPIES, [str(folder) for folder in keep])
        return self.open()

    def open(self) -> Self:
        """Make copies if there are none, for files that ranks only read.

        Raises:
            ClusterError: a host is lost, or cannot write.
        """
        self._on_all(Call.KEEP_COPY, str(self.folder))
        return self

    def forget(self) -> None:
        """Remove the copies of this folder and of all others; hosts that are lost keep theirs."""
        with suppress(ClusterError):
            self._on_all(Call.REMOVE_COPIES, [])

    def copy(self, name: str, to: Container[str] | None = None) -> None:
        """Write a file of the folder into the copies.

        Args:
            name: the file, relative to the folder.
            to: the names of the hosts; None for all.

        Raises:
            ClusterError: a host is lost, or cannot write.
        """
        if any(to is None or source.host.name in to for source in self._sources):
            for piece in _pieces_of(self.folder / name, name):
                self._on_all(Call.PUT_IN_COPY, str(self.folder), [piece], to=to)

    def copy_folder(self, inside: str, last: str = "", to: Container[str] | None = None) -> None:
        """Write a folder of files that never change into the copies, where it is not there already.

        Args:
            inside: the folder to write, relative to this one.
            last: the name of the file by which one knows that all others are there.
            to: the names of the hosts; None for all.
        """
        if not self._sources:
            return
        folder = self.folder / inside
        names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == last)
        sizes = {name: (folder / name).stat().st_size for name in names}
        there = self._on_all(Call.SIZES_IN_COPY, str(self.folder), inside, to=to)
        if any(sizes_there != sizes for sizes_there in there):
            if (size_bytes := sum(sizes.values())) > _WORTH_SAYING_BYTES:
                _log.warning("%s (%s) is brought to hosts that do not see it", folder, in_words(size_bytes))
            for name in names:
                self.copy(f"{inside}/{name}", to)

    def _on_all(self, call: Call, *args: Any, to: Container[str] | None = None) -> list[Any]:
        """Make a call on the hosts that do not see the folder, all at once; return their answers."""
        hosts = [source.host for source in self._sources if to is None or source.host.name in to]
        try:
            asked = [(host, host.tell(call, *args)) for host in hosts]
            return [host.answer(request, _PUT_PATIENCE_S) for host, request in asked]
        except OSError as error:
            raise ClusterError(
                f"{error}: the files of {self.folder} could not be brought there. Make room in its folder for temporary "
                "files (TMPDIR, which a line of setup can set), or name a folder that all hosts share"
            ) from None

    # ---- while the ranks write ----

    def follow(
        self,
        on_file: Callable[[str], None] = lambda name: None,
        on_checkpoints: Callable[[], None] = lambda: None,
        on_answer: Callable[[str], None] = lambda host: None,
    ) -> Self:
        """Bring here what the ranks write, in a thread, until `finish`.

        Args:
            on_file: is called on the thread with the name of each file of which something has come.
            on_checkpoints: is called on the thread when there are new checkpoints here, and a host has no
                others.
            on_answer: is called on the thread with the name of a host that has answered.
        """
        self._on_file, self._on_checkpoints, self._on_answer = on_file, on_checkpoints, on_answer
        self._closing.clear()
        self._gives_up.clear()
        for source in self._sources:
            source.is_done = source.is_last = False
            source.heard_s = time.time()
        if self._sources:
            self._thread = threading.Thread(target=self._follow, name="nbgpu-served", daemon=True)
            self._thread.start()
        return self

    def relay(self, host: str, files: Iterable[tuple[Path, str]]) -> None:
        """Bring the lines of growing files of this host to another one, while `follow` goes on.

        Args:
            host: the host's name; nothing happens if it sees the folder.
            files: the files, each with its name in the copy of the folder.
        """
        self._relay_to = next((source.host for source in self._sources if source.host.name == host), None)
        if self._relay_to is not None:
            self._relayed = [_Relayed(path, name) for path, name in files]

    def finish(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until all that the ranks have written is here. They have ended.

        Args:
            gives_up: a function that returns whether nobody wants to wait any longer.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._progress_mono_s = time.monotonic()
        self._closing.set()
        try:
            while thread.is_alive():
                thread.join(_POLL_PERIOD_S)
                if gives_up() or time.monotonic() - self._progress_mono_s > _NO_PROGRESS_S:
                    self._gives_up.set()
        finally:
            self._gives_up.set()
            thread.join()
        if any(not source.is_done for source in self._sources):
            self._files.give_up()
        for source in self._sources:
            if not source.is_done:
                self._report_problem(
                    source,
                    f"{self.folder} is not complete: {self._unsent_on(source)} host {source.host.name} did not come here",
                )

    def finish_or_stop(self) -> None:
        """As `finish`, on the main thread.

        Raises:
            KeyboardInterrupt: the person has pressed Stop. What is not here then is given up.
        """

        def look() -> bool:
            take_interrupt()
            return False

        self.finish(look)

    def in_words(self) -> str:
        """What is still on its way here once the ranks have ended, as a sentence; empty before that."""
        if not self._closing.is_set() or self._gives_up.is_set():
            return ""
        late = [source for source in self._sources if not source.is_done]
        if not late:
            return ""
        missing = " and ".join(
            f"{self._unsent_on(source)} host {source.host.name}"
            + (f" ({source.problem})" if source.problem else "")
            for source in late
        )
        return f"the ranks have ended, and files of {self.folder.name} are on their way here: {missing}. Stop gives them up"

    @staticmethod
    def _unsent_on(source: _Source) -> str:
        left_bytes = source.num_bytes_left
        return f"{in_words(left_bytes)} from" if left_bytes else "the last of"

    def _follow(self) -> None:
        try:
            self._bring_files()
        except Exception as error:  # noqa: BLE001 - whoever waits for the files must hear of it
            _log.exception("the files of %s are not brought here any more", self.folder)
            self._problems.append(f"the files of {self.folder} are not brought here any more: {error!r}")

    def _bring_files(self) -> None:
        """Poll all hosts until the last of them is done, and sleep until the next answer or the next turn."""
        while not self._gives_up.is_set() and not all(source.is_done for source in self._sources):
            for source in self._sources:
                if not source.is_done:
                    self._poll(source)
            self._relay_lines()
            waits_for = next(
                (source.asked for source in self._sources if source.asked is not None), self._sending
            )
            if waits_for is not None:
                waits_for.wait(_POLL_PERIOD_S)
            else:
                due_mono_s = min((s.due_mono_s for s in self._sources if not s.is_done), default=0.0)
                pause_s = min(_PERIOD_S, max(0.0, due_mono_s - time.monotonic()))
                (self._gives_up if self._closing.is_set() else self._closing).wait(pause_s)

    def _poll(self, source: _Source) -> None:
        """Ask a host for news if it is time to, or take its answer if that has come."""
        now_mono_s = time.monotonic()
        try:
            if source.asked is None:
                if now_mono_s < source.due_mono_s and (source.problem or not self._closing.is_set()):
                    return
                source.is_last = self._closing.is_set()
                have, source.num_bytes_here = source.num_bytes_here, {}
                source.asked_mono_s = now_mono_s
                source.asked = source.host.tell(
                    Call.CHANGES_IN_COPY, str(self.folder), source.num_bytes, have
                )
                return
            if not source.asked.wait(0):
                if not source.host.is_there:
                    raise HostLostError(source.host.name)
                return
            asked, source.asked = source.asked, None
            changes = Changes(*source.host.answer(asked))
        except OSError as error:
            source.is_done, source.asked = True, None
            self._report_problem(
                source,
                f"{error}: what its ranks wrote after {time.strftime('%H:%M:%S', time.localtime(source.heard_s))} is not "
                f"in {self.folder}",
            )
            return
        source.heard_s = time.time() - (time.monotonic() - source.asked_mono_s)
        self._on_answer(source.host.name)
        self._process_changes(source, changes)

    def _process_changes(self, source: _Source, changes: Changes) -> None:
        """Write what a host has sent, and decide when to ask it again and for how much."""
        # Ask for more where a message travels fast, and for less where it holds up others.
        took_s = time.monotonic() - source.asked_mono_s - changes.work_s
        pieces = [Piece(*piece) for piece in changes.pieces]
        num_bytes = sum(len(piece.content) for piece in pieces)
        if num_bytes >= source.num_bytes // 2 and took_s < _SHORT_S:
            source.num_bytes = min(_MOST_BYTES, source.num_bytes * 2)
        elif took_s > _LONG_S:
            source.num_bytes = max(_LEAST_BYTES, source.num_bytes // 2)
        source.num_bytes_left = changes.num_bytes_left
        if not self._write_changes(source, changes.gone, pieces, changes.whole):
            source.due_mono_s = time.monotonic() + _RETRY_S
            return
        # Ask again at once where something is left; otherwise rest.
        if num_bytes:
            self._progress_mono_s = time.monotonic()
        source.problem = ""
        is_behind = bool(changes.num_bytes_left or source.num_bytes_here)
        if source.has_new_checkpoint and not is_behind:
            source.has_new_checkpoint = False
            self._on_checkpoints()
        pause_s = 0.0 if is_behind else max(_PERIOD_S, _REST * changes.work_s)
        source.due_mono_s = time.monotonic() + pause_s
        source.is_done = source.is_last and not is_behind

    def _write_changes(
        self, source: _Source, gone: Sequence[str], pieces: Sequence[Piece], whole: Sequence[str]
    ) -> bool:
        """Write what has come. Return False if something cannot be written, which is asked for once more."""
        failure: OSError | None = None
        for name in gone:
            try:
                self._files.drop(name)
            except OSError as error:
                failure = error
        for piece in pieces:
            try:
                if failure is None:
                    if not self._files.write(piece):
                        source.num_bytes_here[piece.path] = 0
                        continue
                    source.has_new_checkpoint |= piece.path == BEST
                    self._on_file(piece.path)
                    continue
            except OSError as error:
                failure = error
            source.num_bytes_here[piece.path] = self._files.num_leading_bytes(piece)
        for name in whole:
            try:
                if failure is None:
                    self._files.complete(name)
                    source.has_new_checkpoint = True
                    continue
            except OSError as error:
                failure = error
            source.num_bytes_here[f"{name}/{MANIFEST}"] = 0
        if failure is not None:
            problem = f"{failure.filename or self.folder} cannot be written: {failure.strerror}"
            self._report_problem(
                source, f"{problem}. It came from host {source.host.name}. Make room: it is tried again"
            )
        return failure is None

    def _report_problem(self, source: _Source, problem: str) -> None:
        if problem != source.problem:
            source.problem = problem
            self._problems.append(problem)
            _log.warning("%s", problem)

    # ---- lines for another host ----

    def _relay_lines(self) -> None:
        """Send the next lines of a file, once the last ones have arrived."""
        if self._relay_to is None or self._closing.is_set():
            self._sending = None
            return
        try:
            if self._sending is not None:
                if not self._sending.wait(0):
                    return
                put, self._sending = self._sending, None
                assert self._sent_file is not None
                (self._sent_file.offset_bytes,) = self._relay_to.answer(put)
            for number, file in enumerate(self._relayed):
                if piece := _next_lines(file):
                    self._sent_file = file
                    self._sending = self._relay_to.tell(Call.PUT_IN_COPY, str(self.folder), [piece])
                    # The others come first the next time.
                    self._relayed = [*self._relayed[number + 1 :], *self._relayed[: number + 1]]
                    return
        except OSError as error:
            if not isinstance(error, HostLostError):
                self._problems.append(
                    f"{error}: rank 0 there does not get commands and the records of other hosts any more"
                )
                _log.warning("%s", self._problems[-1])
            self._relay_to = None


def _pieces_of(path: Path, name: str) -> Iterator[Piece]:
    """The pieces of a file as it is now."""
    left_bytes, offset_bytes = path.stat().st_size, 0
    with path.open("rb") as file:
        while True:
            content = file.read(min(_PUT_BYTES, left_bytes))
            left_bytes -= len(content)
            is_last = not left_bytes or not content
            yield Piece(name, offset_bytes, content, is_last)
            if is_last:
                return
            offset_bytes += len(content)


def _next_lines(file: _Relayed) -> Piece | None:
    """The next whole lines of a file; None if there are none."""
    try:
        with file.path.open("rb") as opened:
            opened.seek(file.offset_bytes)
            content = opened.read(_PUT_BYTES)
            content += opened.readline() if len(content) == _PUT_BYTES else b""
    except FileNotFoundError:
        return None
    content = content[: content.rfind(b"\n") + 1]
    return Piece(file.name, file.offset_bytes, content, is_last=True) if content else None
