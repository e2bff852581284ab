"""A folder of this host for ranks on other hosts that do not share its file system.

Each such host has a copy of the folder (host/served_folder.py). A thread brings here what the ranks write
there, in pieces that take a fraction of a second each, so that Stop and other calls to the host do not wait.
A checkpoint gets its final name here once all of its files are here. A host is asked for more only when its
last answer has arrived: a slow host delays only itself. A file that is missing there is not deleted here: a
host that ends removes its copy, and that must not look like the removal of checkpoints.
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
_REST_FACTOR = 5
"""A host that has searched its copy for changes rests this many times as long before it searches again."""
_POLL_PERIOD_S = 0.02
_RETRY_S = 1.0
_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES = 2**18, 2**16, 2**23
"""How much one answer may have: at first, at least and at most."""
_SHORT_S, _LONG_S = 0.1, 0.3
"""If an answer took less time, the next one may be twice as large; if it took more, half as large."""
_NO_PROGRESS_S = 60.0
"""Once the ranks have ended and nothing has arrived for this time, the rest is given up."""
_PUT_PATIENCE_S = 60.0
_PUT_BYTES = 2**20
_WORTH_SAYING_BYTES = 2**26


@dataclass
class _Source:
    """A host, and how far its copy has been read."""

    host: OtherHost
    request: Any = None
    """The request that is not answered yet; None if there is none."""
    asked_mono_s: float = 0.0
    """When the last request was sent."""
    heard_s: float = 0.0
    """The state of the copy at this time is here, in seconds since the epoch."""
    due_mono_s: float = 0.0
    """When the host is asked next."""
    num_bytes: int = _FIRST_BYTES
    """How much its next answer may have."""
    num_bytes_here: dict[str, int] = field(default_factory=dict)
    """The files that have to be sent again from this offset, because a piece was not written here."""
    num_bytes_left: int = 0
    """How much there is that did not fit into its last answer."""
    has_new_checkpoint: bool = False
    is_last: bool = False
    """Whether the request was sent after the ranks had ended, so that its answer can be the last one."""
    is_done: bool = False
    """Whether all is here, or the host is lost."""
    problem: str = ""


@dataclass
class _Relayed:
    """A growing file of this host whose lines are sent to another host."""

    path: Path
    name: str
    """Its path in the copy of the folder."""
    offset_bytes: int = 0
    """The other host has the lines before this offset."""


class Served:
    """A folder, and its copies on the hosts that do not share it. If there are no such hosts, every method
    does nothing.

    Args:
        folder: the folder, an absolute path.
        blind: the hosts that do not share it.
    """

    def __init__(self, folder: Path, blind: Sequence[OtherHost]) -> None:
        self.folder = folder
        self._sources = [_Source(host) for host in blind]
        self._files = ArrivingFiles(folder)
        self._closing = threading.Event()
        """Set once the ranks have ended: the thread brings the rest and ends."""
        self._gives_up = threading.Event()
        """Set when nobody waits for the rest any more: the thread ends."""
        self._thread: threading.Thread | None = None
        self._on_file: Callable[[str], None] = lambda name: None
        self._on_checkpoints: Callable[[], None] = lambda: None
        self._on_answer: Callable[[str], None] = lambda host: None
        self._relay_to: OtherHost | None = None
        """The host that gets the lines of `_relayed`; None for no host."""
        self._relayed: list[_Relayed] = []
        self._sending: Any = None
        """The request with the last lines that were sent; None if they have arrived."""
        self._sent_file: _Relayed | None = None
        """The file that these lines are from."""
        self._progress_mono_s = 0.0
        """When bytes last arrived."""
        self._problems: list[str] = []

    @property
    def is_needed(self) -> bool:
        """Whether there is a host that does not share the folder."""
        return bool(self._sources)

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that do not share the folder."""
        return [source.host.name for source in self._sources]

    @property
    def problems(self) -> list[str]:
        """The files that could not be brought here, and why, in sentences."""
        return list(self._problems)

    # ---- before the ranks begin ----

    def begin(self, keep: Iterable[Path] = ()) -> Self:
        """Make empty copies in which ranks may write, and remove the copies of other folders.

        Args:
            keep: folders whose copies are kept.

        Raises:
            ClusterError: a host is lost, or cannot write.
        """
        self._on_all(Call.REMOVE_COPIES, [str(folder) for folder in keep])
        return self.open()

    def open(self) -> Self:
        """Make copies if there are none, as for files that ranks only read.

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
        """Copy a file of the folder to the hosts.

        Args:
            name: the file, relative to the folder.
            to: the names of the hosts; None for all.

        Raises:
            ClusterError: a host is lost, or cannot write.
        """
        if any(to is None or source.host.name in to for source in self._sources):
            for piece in _split_file(self.folder / name, name):
                self._on_all(Call.PUT_IN_COPY, str(self.folder), [piece], to=to)

    def copy_folder(self, inside: str, last: str = "", to: Container[str] | None = None) -> None:
        """Copy a folder inside this one, whose files never change, to the hosts that do not have it yet.

        Args:
            inside: the path of the inner folder, relative to this one.
            last: the name of the file that is copied last: where it exists, the others do.
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
        """Make a call on the hosts that do not share the folder, all at once, and return their answers.

        Raises:
            ClusterError: a host is lost, or the call has failed there.
        """
        hosts = [source.host for source in self._sources if to is None or source.host.name in to]
        try:
            requests = [(host, host.tell(call, *args)) for host in hosts]
            return [host.answer(request, _PUT_PATIENCE_S) for host, request in requests]
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
        """Bring here what the ranks write, on a thread, until `finish`. The thread calls these functions.

        Args:
            on_file: gets the name of each file that has changed here.
            on_checkpoints: is called when new checkpoints of a host are here, and no more is to come now.
            on_answer: gets the name of each host that has answered.
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
        """Send the lines of growing files of this host to another one, on the thread of `follow`.

        Args:
            host: the host's name; nothing happens if it shares the folder.
            files: the files, each with its path in the copy of the folder.
        """
        self._relay_to = next((source.host for source in self._sources if source.host.name == host), None)
        if self._relay_to is not None:
            self._relayed = [_Relayed(path, name) for path, name in files]

    def finish(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until everything that the ranks have written is here, after they have ended.

        Args:
            gives_up: a function that is called repeatedly; the wait ends when it returns True.
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
                    f"{self.folder} is not complete: {self._rest(source)} host {source.host.name} did not come here",
                )

    def finish_or_stop(self) -> None:
        """Like `finish`, on the main thread, where Stop (an interrupt) ends the wait.

        Raises:
            KeyboardInterrupt: the wait was interrupted. The rest is given up.
        """

        def look() -> bool:
            take_interrupt()
            return False

        self.finish(look)

    def in_words(self) -> str:
        """Say which files are still on their way here after the ranks have ended; empty before that."""
        if not self._closing.is_set() or self._gives_up.is_set():
            return ""
        late = [source for source in self._sources if not source.is_done]
        if not late:
            return ""
        missing = " and ".join(
            f"{self._rest(source)} host {source.host.name}"
            + (f" ({source.problem})" if source.problem else "")
            for source in late
        )
        return f"the ranks have ended, and files of {self.folder.name} are on their way here: {missing}. Stop gives them up"

    @staticmethod
    def _rest(source: _Source) -> str:
        """The beginning of '2 MiB from host n1', or of 'the last of host n1' if the size is not known."""
        return f"{in_words(source.num_bytes_left)} from" if source.num_bytes_left else "the last of"

    def _follow(self) -> None:
        """Run the thread. An unexpected error is reported, because the end of a thread is not."""
        try:
            self._bring_files()
        except Exception as error:  # noqa: BLE001 - whoever waits for the files must hear of it
            _log.exception("the files of %s are not brought here any more", self.folder)
            self._problems.append(f"the files of {self.folder} are not brought here any more: {error!r}")

    def _bring_files(self) -> None:
        """Poll all hosts until all are done. In between, wait for the next answer, or until a host is due."""
        while not self._gives_up.is_set() and not all(source.is_done for source in self._sources):
            for source in self._sources:
                if not source.is_done:
                    self._poll(source)
            self._relay_lines()
            pending = [source.request for source in self._sources if source.request is not None]
            if self._sending is not None:
                pending.append(self._sending)
            if pending:
                pending[0].wait(_POLL_PERIOD_S)
            else:
                due_mono_s = min((s.due_mono_s for s in self._sources if not s.is_done), default=0.0)
                pause_s = min(_PERIOD_S, max(0.0, due_mono_s - time.monotonic()))
                # An event ends the pause: first the end of the ranks, then that nobody waits any longer.
                next_event = self._gives_up if self._closing.is_set() else self._closing
                next_event.wait(pause_s)

    def _poll(self, source: _Source) -> None:
        """Take a host's answer if it has arrived; if no request is open, ask the host for changes if it is
        due."""
        now_mono_s = time.monotonic()
        try:
            if source.request is None:
                # Once the ranks have ended, a host is asked at once, unless there is a problem here.
                if now_mono_s < source.due_mono_s and (source.problem or not self._closing.is_set()):
                    return
                source.is_last = self._closing.is_set()
                offsets, source.num_bytes_here = source.num_bytes_here, {}
                source.asked_mono_s = now_mono_s
                source.request = source.host.tell(
                    Call.CHANGES_IN_COPY, str(self.folder), source.num_bytes, offsets
                )
                return
            if not source.request.wait(0):
                if not source.host.is_there:
                    raise HostLostError(source.host.name)
                return
            request, source.request = source.request, None
            changes = Changes(*source.host.answer(request))
        except OSError as error:
            source.is_done, source.request = True, None
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
        """Write what a host has sent, and decide when the host is asked again and for how much."""
        # Ask for more if the answer travelled fast, and for less if it delayed other messages.
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
        if num_bytes:
            self._progress_mono_s = time.monotonic()
        source.problem = ""
        # Ask again at once if the host has more to send; otherwise let it rest.
        is_behind = bool(changes.num_bytes_left or source.num_bytes_here)
        if source.has_new_checkpoint and not is_behind:
            source.has_new_checkpoint = False
            self._on_checkpoints()
        pause_s = 0.0 if is_behind else max(_PERIOD_S, _REST_FACTOR * changes.work_s)
        source.due_mono_s = time.monotonic() + pause_s
        source.is_done = source.is_last and not is_behind

    def _write_changes(
        self, source: _Source, gone: Sequence[str], pieces: Sequence[Piece], whole: Sequence[str]
    ) -> bool:
        """Write the changes of a host's copy here.

        After the first failure nothing more is written, and the host has to send the rest again, from the
        offsets in `num_bytes_here`.

        Args:
            source: the host.
            gone: files that were removed there.
            pieces: pieces of files, in the order of each file.
            whole: checkpoints whose files have all been sent.

        Returns:
            Whether everything was written.
        """
        failure: OSError | None = None
        for name in gone:
            try:
                self._files.drop(name)
            except OSError as error:
                failure = error
        for piece in pieces:
            try:
                if failure is None:
                    if self._files.write(piece):
                        source.has_new_checkpoint |= piece.path == BEST
                        self._on_file(piece.path)
                    else:
                        source.num_bytes_here[piece.path] = 0
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
            # The host reports the checkpoint again once it has sent the manifest again.
            source.num_bytes_here[f"{name}/{MANIFEST}"] = 0
        if failure is not None:
            problem = f"{failure.filename or self.folder} cannot be written: {failure.strerror}"
            self._report_problem(
                source, f"{problem}. It came from host {source.host.name}. Make room: it is tried again"
            )
        return failure is None

    def _report_problem(self, source: _Source, problem: str) -> None:
        """Report a problem with a host's files, once."""
        if problem != source.problem:
            source.problem = problem
            self._problems.append(problem)
            _log.warning("%s", problem)

    # ---- lines for another host ----

    def _relay_lines(self) -> None:
        """Send the next lines of one of the files, once the last ones have arrived."""
        if self._relay_to is None or self._closing.is_set():
            self._sending = None
            return
        try:
            if self._sending is not None:
                if not self._sending.wait(0):
                    return
                request, self._sending = self._sending, None
                assert self._sent_file is not None
                (self._sent_file.offset_bytes,) = self._relay_to.answer(request)
            for number, file in enumerate(self._relayed):
                if piece := _next_lines(file):
                    self._sent_file = file
                    self._sending = self._relay_to.tell(Call.PUT_IN_COPY, str(self.folder), [piece])
                    # The other files come first the next time.
                    self._relayed = [*self._relayed[number + 1 :], *self._relayed[: number + 1]]
                    return
        except OSError as error:
            if not isinstance(error, HostLostError):
                self._problems.append(
                    f"{error}: rank 0 there does not get commands and the records of other hosts any more"
                )
                _log.warning("%s", self._problems[-1])
            self._relay_to = None


def _split_file(path: Path, name: str) -> Iterator[Piece]:
    """Split a file into pieces, up to its present size."""
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
    """Return the next complete lines of a file: about `_PUT_BYTES`, or more if the last line is longer; None
    if there are none."""
    try:
        with file.path.open("rb") as opened:
            opened.seek(file.offset_bytes)
            content = opened.read(_PUT_BYTES)
            content += opened.readline() if len(content) == _PUT_BYTES else b""
    except FileNotFoundError:
        return None
    content = content[: content.rfind(b"\n") + 1]
    # The host that gets lines does not use `is_last`.
    return Piece(file.name, file.offset_bytes, content, is_last=True) if content else None
