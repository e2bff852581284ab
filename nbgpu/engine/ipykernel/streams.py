"""The rank's stdout and stderr: they show the text of threads and tasks that outlive their cell and of forked
children, also while a cell has replaced `sys.stdout`."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from nbgpu.protocol.records import CellOptions

_READ_BYTES = 1 << 20
_HALF_LINE_S = 0.1
"""How long the beginning of a child's line waits for its end."""
_DRAIN_PATIENCE_S = 5.0


_children: _ForkedChildren | None = None


def install(shell: Any) -> None:
    """Have the rank publish the text of forked children, and attribute the text of threads that outlive their
    cell to the last cell.

    Call it after everything else that replaces methods of the streams.
    """
    global _children
    streams: dict[str, Any] = {"stdout": sys.stdout, "stderr": sys.stderr}
    _children = _ForkedChildren(shell, streams)
    set_parent = shell.set_parent
    # ipykernel 7 can set the parent of the current thread alone. Earlier versions have only set_parent, and
    # there the output of a cell's threads is attributed to the last request of any kind.
    set_thread_parent = getattr(shell, "set_thread_parent", set_parent)
    last_cell: Any = None

    def set_parent_of_streams(parent: Any) -> None:
        """Set the request to which later output is attributed, as ipykernel's `set_parent` does, with two
        exceptions: the text of functions that the client calls (`apply_request`) and the output of widgets'
        callbacks (`comm_*`) are attributed to the last cell."""
        nonlocal last_cell
        kind = parent["header"]["msg_type"]
        if kind == "apply_request":
            # Only this thread gets the call as its parent, so that threads of the last cell keep theirs. The
            # client does not read a call's text, such as that of a training run, so the text is shown below
            # the last cell.
            set_thread_parent(parent)
            if last_cell is not None:
                for stream in streams.values():
                    stream.set_parent(last_cell)
            return
        # Only requests that run a cell carry the cell's options.
        if CellOptions.METADATA in parent["metadata"]:
            last_cell = parent
        elif kind.startswith("comm_") and last_cell is not None:
            parent = last_cell  # the callbacks of widgets belong to the last cell, too
        set_parent(parent)
        # ipykernel sets the parent of the current sys.stdout and sys.stderr only. A cell may have replaced
        # them.
        for name, stream in streams.items():
            if getattr(sys, name) is not stream:
                stream.set_parent(parent)

    shell.set_parent = set_parent_of_streams


def flush_all() -> None:
    """Send the text that the rank and its forked children have written so far."""
    if _children is not None:
        _children.drain()
        for stream in _children.streams.values():
            stream.flush()


@dataclass
class _Child:
    """The text that has come from a forked child and is not written yet."""

    received: bytearray = field(default_factory=bytearray)
    """The beginning of a message."""
    half_lines: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    """The line without an end of each stream."""


