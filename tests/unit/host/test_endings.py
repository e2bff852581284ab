"""Whom a SIGKILL came from, by the kernel's count of processes that it has ended for want of memory."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbgpu.host import endings

Kill = Callable[[], int]


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the kernel's count."""
    file = tmp_path / "vmstat"
    monkeypatch.setattr(endings, "_VMSTAT", file)

    def count(number: int) -> None:
        file.write_text(f"nr_free_pages 5\noom_kill {number}\n")

    count(3)
    return count


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def killed(tmp_path: Path) -> Kill:
    """Ends a process by SIGKILL, as the fork server records it, and returns its pid."""

    def kill() -> int:
        process = subprocess.Popen(["sleep", "600"])
        process.kill()
        process.wait()
        (tmp_path / f"ended-{process.pid}").write_text("-9")
        return process.pid

    return kill


def killer(known: endings.Endings, pid: int) -> str:
    ended = known.of(pid)
    assert ended is not None
    assert ended.code == -9
    return ended.killer


def test_each_kill_of_the_kernel_stands_for_one_process(
    tmp_path: Path, count: Callable[[int], None], killed: Kill
) -> None:
    known = endings.Endings(tmp_path, from_start=True)
    pids = [killed() for _ in range(3)]
    count(5)
    told = [killer(known, pid) for pid in pids]
    assert told[0] == told[1] == ", most likely by the kernel's OOM killer, which has just ended a process"
    assert told[2] == ", and not by the kernel's OOM killer"
    assert killer(known, pids[0]) == told[0]


def test_a_kill_of_long_ago_was_of_another_process(
    tmp_path: Path,
    count: Callable[[int], None],
    killed: Kill,
    engine: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endings, "_OOM_KILL_AGE_S", 0.0)
    known = endings.Endings(tmp_path, from_start=True)
    count(4)
    for _ in range(2):
        assert known.of(engine.pid) is None
    assert killer(known, killed()) == ", and not by the kernel's OOM killer"
    # One that comes between a look at a living engine and that at the dead one counts.
    count(5)
    assert known.of(engine.pid) is None
    assert "most likely" in killer(known, killed())
