"""The table of a run's steps and its epochs, from what ranks recorded; and the files, also those cut off in a
line."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from nbgpu.errors import RunError
from nbgpu.protocol.records import Device, EpochSpan, Event, RunInfo, Sample
from nbgpu.run_folder import metrics_files, names
from nbgpu.run_folder.metrics_table import EpochSummarizer, EpochSummary, MetricsRow, MetricsTable
from nbgpu.run_folder.rank_files import Tail, record_path
from nbgpu.run_folder.recorder import Recorder


def sample(rank: int, step: int, **values: float) -> Sample:
    return Sample(rank, seq=0, time_s=100.0 + step, step=step, values=values)


def step(rank: int, number: int, loss: float = 1.0, **values: float) -> Sample:
    numbers = {"step_s": 0.5, "samples_per_s": 4.0, "lr": 0.1 * number, "loss": loss}
    return sample(rank, number, **numbers, **values)


def state(rank: int, name: str, at_step: int) -> Event:
    return Event(rank, 0, 0.0, at_step, "state", name)


def keys(rows: list[MetricsRow]) -> list[tuple[int, int]]:
    return [(row.step, row.rank) for row in rows]


def test_a_step_is_complete_when_every_rank_has_gone_beyond_it() -> None:
    table = MetricsTable(2)
    assert table.add([step(0, 1), step(0, 2), step(0, 3)]) == []
    assert keys(table.add([step(1, 1), step(1, 2)])) == [(1, 0), (1, 1)]
    assert keys(table.add([step(1, 3), step(0, 4)])) == [(2, 0), (2, 1)]
    assert not table.over
    assert keys(table.add([state(0, "finished", 4), state(1, "finished", 3)])) == [(3, 0), (3, 1), (4, 0)]
    assert table.over
    assert table.rest() == []


def test_what_comes_in_pieces_is_put_together() -> None:
    table = MetricsTable(1)
    rows = table.add(
        [
            sample(0, 0, memory_rss_bytes=5.0),
            step(0, 1),
            sample(0, 1, val_loss=0.7),
            step(0, 2),
            sample(0, 2, memory_rss_bytes=6.0),
            step(0, 3),
        ]
    )
    rows += table.rest()
    assert [row.values["memory_rss_bytes"] for row in rows] == [5.0, 6.0, 6.0]
    assert [row.values.get("val_loss") for row in rows] == [0.7, None, None]


def test_a_step_that_is_done_again_counts_once() -> None:
    """A run of fsdp begins again when a rank is lost."""
    table = MetricsTable(2)
    rows = table.add([step(r, s) for s in (1, 2, 3) for r in (0, 1)])
    rows += table.add([state(0, "training", 0), state(1, "failed", 2), state(1, "training", 0)])
    assert not table.over
    rows += table.add([step(r, s, loss=9.0) for s in (1, 2, 3, 4) for r in (0, 1)])
    rows += table.rest()
    assert keys(rows) == [(s, r) for s in (1, 2, 3, 4) for r in (0, 1)]


def test_a_rank_that_takes_another_s_place_loses_no_step_of_it() -> None:
    """While it loads packages it does not know yet how far the run is."""
    table = MetricsTable(2)
    assert keys(table.add([step(r, s) for s in (1, 2, 3, 4) for r in (0, 1)])) == [
        (s, r) for s in (1, 2, 3) for r in (0, 1)
    ]
    assert table.add([state(0, "loading packages", 0), state(0, "loading", 4), state(0, "training", 4)]) == []
    assert not table.went_back
    rows = table.add([step(r, 5) for r in (0, 1)]) + table.rest()
    assert keys(rows) == [(s, r) for s in (4, 5) for r in (0, 1)]


def of_two_steps(step: int) -> EpochSpan:
    epoch = (step + 1) // 2
    return EpochSpan(epoch, 2 * epoch - 1, 2 * epoch)


def test_epochs_are_summed_up_by_hand() -> None:
    rows = []
    for number in (1, 2, 3):
        rows.append(MetricsRow(number, 0, 0.0, {**step(0, number, loss=number).values, "compute_s": 0.2}))
        slower = {"compute_s": 0.3, "step_s": 0.6, "memory_rss_bytes": 7.0}
        rows.append(MetricsRow(number, 1, 0.0, {**step(1, number, loss=float("nan")).values, **slower}))
    rows[2].values["val_psnr_db"] = 20.0
    epochs = EpochSummarizer(of_two_steps)
    (first,) = epochs.add(rows)
    assert (first.epoch, first.first_step, first.last_step, first.complete) == (1, 1, 2, True)
    assert first.train_s == pytest.approx(1.2)
    assert first.samples == round(2 * (0.5 * 4 + 0.6 * 4))
    assert first.means == {"loss": 1.5}
    assert first.lr == pytest.approx(0.2)
    assert first.validation == {"psnr_db": 20.0}
    assert first.slowest_rank == 1
    assert first.straggler_ratio == pytest.approx(1.5)
    assert first.peak_memory_bytes == 7.0
    (second,) = epochs.rest()
    assert (second.epoch, second.first_step, second.last_step, second.complete) == (2, 3, 3, False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    device = Device("cpu", "a processor", "", 0, 2**30)
    info = RunInfo(
        "run", "autoencoder", (device, device), "gloo", 10, 2, batch_size=1, global_batch_size=2, started_s=0
    )
    (tmp_path / "run_info.json").write_text(json.dumps(info.to_json()))
    return tmp_path


def record(folder: Path, steps: range, end: bool) -> None:
    for rank in (0, 1):
        recorder = Recorder(folder, rank)
        for number in steps:
            recorder.sample(number, **step(rank, number).values)
            if number == 3 and rank == 0:
                recorder.sample(number, val_loss=0.5)
        if end:
            recorder.state("finished", steps[-1])
        recorder.close()


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / metrics_files.METRICS).open() as file:
        return list(csv.DictReader(file))


def test_a_series_that_comes_later_gets_a_column(folder: Path) -> None:
    record(folder, range(1, 3), end=False)
    writer = metrics_files.MetricsWriter(folder)
    writer.update()
    assert "val_loss" not in table(folder)[0]
    record(folder, range(3, 6), end=True)
    writer.update()
    writer.finish()
    rows = table(folder)
    assert [(row["step"], row["epoch"], row["rank"]) for row in rows][:5] == [
        ("1", "1", "0"),
        ("1", "1", "1"),
        ("2", "1", "0"),
        ("2", "1", "1"),
        ("3", "2", "0"),
    ]
    assert [row["val_loss"] for row in rows] == [""] * 4 + ["0.5"] + [""] * 5


@pytest.mark.parametrize("lost_bytes", [0, 1, 60, 150])
def test_files_that_were_cut_off_are_carried_on(folder: Path, lost_bytes: int) -> None:
    record(folder, range(1, 5), end=False)
    metrics_files.MetricsWriter(folder).update()
    metrics = folder / metrics_files.METRICS
    cut = metrics.read_bytes()
    metrics.write_bytes(cut[: len(cut) - lost_bytes])
    told: list[str] = []
    record(folder, range(5, 7), end=True)
    metrics_files.MetricsWriter(folder, tell=told.append).finish()
    expected = [(str(s), str(r)) for s in range(1, 7) for r in (0, 1)]
    assert [(row["step"], row["rank"]) for row in table(folder)] == expected
    lines = [json.loads(line) for line in (folder / metrics_files.EPOCHS).read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert told == []


def test_another_number_of_steps_an_epoch_counts_from_where_it_began(folder: Path) -> None:
    record(folder, range(1, 5), end=False)
    writer = metrics_files.MetricsWriter(folder)
    writer.update()
    path = folder / "run_info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "steps_per_epoch": 3, "epochs_from": [(0, 0, 2), (4, 2, 3)]}))
    record(folder, range(5, 9), end=True)
    writer.finish()
    epochs = [int(row["epoch"]) for row in table(folder) if row["rank"] == "0"]
    assert epochs == [1, 1, 2, 2, 3, 3, 3, 4]
    lines = [json.loads(line) for line in (folder / metrics_files.EPOCHS).read_text().splitlines()]
    assert [(line["epoch"], line["first_step"], line["last_step"], line["complete"]) for line in lines] == [
        (1, 1, 2, True),
        (2, 3, 4, True),
        (3, 5, 7, True),
        (4, 8, 8, False),
    ]


class Rows:
    """A sink that cannot take back what it was given."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def take(self, rows: Sequence[MetricsRow], epochs: Sequence[EpochSummary]) -> None:
        self.taken += keys(list(rows))

    def close(self) -> None:
        pass


