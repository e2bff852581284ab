"""`nbgpu top`: the devices in a terminal, live."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from types import FrameType
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nbgpu.client.host.device_cards import DeviceCards, HostDevices
from nbgpu.ui.devices import terminal
from nbgpu.ui.devices.reader import DeviceReader

_PERIOD_S = 1.0
_POLL_S = 0.1
"""The longest delay, in seconds, after a key or a change of the window's size."""
_CPU_INTERVAL_S = 0.25
"""The time between the two readings over which the processor's load is measured."""
_COLUMNS = 80


def read_once() -> HostDevices:
    """Read the devices. This takes a quarter of a second, over which the processor's load is measured."""
    with DeviceCards() as cards:
        cards.read()
        time.sleep(_CPU_INTERVAL_S)
        return cards.read()


def as_text() -> str:
    """Read the devices, and return their cards as lines without colours."""
    text = StringIO()
    Console(file=text, width=_COLUMNS, highlight=False, force_jupyter=False).print(
        terminal.cards(read_once())
    )
    return text.getvalue()


def watch(console: Console) -> None:
    """Show the devices until q is pressed."""
    state = _State()
    reader = DeviceReader(state.show, state.complain)
    with _ending_on_sigterm():
        while _show_until_key(console, state, reader) == "suspend":
            # Suspend the process as Ctrl-Z does, with the terminal restored. After `fg` it continues here.
            os.kill(os.getpid(), signal.SIGSTOP)
    reader.rest()


class _State:
    """The newest reading. It is written by another thread, so that keys work while the driver hangs."""

    def __init__(self) -> None:
        self.devices: HostDevices | None = None
        self.problem = ""
        self.num_changes = 0

    def show(self, devices: HostDevices) -> None:
        self.devices = devices
        self.num_changes += 1

    def complain(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.num_changes += 1

    def screen(self) -> terminal.Screen | Text:
        """Return the content of the terminal: a line with the host and the time, or with the problem, and the
        cards below it."""
        now = time.strftime("%H:%M:%S")
        head = Text.assemble((os.uname().nodename, "bold"), f"  {now}  q ends", no_wrap=True)
        if self.problem:
            head = Text(self.problem, style="red", no_wrap=True, overflow="ellipsis")
        if self.devices is None:
            return Text("\n").join([head, Text("The devices are being read …")])
        return terminal.Screen(head, self.devices)


def _show_until_key(console: Console, state: _State, reader: DeviceReader) -> Literal["quit", "suspend"]:
    """Show the devices until the person quits. Return 'quit' after q, or when the terminal is gone, and
    'suspend' after Ctrl-Z."""
    suspended = threading.Event()
    # Ctrl-Z takes effect later: the terminal has to be restored before the process stops.
    before = signal.signal(signal.SIGTSTP, lambda *_: suspended.set())
    try:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            next_s, drawn = 0.0, None
            while True:
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + _PERIOD_S
                    reader.ask()
                if drawn != (state.num_changes, console.size):
                    drawn = state.num_changes, console.size
                    live.update(state.screen(), refresh=True)
                # None once the terminal is gone.
                if (key := pressed(_POLL_S)) is None or "q" in key.lower():
                    return "quit"
                if suspended.is_set():
                    return "suspend"
    finally:
        signal.signal(signal.SIGTSTP, before)


@contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """Yield a function that waits for keys, up to a number of seconds. It returns their text, '' if none was
    pressed, and None once the terminal is gone. Without a terminal as stdin it only waits."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):

        def wait(timeout_s: float) -> str:
            time.sleep(timeout_s)
            return ""

        yield wait
        return

    def pressed(timeout_s: float) -> str | None:
        if not select.select([fd], [], [], timeout_s)[0]:
            return ""
        return os.read(fd, 64).decode(errors="replace") or None

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, such as that of `timeout 10 nbgpu top`, so that the terminal is
    restored."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
