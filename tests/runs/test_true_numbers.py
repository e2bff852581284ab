"""Charts, report, metrics.csv and epochs.jsonl against a ledger that the ranks' own code keeps beside
them."""

from __future__ import annotations

import bisect
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import launching
import pandas as pd
import pytest
from kernel import Kernel, kernel
from rows import Measured, row

import nbgpu
from nbgpu.client.host import ps, registry
from nbgpu.client.runs.run import Run
from nbgpu.protocol.records import Sample
from nbgpu.ui.run.snapshot import history_of, report_html
from nbgpu.ui.run.stored import StoredRun

NUM_SAMPLES = 48

# The file is imported wherever the recipe trains, also by a rank that takes another's place.
KEEPS_A_LEDGER = f"""
import json
import time

import torch
from torch import nn
from torch.utils.data import Dataset

from nbgpu.engine.training.trainer import Trainer
from nbgpu.recipes.own import OwnRecipe


class Numbers(Dataset):
    def __len__(self):
        return {NUM_SAMPLES}

    def __getitem__(self, index):
        return {{"x": torch.full((3,), index / 10), "index": index}}


class KeepsALedger(OwnRecipe):
    val_fraction: float = 0.0

    def dataset(self):
        return Numbers()

    def model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        time.sleep(0.03)
        loss = (model(batch["x"]) - 1).square().mean()
        Trainer.own_notes.update(loss=loss.item(), samples=batch["index"].tolist())
        return loss


if not hasattr(Trainer, "own_notes"):  # the file is read again when a setting changes
    Trainer.own_notes = {{}}
    Trainer._unwatched_step = Trainer._train_step

    def watched(self):
        self.own_notes.clear()
        self._unwatched_step()
        if self.own_notes:
            entry = {{"step": self.step, "lr": self._built.optimizer.param_groups[0]["lr"], "ended_s": time.time()}}
            with (self.folder / f"ledger{{self.rank}}.jsonl").open("a") as file:
                file.write(json.dumps(entry | self.own_notes) + "\\n")

    Trainer._train_step = watched
"""

SETTINGS: dict[str, Any] = {"batch_size": 2, "steps": 100_000, "val_every": 0, "threads": 1}
"""An epoch has 12 steps on two ranks."""


class Entry(NamedTuple):
    """What a rank noted of one step."""

    loss: float
    lr: float
    samples: frozenset[int]
    ended_s: float
    epoch: int


Ledger = dict[tuple[int, int], Entry]
"""By (rank, step)."""


def ledger_of(folder: Path, before: Ledger | None = None) -> Ledger:
    """What the ranks noted of a run, or of one that goes on from another one's end.

    An epoch ends, by its definition, when every sample has come once. A killed rank may have noted one step
    less.
    """
    noted: dict[int, dict[int, dict[str, Any]]] = {}
    for rank in (0, 1):
        for line in (folder / f"ledger{rank}.jsonl").read_text().splitlines():
            with suppress(json.JSONDecodeError):  # a rank that was killed may have left half a line
                fields = json.loads(line)
                noted.setdefault(fields["step"], {})[rank] = fields
    ledger: Ledger = {}
    epoch = max((entry.epoch for entry in before.values()), default=1) if before else 1
    of_this_epoch = (entry.samples for entry in (before or {}).values() if entry.epoch == epoch)
    seen: set[int] = set().union(*of_this_epoch)
    for step, by_rank in sorted(noted.items()):
        samples = {sample for fields in by_rank.values() for sample in fields["samples"]}
        if samples & seen or len(seen) == NUM_SAMPLES:
            assert len(seen) >= NUM_SAMPLES - 4
            seen, epoch = set(), epoch + 1
        seen |= samples
        for rank, fields in by_rank.items():
            noted_samples = frozenset(fields["samples"])
            ledger[rank, step] = Entry(fields["loss"], fields["lr"], noted_samples, fields["ended_s"], epoch)
    return ledger


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "keeps_a_ledger.py"
    path.write_text(KEEPS_A_LEDGER)
    return str(path)


def wait_until(condition: Callable[[], bool], run: Run) -> None:
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, f"{run} {run.failures}"
        time.sleep(0.02)


def go_on(run: Run, num_steps: int) -> None:
    target = max(s.step for s in run.statuses()) + num_steps
    wait_until(lambda: min(s.step for s in run.statuses()) >= target, run)


def heal(cluster: nbgpu.Cluster, run: Run, rank: int) -> None:
    """Kills a rank, and waits until both have gone on and the new one has measured its memory twice."""
    pid = cluster.pids[rank]
    launching.kill(pid, signal.SIGKILL, rank)
    wait_until(lambda: cluster.pids[rank] != pid, run)
    go_on(run, 60)