def test_a_run_that_goes_back_has_its_steps_as_they_were_done_in_the_end(folder: Path) -> None:
    """With fsdp a run goes back to its newest checkpoint when a rank is lost."""
    record(folder, range(1, 6), end=False)
    rows = Rows()
    writer = metrics_files.MetricsWriter(folder, {"rows": lambda step: rows})
    writer.update()
    assert [row["step"] for row in table(folder)][-1] == "4"
    recorders = [Recorder(folder, rank) for rank in (0, 1)]
    for rank, recorder in enumerate(recorders):
        recorder.state("training", 2)
        for number in (3, 4):
            recorder.sample(number, **step(rank, number, loss=9.0).values)
        recorder.state("stopped", 4)
        recorder.close()
    writer.finish()
    losses = [(int(row["step"]), float(row["loss"])) for row in table(folder)]
    assert losses == [(s, loss) for s, loss in [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)] for _ in (0, 1)]
    lines = [json.loads(line) for line in (folder / metrics_files.EPOCHS).read_text().splitlines()]
    assert [(line["epoch"], line["means"]["loss"]) for line in lines] == [(1, 1.0), (2, 9.0)]
    assert rows.taken == [(s, r) for s in (1, 2, 3, 4) for r in (0, 1)]


def test_files_of_a_run_whose_rank_0_died_are_completed(folder: Path) -> None:
    record(folder, range(1, 4), end=False)
    metrics_files.MetricsWriter(folder).update()
    metrics_files.complete(folder, last_step=3)
    assert len(table(folder)) == 6
    assert json.loads((folder / metrics_files.EPOCHS).read_text().splitlines()[-1])["complete"] is False
    before = (folder / metrics_files.METRICS).stat().st_mtime_ns
    metrics_files.complete(folder, last_step=3)
    assert (folder / metrics_files.METRICS).stat().st_mtime_ns == before


