"""The newest of a rank's file, read from its end, is what a reader of the whole file finds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nbgpu.protocol.records import Device, RankStatus, RunInfo
from nbgpu.run_folder import progress as module
from nbgpu.run_folder.progress import NewestRecords, progress, state_of_slowest
from nbgpu.run_folder.rank_files import record_path
from nbgpu.run_folder.reader import Reader

CPU = Device("cpu", "a processor", "", 0, 2**30)


class File:
    """A rank's file, as a Recorder writes it."""

    def __init__(self, folder: Path) -> None:
        self.path = record_path(folder, 0)
        self.folder = folder
        self.seq = 0

    def add(self, step: int, **fields: Any) -> None:
        line = json.dumps({"seq": self.seq, "time_s": 1.0 + self.seq, "step": step, **fields})
        self.seq += 1
        with self.path.open("a") as file:
            file.write(line + "\n")

    def state(self, step: int, state: str) -> None:
        self.add(step, kind="state", text=state, detail={})

    def sample(self, step: int, **values: float) -> None:
        self.add(step, values=values)

    def as_read_whole(self) -> RankStatus:
        (status,) = Reader(self.folder, 1, live=False).statuses((CPU,))
        return status


def agree(records: NewestRecords, file: File) -> None:
    records.read()
    whole = file.as_read_whole()
    assert (records.state, records.step) == (whole.state, whole.step)
    assert records.values.items() <= whole.values.items()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("block_bytes", [3000, 2**18])
def test_it_agrees_with_a_reader_of_the_whole(
    tmp_path: Path, seed: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    draw = random.Random(seed)
    file = File(tmp_path)
    kept = NewestRecords(tmp_path, 0)
    agree(kept, file)
    file.state(0, "training")
    step = 0
    for _ in range(draw.randint(1, 60)):
        match draw.randrange(6):
            case 0:
                file.state(step, draw.choice(["training", "validating", "paused", "loading packages"]))
            case 1:
                file.add(
                    step, kind="note", text='it says "kind": "state"' + "x" * draw.randint(0, 100), detail={}
                )
            case 2:
                agree(kept, file)
            case _:
                step += 1
                file.sample(step, step_s=0.5, samples_per_s=float(step))
    agree(kept, file)
    agree(NewestRecords(tmp_path, 0), file)
    assert kept.values.get("samples_per_s", float(step)) == float(step) or step == 0


@pytest.mark.parametrize("block_bytes", [20, 50, 333])
def test_a_state_is_found_across_blocks(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    file = File(tmp_path)
    file.state(1, "loading")
    for step in range(block_bytes % 7):
        file.add(step, kind="note", text="a" * 17 * step, detail={})
    file.state(9, "paused")
    for step in range(9, 40):
        file.sample(step, loss=1.0)
        records = NewestRecords(tmp_path, 0)
        records.read()
        assert records.state == "paused"


def test_a_state_that_was_cut_off_by_a_full_disk_hides_none_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 50)
    file = File(tmp_path)
    file.state(1, "training")
    file.state(9, "paused")
    file.state(9, "training")
    text = file.path.read_bytes()
    file.path.write_bytes(text[: text.rindex(b"training") + 3])
    records = NewestRecords(tmp_path, 0)
    records.read()
    assert records.state == "paused"


def test_a_state_too_far_back_is_that_of_who_takes_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 500)
    monkeypatch.setattr(module, "_MOST_BYTES_BACK", 1000)
    file = File(tmp_path)
    file.state(0, "paused")
    for step in range(1, 30):
        file.sample(step, step_s=0.1, samples_per_s=2.0)
    records = NewestRecords(tmp_path, 0)
    records.read()
    assert (records.state, records.step) == ("training", 29)


def test_half_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    file = File(tmp_path)
    file.state(0, "training")
    records = NewestRecords(tmp_path, 0)
    records.read()
    line = b'{"seq": 1, "time_s": 3.0, "step": 7, "kind": "state", "text": "paused", "detail": {}}\n'
    with file.path.open("ab") as half:
        half.write(line[:50])
        half.flush()
        records.read()
        assert (records.state, records.step) == ("training", 0)
        half.write(line[50:])
    records.read()
    assert (records.state, records.step) == ("paused", 7)


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    file = File(tmp_path)
    file.state(3, "training")
    with file.path.open("ab") as damaged:
        damaged.write(b'\0\0\0\n{"kind": "state"\n{"seq": 9, "kind": "state", "text": "dancing"}\n')
    file.sample(4, step_s=0.1, samples_per_s=2.0)
    records = NewestRecords(tmp_path, 0)
    records.read()
    assert records.step == 4
    assert records.state == "training"


def test_a_file_that_began_again_is_read_again(tmp_path: Path) -> None:
    file = File(tmp_path)
    for step in range(50):
        file.state(step, "training")
    records = NewestRecords(tmp_path, 0)
    records.read()
    file.path.unlink()
    File(tmp_path).state(2, "paused")
    records.read()
    assert (records.state, records.step) == ("paused", 2)


def test_the_slowest_rank_is_the_run(tmp_path: Path) -> None:
    assert state_of_slowest({"training", "validating"}) == "validating"
    assert state_of_slowest({"stopping", "training"}) == "training"
    assert state_of_slowest(set()) == "training"


@pytest.mark.parametrize(("state", "left_s"), [("training", 80.0), ("paused", None), ("stopped", None)])
def test_the_time_left_is_that_of_the_pace(state: str, left_s: float | None) -> None:
    info = RunInfo("r", "autoencoder", (CPU, CPU), "gloo", 100, 10, 2, 4, 0.0)
    ranks = [
        RankStatus(rank, "training", step, CPU, 0.0, {"samples_per_s": 2.0})
        for rank, step in enumerate([20, 21])
    ]
    now = progress(info, state, ranks)
    assert (now.step, now.epoch, now.num_epochs, now.eta_s) == (20, 3, 10, left_s)


def test_the_time_left_of_a_search_is_that_of_its_steps() -> None:
    """A search goes over no samples, and its batch size means nothing."""
    info = RunInfo("r", "microstructure", (CPU, CPU), "gloo", 100, 1, 2, 4, 0.0)
    ranks = [RankStatus(rank, "training", 20, CPU, 0.0, {"step_s": 0.5 + rank}) for rank in (0, 1)]
    now = progress(info, "training", ranks)
    assert (now.samples_per_s, now.eta_s) == (0.0, 120.0)