def check_every_view(run: Run | StoredRun, ledger: Ledger, may_lack: tuple[int, ...] = ()) -> None:
    """Compares all that is shown of a run which is over; `may_lack`: ranks that died before they had written
    all."""
    check_table(run, ledger, may_lack)
    check_charts(run, ledger, may_lack)
    check_epochs(run, ledger, may_lack)
    check_measured(run, ledger)


def check_keys(found: set[tuple[int, int]], ledger: Ledger, may_lack: tuple[int, ...]) -> None:
    assert found <= set(ledger)
    lacking = set(ledger) - found
    assert all(rank in may_lack for rank, _ in lacking)
    assert len(lacking) <= 6 * len(may_lack), "a killed rank lacks what it wrote last, at most some steps"


def check_table(run: Run | StoredRun, ledger: Ledger, may_lack: tuple[int, ...]) -> None:
    table = pd.read_csv(run.folder / "metrics.csv", float_precision="round_trip")
    keys = list(zip(table["rank"], table["step"], strict=True))
    assert len(set(keys)) == len(keys)
    check_keys(set(keys), ledger, may_lack)
    for key, line in zip(keys, table.itertuples(), strict=True):
        entry = ledger[key]
        assert (line.loss, line.lr, line.epoch) == (entry.loss, entry.lr, entry.epoch), key
        assert round(line.samples_per_s * line.step_s) == len(entry.samples)
        assert line.time_s == pytest.approx(entry.ended_s, abs=0.5)


def check_charts(run: Run | StoredRun, ledger: Ledger, may_lack: tuple[int, ...]) -> None:
    history = history_of(StoredRun(run.folder))
    assert {(0, "loss"), (1, "loss"), (0, "lr"), (0, "memory_rss_bytes")} <= set(history.series)
    for (_, name), series in history.series.items():
        assert series.steps == sorted(series.steps), f"{name} runs back across the chart"
    drawn = {
        (rank, step): value
        for rank, series in history.ranks_of("loss").items()
        for step, value in zip(series.steps, series.values, strict=True)
    }
    check_keys(set(drawn), ledger, may_lack)
    assert drawn == {key: ledger[key].loss for key in drawn}
    rates = history.series[0, "lr"]
    assert {ledger[0, s].lr == lr for s, lr in zip(rates.steps, rates.values, strict=True)} == {True}
    # The report has the same curves, as the page draws them.
    html = report_html(StoredRun(run.folder))
    figures = json.loads(re.search(r"const figure of (.*)\) {\n", html)[1])  # type: ignore[index]
    (of_loss,) = [f for f in figures if f["layout"]["annotations"][0]["text"].startswith("<b>Loss")]
    raw = [trace for trace in of_loss["data"] if trace["opacity"] < 1]
    assert [trace["name"] for trace in raw] == ["rank 0", "rank 1"]
    for rank, trace in enumerate(raw):
        points = list(zip(trace["x"], trace["y"], strict=True))
        assert points == [(s, pytest.approx(ledger[rank, s].loss, rel=1e-4)) for s, _ in points]
    for trace in (trace for figure in figures for trace in figure["data"]):
        assert trace["x"] == sorted(trace["x"])


def check_epochs(run: Run | StoredRun, ledger: Ledger, may_lack: tuple[int, ...]) -> None:
    told = [json.loads(line) for line in (run.folder / "epochs.jsonl").read_text().splitlines()]
    assert [e["epoch"] for e in told] == sorted({entry.epoch for entry in ledger.values()})
    for epoch in told:
        own = {key: entry for key, entry in ledger.items() if entry.epoch == epoch["epoch"]}
        assert epoch["first_step"] == min(step for _, step in own)
        assert epoch["last_step"] == max(step for _, step in own)
        num_samples = sum(len(entry.samples) for entry in own.values())
        is_last = epoch is told[-1]
        begins_whole = epoch["first_step"] == 1 or epoch is not told[0]
        assert epoch["complete"] == (begins_whole and (not is_last or num_samples == NUM_SAMPLES))
        assert abs(epoch["samples"] - num_samples) <= 12 * len(may_lack)
        # A rank that was killed in that very step has noted nothing of it; all ranks have equal rates.
        assert {epoch["lr"]} == {entry.lr for (_, step), entry in own.items() if step == epoch["last_step"]}
        if epoch["samples"] == num_samples:
            losses = [entry.loss for entry in own.values()]
            assert epoch["means"]["loss"] == pytest.approx(sum(losses) / len(losses))


