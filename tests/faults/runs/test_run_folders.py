"""A run whose folder is gone, full, read-only or somebody else's: Stop stops it, the cause is shown, nothing
foreign is used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import launching
import pytest
from conftest import what_changes_of
from rows import Measured, row

import nbgpu
from nbgpu.client.runs.run import Run

BOUND_S = 90
NOBODY = 65534
SUM = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"


@pytest.fixture(scope="module")
def ranks() -> Iterator[nbgpu.Cluster]:
    with nbgpu.Cluster(**launching.settings()) as cluster, what_changes_of(cluster):
        cluster.execute("kept = 5")
        yield cluster


@pytest.fixture(autouse=True)
def the_sum_is_right_and_another_run_trains(ranks: nbgpu.Cluster, tmp_path: Path) -> Iterator[None]:
    yield
    wait_until_back(ranks)
    ranks.execute(f"{faults.MEND}\nkept = 5")
    assert ranks.execute(SUM) == {0: "2 5\n", 1: "2 5\n"}
    run = ranks.train("autoencoder", **settings(steps=3), runs_dir=str(tmp_path / "next"))
    assert run.wait(BOUND_S).status == "finished"
    ranks.parts.state.news.clear()


def wait_until_back(ranks: nbgpu.Cluster) -> None:
    """On a busy host a rank may be given up that comes back a moment later; cells are refused until then."""
    give_up_s = time.monotonic() + BOUND_S
    while True:
        try:
            ranks.execute("")
        except nbgpu.ClusterError:
            assert time.monotonic() < give_up_s
            time.sleep(0.2)
        else:
            return


def settings(**more: Any) -> dict[str, Any]:
    return {**faults.ENDLESS, "threads": 1, **more}


def begin(ranks: nbgpu.Cluster, runs_dir: Path, **more: Any) -> Run:
    run = ranks.train("autoencoder", **settings(**more), runs_dir=str(runs_dir))
    until(lambda: min(s.step for s in run.statuses()) >= 2, run)
    return run


def until(holds: Callable[[], Any], run: Run) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < give_up_s, f"{run} {run.failures}"
        time.sleep(0.05)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        size_bytes = 2**16
        while size_bytes:
            try:
                ballast.write(bytes(size_bytes))
            except OSError:
                size_bytes //= 2


def delete(run: Run, disk: Path) -> None:
    # Under another name first: files that are made meanwhile would keep the folder from going.
    shutil.rmtree(run.folder.rename(disk / "gone"))


def fill_up(run: Run, disk: Path) -> None:
    fill(disk)


def make_read_only(run: Run, disk: Path) -> None:
    # Over it, because a file system with files that are open for writing cannot be made read-only itself.
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Iterator[Path]:
    path = small_disk(2**24)
    yield path
    if "ro" in [line.split()[3].split(",")[0] for line in mounts() if line.split()[1] == str(path)]:
        subprocess.run(["umount", path], check=True)


def mounts() -> list[str]:
    return Path("/proc/mounts").read_text().splitlines()


LOSSES = {"deleted": delete, "on a full disk": fill_up, "read-only": make_read_only}


@pytest.mark.long
@row(
    "a run's folder is {lost} while it trains, and it is stopped",
    "it ends, and says that its checkpoint could not be written; the sum is right, the next run trains",
    bound_s=None,
)
@pytest.mark.parametrize("lost", LOSSES)
def test_stop_stops_a_run_without_its_folder(
    ranks: nbgpu.Cluster, measured: Measured, disk: Path, lost: str
) -> None:
    run = begin(ranks, disk)
    LOSSES[lost](run, disk)
    measured.fault_now()
    run.stop()
    with pytest.raises(nbgpu.RankError, match=r"checkpoint at step .* could not be written") as raised:
        run.wait(BOUND_S)
    measured.ended(str(raised.value))


@pytest.mark.long
@row(
    "a rank raises in a run whose folder is {lost}",
    "its own error is shown; the sum is right, the next run trains",
    bound_s=None,
)
@pytest.mark.parametrize("lost", LOSSES)
def test_the_ranks_own_error_is_shown(ranks: nbgpu.Cluster, disk: Path, lost: str) -> None:
    ranks.execute(
        faults.in_training(1, step=20, action="raise")
        + "\nimport time\n_in_time = Autoencoder.loss\n"
        + "def _slow(self, model, batch):\n    time.sleep(0.1)\n    return _in_time(self, model, batch)\n"
        + "Autoencoder.loss = _slow"
    )
    try:
        run = begin(ranks, disk)
        LOSSES[lost](run, disk)
        with pytest.raises(nbgpu.RankError, match=r"^rank 1: ValueError: on purpose$"):
            run.wait(BOUND_S)
    finally:
        ranks.execute("Autoencoder.loss = _in_time")


def test_settings_reach_a_run_without_its_folder(ranks: nbgpu.Cluster, tmp_path: Path) -> None:
    run = begin(ranks, tmp_path / "runs")
    delete(run, tmp_path)
    run.set(lr=1e-5)
    until(lambda: [event for event in run.reader.events() if event.kind == "setting"], run)
    assert any("changes.jsonl cannot be written" in note for note in run.notes())
    run.stop()
    with pytest.raises(nbgpu.RankError, match="could not be written"):
        run.wait(BOUND_S)


@row(
    "a run is started on a full disk",
    "it is refused in a sentence, and nothing of its folder is left",
    bound_s=None,
)
def test_a_run_that_cannot_have_a_folder_leaves_none(ranks: nbgpu.Cluster, disk: Path) -> None:
    (disk / "mine").mkdir()
    fill(disk)
    for runs_dir in (disk / "mine", disk / "mine" / "new"):
        with pytest.raises(nbgpu.RunError, match=f"folder cannot be made in {runs_dir}: No space left"):
            ranks.train("autoencoder", **settings(), runs_dir=str(runs_dir))
    assert list((disk / "mine").iterdir()) == []


@row(
    "another user puts a folder in the place of a run's, and a rank dies",
    "nothing of it is loaded; the run ends and says so",
    bound_s=None,
)
def test_a_folder_of_another_user_is_not_loaded(ranks: nbgpu.Cluster, tmp_path: Path) -> None:
    run = begin(ranks, tmp_path / "runs")
    aside = run.folder.rename(tmp_path / "aside")
    shutil.copytree(aside, run.folder)
    for path in (run.folder, *run.folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(
        nbgpu.RankError, match=r"belongs to another user \(uid 65534\). Nothing in it is used"
    ):
        run.wait(BOUND_S)


def test_too_large_a_batch_and_a_truth_value_are_refused(ranks: nbgpu.Cluster, tmp_path: Path) -> None:
    run = begin(ranks, tmp_path / "runs")
    with pytest.raises(nbgpu.ConfigError, match="lr = True is not valid"):
        run.set(lr=True)
    with pytest.raises(
        nbgpu.ConfigError, match=r"batch_size = 4096 .* 8192 samples in a step, and an epoch takes \d+ with"
    ):
        run.set(batch_size=4096)
    run.stop()
    assert run.wait(BOUND_S).status == "stopped"
