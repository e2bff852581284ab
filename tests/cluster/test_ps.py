"""What `nbgpu ps` lists and `nbgpu stop` ends, with real processes: nothing else is ever touched."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import nbgpu
from nbgpu.client.host import registry
from nbgpu.client.host.registry import Entry
from nbgpu.machine.processes import ProcessId

BOUND_S = 30

_OWNER = """
import sys, nbgpu
cluster = nbgpu.Cluster(gpus="none").start()
print("started", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_notebook(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has a cluster, with a notebook's name in its environment as a Jupyter server puts it
    there."""
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JPY_SESSION_NAME": name},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        yield owner
        owner.kill()


def nbgpu_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbgpu.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def members(entry: Entry) -> list[ProcessId]:
    """All processes of a cluster, also what its leaders have started."""
    leaders = [psutil.Process(leader.pid) for leader in entry.leaders.values()]
    children = [child for leader in leaders for child in leader.children(recursive=True)]
    return [ProcessId.of(process.pid) for process in leaders + children]


def wait_for_the_end_of(processes: Iterable[ProcessId]) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while left := [process for process in processes if process.alive()]:
        assert time.monotonic() < give_up_s, f"still there: {left}"
        time.sleep(0.02)


@pytest.mark.long
def test_a_cluster_is_listed_from_anywhere_and_ended_alone(cluster2: nbgpu.Cluster) -> None:
    with other_notebook("/home/ada/scans/train.ipynb") as owner:
        own, other = registry.entries()
        table = nbgpu_command("ps").stdout.splitlines()
        assert table[0].split() == ["id", "notebook", "process", "ranks", "devices", "state", "age", "run"]
        assert table[2].split()[:6] == [
            other.id,
            "/home/ada/scans/train.ipynb",
            str(owner.pid),
            "2",
            "CPU",
            "running",
        ]
        assert len(table) == 3
        processes = members(other)
        assert nbgpu_command("stop").stdout == "nothing was left over\n", "both are in use"
        done = nbgpu_command("stop", "nobody.ipynb")
        assert done.returncode == 1
        assert (
            f"there is no cluster nobody.ipynb. Clusters: {own.describe()}, {other.describe()}" in done.stderr
        )
        done = nbgpu_command("stop", "train.ipynb")
        assert done.stdout.startswith(f"ended cluster {other.describe()}: 2 rank(s), process(es) "), (
            done.stderr
        )
        assert all(str(process.pid) in done.stdout for process in processes)
        assert not any(process.alive() for process in processes)
        assert not other.folder.exists()
        assert owner.poll() is None, "the notebook itself goes on"
    assert registry.entries() == [own]
    assert cluster2.execute("print(rank)") == {0: "0\n", 1: "1\n"}


@pytest.mark.long
def test_what_is_left_over_is_named_and_ended() -> None:
    """Engines that are stopped by the terminal, say, cannot notice that their notebook is gone."""
    with other_notebook("train.ipynb") as owner:
        entry = registry.entries()[-1]
        processes = members(entry)
        for process in processes:
            process.send(signal.SIGSTOP)
        owner.kill()
        owner.wait(BOUND_S)
    assert "left over" in nbgpu_command("ps").stdout
    assert nbgpu_command("stop").stdout.startswith(f"ended cluster {entry.describe()}: 2 rank(s)")
    assert not any(process.alive() for process in processes)
    assert entry.id not in nbgpu_command("ps").stdout


@pytest.mark.long
def test_a_process_that_got_a_number_is_never_touched() -> None:
    with other_notebook("train.ipynb"):
        entry = registry.entries()[-1]
    wait_for_the_end_of([*entry.leaders.values(), *entry.engines.values()])
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as bystander:
        now = ProcessId.of(bystander.pid)
        before = ProcessId(now.pid, now.started_ticks - 1)
        recycled = entry.model_copy(
            update={"leaders": {"controller": before}, "engines": {0: before}, "owner": before}
        )
        registry.update(recycled)
        before.send(signal.SIGKILL)
        done = nbgpu_command("stop", entry.id)
        assert f"there is no cluster {entry.id}" in done.stderr
        assert entry.id not in [e.id for e in registry.entries()], "the note is taken away"
        assert bystander.poll() is None
        now.send(signal.SIGKILL)
        assert bystander.wait(BOUND_S) == -signal.SIGKILL


def test_only_the_user_can_read_what_is_noted_and_a_strangers_note_is_ignored(
    cluster2: nbgpu.Cluster,
) -> None:
    (entry,) = registry.entries()
    path = registry.folder() / f"{entry.id}.json"
    assert stat.S_IMODE(registry.folder().stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stranger = registry.folder() / "abcdef.json"
    stranger.write_text(entry.model_dump_json().replace(entry.id, "abcdef"))
    try:
        assert len(registry.entries()) == 2
        if os.getuid() == 0:
            os.chown(stranger, 12345, 12345)
            assert registry.entries() == [entry]
        stranger.write_text("no JSON")
        assert registry.entries() == [entry]
    finally:
        stranger.unlink()


def test_a_folder_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))
    registry.folder().chmod(0o770)
    with pytest.raises(nbgpu.ClusterError, match=r"is not trusted.*chmod 700"):
        registry.entries()
    (tmp_path / "file").touch()
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(nbgpu.ClusterError, match=r"cannot be made \(Not a directory\).*NBGPU_STATE_DIR"):
        registry.entries()