def check_measured(run: Run | StoredRun, ledger: Ledger) -> None:
    """Memory and utilization stand at the step that the rank was at when they were measured, from the first
    one on."""
    first_step = min(step for _, step in ledger)
    ended = {rank: sorted((e.ended_s, s) for (r, s), e in ledger.items() if r == rank) for rank in (0, 1)}
    samples = [r for r in run.reader.records() if isinstance(r, Sample) and "memory_rss_bytes" in r.values]
    assert {sample.rank for sample in samples} == {0, 1}
    for sample in samples:
        num_ended = bisect.bisect(ended[sample.rank], (sample.time_s, 0))
        step = ended[sample.rank][num_ended - 1][1] if num_ended else first_step - 1
        # The ranks' own clock is read a moment after the step.
        assert abs(sample.step - step) <= 1 or sample.step == first_step - 1 == step


@pytest.mark.long
@row(
    "rank 1, and later rank 0, is killed in a run whose lr and batch size were changed, and which is resumed from its end",
    "charts, report, metrics.csv and epochs.jsonl agree with what the ranks themselves noted of every step",
    bound_s=None,
)
@pytest.mark.timeout(240)
def test_what_is_shown_is_what_the_ranks_did(
    cluster2: nbgpu.Cluster, recipe: str, measured: Measured, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "runs_dir": str(tmp_path / "runs")}
    run = cluster2.train(recipe, **settings)
    wait_until(lambda: min(s.step for s in run.statuses()) >= 14, run)
    measured.fault_now()
    heal(cluster2, run, rank=1)
    run.set(lr=1e-5, batch_size=1)
    go_on(run, 30)
    assert run.info.batch_size == 1
    heal(cluster2, run, rank=0)
    run.set(batch_size=2)
    go_on(run, 40)
    run.stop()
    assert run.wait(400).status == "stopped"
    measured.ended()
    cluster2.parts.state.news.clear()
    ledger = ledger_of(run.folder)
    assert {len(entry.samples) for entry in ledger.values()} == {1, 2}
    assert len({entry.epoch for entry in ledger.values()}) > 3
    check_every_view(run, ledger, may_lack=(0, 1))

    last_step = max(step for _, step in ledger)
    resumed = cluster2.train(recipe, **{**settings, "steps": last_step + 30, "resume": str(run.folder)}).wait(
        120
    )
    goes_on = ledger_of(resumed.folder, before=ledger)
    assert min(step for _, step in goes_on) == last_step + 1
    check_every_view(resumed, goes_on)


def well(notebook: Kernel, code: str) -> str:
    """Runs a cell that must succeed; returns what it printed."""
    done = notebook.run(code, timeout_s=120)
    assert done.status == "ok", done.error
    return done.stdout


def going_on(num_steps: int) -> str:
    """Code that waits until both ranks have taken so many more steps."""
    return f"""
import time
until = max(s.step for s in run.statuses()) + {num_steps}
while min(s.step for s in run.statuses()) < until and not run.over: time.sleep(0.02)
assert not run.over, run.failures
"""


@contextmanager
def kept_cluster() -> Iterator[Kernel]:
    """A kernel that has started a cluster which outlives it; the cluster is ended where nobody else has ended
    it."""
    others = {entry.id for entry in registry.entries()}
    try:
        with kernel() as notebook:
            well(notebook, f"%load_ext nbgpu\nimport nbgpu\n%nbgpu start {launching.flags()} --keep")
            yield notebook
    finally:
        ps.stop([entry.id for entry in registry.entries() if entry.id not in others])


@pytest.mark.long
@row(
    "the kernel is killed under a kept run; another one attaches to it and changes its lr; a rank is killed",
    "charts, report, metrics.csv and epochs.jsonl agree with what the ranks themselves noted of every step",
    bound_s=None,
)
@pytest.mark.timeout(240)
def test_what_is_shown_of_a_run_that_was_attached_to_is_what_the_ranks_did(
    recipe: str, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "runs_dir": str(tmp_path / "runs")}
    with kept_cluster() as first:
        well(first, f"run = nbgpu.current().train({recipe!r}, **{settings!r})\n{going_on(14)}")
        os.killpg(first.manager.provisioner.pid, signal.SIGKILL)
        time.sleep(1)  # the run goes on, and nobody reads what it records
        with kernel() as second:
            well(second, f"import nbgpu\nrun = nbgpu.attach().run\n{going_on(14)}")
            well(second, f"run.set(lr=1e-5)\n{going_on(20)}")
            launching.kill(int(well(second, "print(nbgpu.current().pids[1])")), signal.SIGKILL, rank=1)
            well(second, going_on(60))
            well(second, "run.stop()\nassert run.wait(400).status == 'stopped'\nnbgpu.current().stop()")
    (folder,) = (tmp_path / "runs").iterdir()
    ledger = ledger_of(folder)
    assert {entry.lr for entry in ledger.values()} > {1e-5}
    check_every_view(StoredRun(folder), ledger, may_lack=(1,))
