"""A rank that dies while it trains is replaced, and training goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import leaks
import pandas as pd
import psutil
import pytest
from rows import Measured, row

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.host import endings
from nbgpu.protocol.records import Event
from nbgpu.run_folder import checkpoint_files
from nbgpu.text.ranks import named_ranges

SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 24,
    "batch_size": 2,
    "accumulate": 2,
    "steps": 24,
    "val_every": 10,
    "ema_decay": 0.9,
    "adversarial_weight": 0.01,
    "adversarial_after": 5,
    "threads": 1,
}


@pytest.fixture(scope="module", params=[0, 1], ids=["no spare", "one spare"])
def cluster(request: pytest.FixtureRequest) -> Iterator[nbgpu.Cluster]:
    with (
        nbgpu.Cluster(gpus="none", ranks=3, spare=request.param) as started,
        leaks.holding_family_of(psutil.Process(started.pids[0]).ppid()),
    ):
        yield started


@pytest.fixture(scope="module")
def unhurt(cluster: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("unhurt")
    return cluster.train("autoencoder", **SETTINGS, runs_dir=str(folder)).wait(400)


def recorded(run: Run, name: str) -> dict[tuple[int, int], float]:
    """A series by rank and step."""
    rows = run.metrics().dropna(subset=[name])
    return dict(zip(zip(rows["rank"], rows["step"], strict=True), rows[name], strict=True))


def heals(run: Run) -> list[Event]:
    """What every rank recorded of each replacement."""
    records, _ = run.reader.since()
    return [r for r in records if isinstance(r, Event) and r.kind == "heal"]


def wait_until(run: Run, status: str, after_step: int = 0) -> None:
    wait_for(run, status, lambda: run.status == status and max(s.step for s in run.statuses()) >= after_step)


def wait_for(run: Run, what: str, condition: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, f"{run} did not become {what}: {run.failures}"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("cluster", [0], indirect=True, ids=["no spare"])
def test_a_new_rank_goes_on_with_the_settings_that_were_changed(
    cluster: nbgpu.Cluster, tmp_path: Path
) -> None:
    run = cluster.train(
        "autoencoder",
        **{**SETTINGS, "accumulate": 1, "steps": 100_000, "val_every": 0},
        runs_dir=str(tmp_path),
    )
    wait_until(run, "training", after_step=2)
    run.set(lr=1e-5, batch_size=1)
    wait_until(run, "training", after_step=max(s.step for s in run.statuses()) + 8)
    os.kill(cluster.pids[1], signal.SIGKILL)
    wait_for(run, "healed", lambda: heals(run))
    wait_until(run, "training", after_step=heals(run)[0].step + 5)
    run.stop()
    assert run.wait(400).status == "stopped"
    (heal,) = {(event.kind, event.step) for event in heals(run)}
    frame = run.metrics().dropna(subset=["lr"])
    after = frame[(frame["rank"] == 1) & (frame["step"] > heal[1])]
    assert len(after) >= 3
    assert after["lr"].max() < 1e-5
    assert run.info.batch_size == 1


NOTHING_HAPPENED = "it is replaced, and training goes on; losses, weights and result equal those of a run that was never hurt"


def check_equal(run: Run, unhurt: Run) -> None:
    """Losses, as far as they were recorded, validation and weights are those of the other run, to the last
    bit."""
    expected, found = recorded(unhurt, "loss"), recorded(run, "loss")
    assert found == {key: expected[key] for key in found}
    assert recorded(run, "val_psnr_db") == recorded(unhurt, "val_psnr_db")
    for name in (checkpoint_files.MODEL, checkpoint_files.AVERAGE, checkpoint_files.DISCRIMINATOR):
        assert (run.checkpoint() / name).read_bytes() == (unhurt.checkpoint() / name).read_bytes(), name


@pytest.fixture
def kill_in_a_run(
    cluster: nbgpu.Cluster,
    unhurt: Run,
    measured: Measured,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[int], None]:
    """Kills a rank while it trains, and checks that nothing but its variables is lost."""

    def kill_and_check(dies: int) -> None:
        cluster.execute(f"kept = 5\n{faults.in_training(dies, step=2 * 14, action='kill')}")
        run = cluster.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path))
        wait_until(run, "training", after_step=14)
        measured.ended()
        assert run.wait(400).status == "finished"

        check_equal(run, unhurt)
        # What the killed rank had not written when it died is missing, and of a rank that a busy machine kept
        # in the end of its step 13, that step: it took the state of one that was further.
        missing = set(recorded(unhurt, "loss")) - set(recorded(run, "loss"))
        assert [one for one in sorted(missing) if one[1] >= 14 or (one[0] != dies and one[1] != 13)] == []
        assert {(event.rank, event.step) for event in heals(run)} == {(rank, 13) for rank in range(3)}
        assert all(f"rank {dies} was killed by SIGKILL" in event.text for event in heals(run))

        kept = [rank for rank in range(3) if rank != dies]
        assert all(cluster.pull("kept", rank=rank) == 5 for rank in kept)
        told = capsys.readouterr().err
        assert told.startswith(f"While {run.folder.name} was training, rank {dies} was killed by SIGKILL")
        assert f"rank {dies} was replaced and is empty; {named_ranges(kept)} kept all variables" in told
        assert told.count("is empty") == 1
        assert cluster.parts.state.news == []  # the next cell does not tell it again
        (note,) = [note for note in run.notes() if "replaced" in note]
        assert note.startswith(f"rank {dies} was killed by SIGKILL")
        assert "the variables that cells had made on it are lost. Training goes on after step 13." in note
        total = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"
        assert cluster.execute(total) == dict.fromkeys(range(3), "3\n")

    return kill_and_check


@pytest.mark.long
@row("rank {dies} is killed in a step of a run", NOTHING_HAPPENED, bound_s=6)
@pytest.mark.parametrize("cluster", [0], indirect=True, ids=["no spare"])
@pytest.mark.parametrize("dies", [0, 1])
def test_training_goes_on_as_if_nothing_had_happened(kill_in_a_run: Callable[[int], None], dies: int) -> None:
    kill_in_a_run(dies)


@pytest.mark.long
@row("rank {dies} is killed in a step of a run, with --spare 1", NOTHING_HAPPENED, bound_s=1.5)
@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["one spare"])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_spare_takes_the_place_of_a_rank_that_dies(kill_in_a_run: Callable[[int], None], dies: int) -> None:
    kill_in_a_run(dies)


@pytest.mark.long
@row(
    "a rank is killed in a step of a run, after cells changed torch's default dtype, device, grad mode and more",
    "neither the run nor the group has these settings: losses and weights are those of a fresh cluster, to the last bit; the "
    "cells of the rank that lives find theirs as they were",
    bound_s=6,
)
@pytest.mark.parametrize("cluster", [0], indirect=True, ids=["no spare"])
def test_what_cells_have_set_in_torch_is_not_the_run_s(
    cluster: nbgpu.Cluster, unhurt: Run, measured: Measured, tmp_path: Path
) -> None:
    cluster.execute(faults.in_training(1, step=2 * 14, action="kill") + faults.CHANGE_TORCH)
    run = cluster.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path)).wait(400)
    measured.ended()
    assert run.status == "finished"
    assert len(heals(run)) == 3
    assert len(recorded(run, "loss")) > 24
    check_equal(run, unhurt)
    found = cluster.execute(f"print({faults.TORCH_IS})", ranks=[0, 2])
    cluster.execute(faults.CHANGE_TORCH_BACK, ranks=[0, 2])
    assert found == dict.fromkeys((0, 2), faults.TORCH_WAS_CHANGED + "\n")
    total = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"
    assert cluster.execute(total) == dict.fromkeys(range(3), "3\n")
    cluster.parts.state.news.clear()


@pytest.mark.long
def test_whoever_takes_another_rank_s_place_need_not_import_what_training_needs(
    cluster: nbgpu.Cluster, unhurt: Run
) -> None:
    """It takes seconds, which the others would wait for."""
    os.kill(cluster.pids[1], signal.SIGKILL)
    with pytest.raises(nbgpu.NbgpuError, match="rank 1 was killed by SIGKILL"):
        cluster.execute("1")
    imported = (
        "import sys; print('nbgpu.recipes.autoencoder.recipe' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    assert cluster.execute(imported, ranks=[1]) == {1: "True True\n"}
    cluster.parts.state.news.clear()


@pytest.mark.long
@row(
    "rank 0, and later rank 1, is killed in a step of a run with fsdp",
    "it is replaced; the run goes back to the first step, or to its newest checkpoint, and says so; the end is that of a run "
    "that was never hurt",
    bound_s=None,
)
@pytest.mark.parametrize("cluster", [0], ids=["no spare"], indirect=True)
def test_with_fsdp_a_run_goes_back_to_its_newest_checkpoint(cluster: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {**SETTINGS, "strategy": "fsdp", "checkpoint_every": 5, "runs_dir": str(tmp_path)}
    unhurt = cluster.train("autoencoder", **settings).wait(400)
    # In step 3, when there is no checkpoint; the other one has made 6 micro-batches by then, and dies in step
    # 12.
    cluster.execute(
        faults.in_training(0, step=2 * 3, action="kill")
        + faults.in_training(1, step=6 + 2 * 12, action="kill")
    )
    run = cluster.train("autoencoder", **settings).wait(400)
    assert run.status == "finished"
    told: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for event in heals(run):
        told[event.rank].append(event.text)
    assert told[0] == told[1] == told[2]
    first, *others = told[0]
    assert "rank 0 was killed by SIGKILL" in first
    assert first.endswith("begins again with the first step, because there is no checkpoint.")
    # On a busy machine rank 1 may be given up with rank 0, and its fault goes with it.
    assert others or "rank 1 did not come back, and was ended" in first
    for second in others:
        assert "rank 1 was killed by SIGKILL" in second
        # A busy machine may not have written that of step 10 yet.
        assert re.search(r"goes on from the newest intact checkpoint, after step (5|10)\.$", second), second
        assert (
            "With strategy='fsdp' each rank has a part of the weights, and they are lost with the group"
            in second
        )
    for name in (
        checkpoint_files.MODEL,
        checkpoint_files.OPTIMIZER,
        checkpoint_files.AVERAGE,
        checkpoint_files.DISCRIMINATOR,
    ):
        assert (run.checkpoint() / name).read_bytes() == (unhurt.checkpoint() / name).read_bytes(), name
    assert run.result() == unhurt.result()
    columns = ["step", "rank", "epoch", "loss", "lr"]
    tables = [pd.read_csv(r.folder / "metrics.csv", usecols=columns) for r in (run, unhurt)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    cluster.parts.state.news.clear()


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["one spare"])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_while_the_run_is_paused_does_not_make_it_go_on(
    cluster: nbgpu.Cluster, tmp_path: Path, dies: int
) -> None:
    """And one that dies again and again at the same step ends the run, which says so."""
    run = cluster.train(
        "autoencoder", **{**SETTINGS, "steps": 100_000, "val_every": 0}, runs_dir=str(tmp_path)
    )
    wait_until(run, "training", after_step=3)
    run.pause()
    wait_until(run, "paused")
    time.sleep(0.3)
    paused_at = max(s.step for s in run.statuses())
    for num_deaths in (1, 2):
        os.kill(cluster.pids[dies], signal.SIGKILL)
        give_up_s = time.monotonic() + 300
        while len(heals(run)) < 3 * num_deaths or run.status != "paused":
            assert time.monotonic() < give_up_s, f"{run} was not healed: {run.failures}"
            time.sleep(0.02)
    assert max(s.step for s in run.statuses()) == paused_at
    assert (
        f"While {run.folder.name} was paused, rank {dies} was killed by SIGKILL"
        in cluster.parts.state.news[-1]
    )
    assert cluster.parts.state.news[-1].endswith("It stays paused until you resume it.")
    assert heals(run)[-1].text.endswith(f"after step {paused_at}. It stays paused until it is resumed.")
    os.kill(cluster.pids[dies], signal.SIGKILL)
    with pytest.raises(nbgpu.RankError, match=f"3 times at step {paused_at}"):
        run.wait(400)
    with pytest.raises(nbgpu.ClusterError, match=f"rank {dies} was killed by SIGKILL"):
        cluster.execute("1")
    assert cluster.execute("print(rank)") == {0: "0\n", 1: "1\n", 2: "2\n"}
    cluster.parts.state.news.clear()


@pytest.mark.parametrize("cluster", [0], indirect=True, ids=["no spare"])
def test_who_ended_a_rank_is_read_from_the_kernel(
    cluster: nbgpu.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its count of processes that were ended for want of memory tells a kill from the OOM killer."""
    count = tmp_path / "vmstat"

    def told_of_a_death(before: str, after: str) -> str:
        count.write_text(before)
        processes = cluster.parts.state.pool.processes
        processes.this_host._endings = endings.Endings(processes.folder, from_start=True)
        count.write_text(after)
        os.kill(cluster.pids[1], signal.SIGKILL)
        give_up_s = time.monotonic() + 300
        while not cluster.ranks.gone():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        with pytest.raises(nbgpu.ClusterError) as raised:
            cluster.execute("1")
        return str(raised.value).partition(". ")[0].partition("? ")[0]

    monkeypatch.setattr(endings, "_VMSTAT", count)
    killed = "Between two cells, rank 1 was killed by SIGKILL"
    line = "nr_free_pages 5\noom_kill {}\n"
    assert told_of_a_death(line.format(3), line.format(3)) == f"{killed}, and not by the kernel's OOM killer"
    assert told_of_a_death(line.format(3), line.format(4)).startswith(
        f"{killed}, most likely by the kernel's OOM"
    )
    assert told_of_a_death("", "") == f"{killed}; the kernel's OOM killer"
