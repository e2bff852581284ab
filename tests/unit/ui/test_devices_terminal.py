"""`nbgpu top` and the head of `nbgpu doctor`, on terminals of several sizes and on none."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pretend_gpus
import psutil
import pytest
from pretend_gpus import PretendGpu, several, split_in
from rich.console import Console
from rich.text import Text

from nbgpu.client.host.device_cards import DeviceCards, HostDevices
from nbgpu.ui.devices import terminal

SUPPORT = Path(pretend_gpus.__file__).parent
COMMAND = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import pretend_gpus
pretend_gpus.install(pretend_gpus.varied(8))
from nbgpu.cli import main
main()
"""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[PretendGpu]], HostDevices]:
    monkeypatch.setenv("NBGPU_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def made(gpus: list[PretendGpu]) -> HostDevices:
        pretend_gpus.install(gpus, patch=monkeypatch)
        with DeviceCards() as cards:
            return cards.read()

    return made


def lines(what: object, width: int = 80, height: int = 60) -> list[str]:
    console = Console(width=width, height=height, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(what)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_card_has_everything_in_80_columns(read: Callable[[list[PretendGpu]], HostDevices]) -> None:
    shown = lines(terminal.cards(read(pretend_gpus.varied(8))))
    assert shown[0].split() == ["GPU", "0", "NVIDIA", "H100", "80GB", "HBM3", "●", "free"]
    assert all(len(line) <= 80 for line in shown)
    busy = shown[shown.index(next(line for line in shown if line.startswith("GPU 1"))) + 1]
    for words in ("67.9 of 80.0 GiB", "97 % busy", "72 °C, 585 of 700 W"):
        assert words in busy
    assert "  NVLink to all others" in shown
    assert shown[-2].startswith("CPU")


def test_a_narrow_window_cuts_nothing_off(read: Callable[[list[PretendGpu]], HostDevices]) -> None:
    text = " ".join(" ".join(lines(terminal.cards(read(pretend_gpus.varied(2))), width=40)).split())
    for words in ("NVIDIA H100 80GB HBM3", "67.9 of 80.0 GiB", "97 % busy", "72 °C, 585 of 700 W"):
        assert words in text


def test_parts_stand_below_their_gpu_whose_heat_is_said_once(
    read: Callable[[list[PretendGpu]], HostDevices],
) -> None:
    shown = lines(terminal.cards(read([split_in(["1g.10gb", "1g.10gb"])])))
    assert shown[0].startswith("GPU 0 NVIDIA A100-SXM4-80GB, split into parts (MIG)")
    assert shown[1].startswith("  MIG 1g.10gb device 0")
    assert sum("31 °C" in line for line in shown) == 1


@pytest.mark.parametrize(("number", "height"), [(8, 24), (16, 24), (16, 10)])
def test_a_low_window_has_a_line_for_each_device_and_says_what_is_missing(
    read: Callable[[list[PretendGpu]], HostDevices], number: int, height: int
) -> None:
    shown = lines(terminal.Screen(Text("head"), read(several(number))), height=height)
    assert len(shown) <= height
    num_shown = sum(line.startswith("  GPU") for line in shown)
    if height == 24:
        assert num_shown == number
        assert "0.4 of 80.0 GiB" in shown[2]
    else:
        # The processor is one of those that are missing.
        assert shown[-1] == f"and {number + 1 - num_shown} more: the window is too small for them"


def plain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=360,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_where_there_is_no_terminal_it_is_printed_once(tmp_path: Path) -> None:
    done = plain("top", NBGPU_STATE_DIR=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.count("NVIDIA H100 80GB HBM3") == 8
    assert "\x1b" not in done.stdout
    in_ascii = plain("top", NBGPU_STATE_DIR=str(tmp_path), PYTHONIOENCODING="ascii")
    assert (in_ascii.returncode, in_ascii.stderr) == (0, "")
    found = json.loads(plain("top", "--json", NBGPU_STATE_DIR=str(tmp_path)).stdout)
    assert [card["title"] for card in found["devices"]] == [*(f"GPU {i}" for i in range(8)), "CPU"]
    wrong = plain("top", "--twice")
    assert (wrong.returncode, wrong.stderr) == (2, "usage: nbgpu top [--once] [--json]\n")


class Terminal:
    """`nbgpu top` on a terminal of its own."""

    def __init__(self, columns: int, num_lines: int, folder: Path) -> None:
        # The other end stays open here, so that what was written can be read when the process has ended.
        self._fd, self._other = pty.openpty()
        self.resize(columns, num_lines)
        environment = {**os.environ, "TERM": "xterm-256color", "NBGPU_STATE_DIR": str(folder)}
        environment = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        self.settings = termios.tcgetattr(self._other)
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "top"],
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            env=environment,
            start_new_session=True,
        )
        self.text = ""

    def resize(self, columns: int, num_lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, columns, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def wait_for(self, pattern: str) -> None:
        """Wait for text that comes after this call."""
        begin = len(self.text)
        self._read_until(lambda: re.search(pattern, self.text[begin:], re.DOTALL) is not None)

    def ended(self) -> int:
        """Wait for the end; returns the exit code. The terminal's settings are those of before."""
        self._read_until(lambda: self.process.poll() is not None)
        while self._read(0):
            pass
        assert termios.tcgetattr(self._other) == self.settings
        return int(self.process.returncode)

    def _read_until(self, is_done: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 300
        while not is_done():
            assert time.monotonic() < give_up_s, self.text
            self._read(0.1)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        self.text += os.read(self._fd, 65536).decode(errors="replace")
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)
        os.close(self._other)


@pytest.mark.slow
def test_on_a_terminal_it_is_live_follows_the_window_and_ends_with_q(tmp_path: Path) -> None:
    shown = Terminal(80, 60, tmp_path)
    try:
        shown.wait_for("NVLink to all others")
        shown.wait_for("67.9 of 80.0 GiB")
        shown.resize(80, 20)
        # Cards no longer fit: a line for each.
        shown.wait_for(r"  GPU 7 [^\n]*63 % busy")
        shown.press("q")
        assert shown.ended() == 0
        assert "\x1b[?1049l" in shown.text
    finally:
        shown.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(number: int, code: int, tmp_path: Path) -> None:
    shown = Terminal(80, 60, tmp_path)
    try:
        shown.wait_for("NVLink")
        shown.process.send_signal(number)
        assert shown.ended() == code
        # The other screen is left, and the cursor is back.
        assert "\x1b[?1049l" in shown.text
        assert "\x1b[?25h" in shown.text
    finally:
        shown.close()


@pytest.mark.slow
def test_it_can_be_suspended_and_goes_on(tmp_path: Path) -> None:
    shown = Terminal(80, 60, tmp_path)
    try:
        shown.wait_for("NVLink")
        shown.process.send_signal(signal.SIGTSTP)
        shown.wait_for(re.escape("\x1b[?1049l"))
        process = psutil.Process(shown.process.pid)
        give_up_s = time.monotonic() + 300
        while process.status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        shown.process.send_signal(signal.SIGCONT)
        shown.wait_for(r"\[\?1049h.*NVLink")
        shown.press("q")
        assert shown.ended() == 0
    finally:
        shown.close()