class _ForkedChildren:
    """Writes the text of forked children to the rank's own streams.

    ipykernel's streams publish on a socket that a forked process must not use. ipykernel has a way around it,
    which listens on a TCP port and which engines of ipyparallel do not have. Here each child gets one end of
    a pair of Unix sockets as it is forked, and the rank's publishing thread reads the other end.

    Args:
        shell: the rank's.
        streams: the rank's own stdout and stderr, by name.
    """

    def __init__(self, shell: Any, streams: dict[str, Any]) -> None:
        self._shell = shell
        self.streams = streams
        self._writes = {name: stream.write for name, stream in streams.items()}
        self._thread = streams["stdout"].pub_thread
        self._rank_pid = os.getpid()
        self._children: dict[socket.socket, _Child] = {}
        self._reading = threading.RLock()
        """Held from when text is received until it is written."""
        self._forking = threading.local()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_in_rank, after_in_child=self._after_in_child
        )
        for name, stream in streams.items():
            stream.write = self._after_children(self._writes[name])

    def _after_children(self, write: Callable[[str], Any]) -> Callable[[str], Any]:
        """Wrap the `write` of a stream of the rank, so that text that children have printed before is written
        first."""

        def write_after_children(text: str) -> Any:
            if self._children and self._has_unread_text():
                self.drain()
            return write(text)

        return write_after_children

    def _before_fork(self) -> None:
        """Make the pair of sockets for a child that is about to be forked. A child that forks makes none: its
        own children write through the child's."""
        if os.getpid() == self._rank_pid:
            self._forking.pair = socket.socketpair()

    def _after_in_rank(self) -> None:
        """Keep the rank's end of the pair, and have the publishing thread read it. Runs in the rank after a
        fork."""
        if os.getpid() != self._rank_pid:
            return
        from_child, to_rank = self._forking.pair
        del self._forking.pair
        to_rank.close()
        from_child.setblocking(False)
        self._children[from_child] = _Child()
        self._thread.schedule(
            lambda: self._thread.io_loop.add_handler(
                from_child, lambda *_: self._read(from_child), self._thread.io_loop.READ
            )
        )

    def _after_in_child(self) -> None:
        """Send what this process writes to the rank over the pair of sockets. Runs in a child after it was
        forked."""
        if not hasattr(self._forking, "pair"):
            return  # a child's child writes as its parent does
        from_child, to_rank = self._forking.pair
        del self._forking.pair
        from_child.close()
        # A rank that ends must not seem to live on in its children.
        for other in self._children:
            other.close()
        self._children.clear()
        lock = threading.RLock()
        for name, stream in self.streams.items():
            stream.write = _child_write(to_rank, name, lock)
            stream.flush = lambda: None
        self._shell.display_pub.publish = _print_plain

    # In the rank, on its publishing thread.

    def _read(self, from_child: socket.socket) -> None:
        """Receive text of a child and write the complete lines in it to the rank's streams; a line without an
        end waits `_HALF_LINE_S` for it."""
        if (child := self._children.get(from_child)) is None:
            return
        with self._reading:
            try:
                data = from_child.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            # The child has ended, or has closed its end.
            if not data:
                self._write_half_lines(child)
                self._thread.io_loop.remove_handler(from_child)
                del self._children[from_child]
                from_child.close()
                return
            child.received += data
            if b"\n" not in data:
                return
            # A message of the child is a line of JSON: the name of a stream, and a text.
            *messages, child.received = child.received.split(b"\n")
            for message in messages:
                name, text = json.loads(message)
                lines, newline, half_line = (child.half_lines[name] + text).rpartition("\n")
                child.half_lines[name] = half_line
                if newline:
                    self._writes[name](lines + newline)
            if any(child.half_lines.values()):
                self._thread.io_loop.call_later(_HALF_LINE_S, self._write_half_lines, child)

    def _write_half_lines(self, child: _Child) -> None:
        """Write the lines of a child that have no end yet."""
        for name, half_line in child.half_lines.items():
            if half_line:
                child.half_lines[name] = ""
                self._writes[name](half_line)

    # On any other thread of the rank.

    def _has_unread_text(self) -> bool:
        """Return whether a child has printed text that is not read yet, or has ended."""
        poll = select.poll()
        with self._reading:
            for from_child in list(self._children):
                poll.register(from_child, select.POLLIN)
            return bool(poll.poll(0))

    def drain(self) -> None:
        """Have the publishing thread write what children have printed so far, and wait for this. On the
        publishing thread itself the call returns at once."""
        if not self._children or threading.current_thread() is self._thread.thread:
            return
        is_read = threading.Event()

        def read_all() -> None:
            for from_child, child in list(self._children.items()):
                self._read(from_child)
                self._write_half_lines(child)
            is_read.set()

        self._thread.schedule(read_all)
        is_read.wait(_DRAIN_PATIENCE_S)


def _child_write(
    to_rank: socket.socket, name: str, lock: AbstractContextManager[bool]
) -> Callable[[str], int]:
    """Return the `write` of a stream in a forked child."""

    def write(text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text)}")
        # The rank has ended, or the child has closed all descriptors: nobody is left to read it.
        with suppress(OSError), lock:
            to_rank.sendall(json.dumps([name, text]).encode() + b"\n")
        return len(text)

    return write


def _print_plain(data: dict[str, Any], *_: Any, **__: Any) -> None:
    """Print the plain text of an object that a forked child displays: a child has no connection to a page."""
    print(data.get("text/plain", ""))  # noqa: T201 - the cell's output


def draw_as_text() -> None:
    """Make `tqdm.auto` draw text in this process; `tqdm.notebook` still makes widgets.

    tqdm takes an engine for a Jupyter kernel and would make a widget for each bar on each rank, whose model
    lives in the rank. As text a bar is a row for each rank, which the notebook updates in place.
    """
    if "tqdm.std" not in sys.modules:
        # torch imports tqdm if it is installed.
        return
    chosen = ModuleType("tqdm.autonotebook")
    chosen.__dict__.update({name: getattr(sys.modules["tqdm.std"], name) for name in ("tqdm", "trange")})
    sys.modules["tqdm.autonotebook"] = chosen


def keep_in_order_with_lines(shell: Any) -> None:
    """Send a cell's text in the order in which it was written, once the cell has drawn a progress bar.

    Bars are written to stderr and most lines to stdout. ipykernel buffers each stream's text and sends one
    stream after the other, so that the notebook could not tell whether a line came before the end of a bar or
    after it. For cells without bars the buffering stays, because sending costs more than printing.
    """
    has_bar = False

    def begin_cell(_: Any) -> None:
        nonlocal has_bar
        has_bar = False

    def send_other_first(stream: Any, other: Any) -> None:
        """Wrap a stream's `write`, so that in a cell with a bar the text of the other stream is sent
        first."""
        write = stream.write

        def write_in_order(text: str) -> Any:
            nonlocal has_bar
            # A progress bar returns to the beginning of its line with a carriage return.
            has_bar = has_bar or (isinstance(text, str) and "\r" in text)
            if has_bar:
                # This sends only if there is text: see nbgpu/engine/ipykernel/kernel.py.
                other.flush()
            return write(text)

        stream.write = write_in_order

    shell.events.register("pre_run_cell", begin_cell)
    send_other_first(sys.stdout, sys.stderr)
    send_other_first(sys.stderr, sys.stdout)