def test_files_stay_where_they_cannot_be_written_again(folder: Path) -> None:
    record(folder, range(1, 4), end=False)
    metrics_files.MetricsWriter(folder).update()
    before = table(folder)
    (folder / names.INFO).write_text("{")
    with pytest.raises(RunError):
        metrics_files.complete(folder, last_step=3)
    assert table(folder) == before


def test_a_table_whose_last_step_lacks_a_rank_is_known(folder: Path) -> None:
    assert metrics_files.lacks_rows(folder, 2)
    rows = ["step,epoch,rank,time_s,loss", "1,1,0,1.0,3", "1,1,1,1.0,3", "2,1,0,2.0,3"]
    (folder / metrics_files.METRICS).write_text("\n".join(rows) + "\n")
    assert metrics_files.lacks_rows(folder, 2)
    (folder / metrics_files.METRICS).write_text("\n".join([*rows, "2,1,1,2.0,3"]) + "\n")
    assert not metrics_files.lacks_rows(folder, 2)


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path, 0)
    assert tail.new() == []
    recorder = Recorder(tmp_path, 0)
    recorder.sample(1, loss=1.0)
    recorder.close()
    with record_path(tmp_path, 0).open("ab") as file:
        file.write(b'{"seq": 1, "time_s"')
    assert [record.step for record in tail.new()] == [1]
    with record_path(tmp_path, 0).open("ab") as file:
        file.write(b': 0, "step": 2, "values": {}}\n')
    assert [record.step for record in tail.new()] == [2]
    assert tail.new() == []
