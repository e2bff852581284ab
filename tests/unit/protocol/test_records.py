"""What crosses a process boundary comes back as it was, as JSON and as a pickle."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from nbgpu.protocol.records import Device, EpochSpan, Event, RankFailure, RankStatus, RunInfo, Sample
from nbgpu.run_folder.rank_files import parse

GPU = Device("cuda", "NVIDIA H200", "GPU-1f2e", 3, 150_000_000_000)
CPU = Device("cpu", "A processor", "", 1, 8_000_000_000)
RUN = RunInfo(
    run_id="20260101-120000-autoencoder-ab12",
    recipe="autoencoder",
    devices=(GPU, CPU),
    backend="gloo",
    total_steps=100,
    steps_per_epoch=10,
    batch_size=2,
    global_batch_size=8,
    started_s=1.75e9,
    parameters=1234,
)
RECORDS: list[Any] = [
    GPU,
    CPU,
    Sample(1, 0, 1.75e9, 5, {"loss": 0.25, "val_loss": float("inf")}),
    Event(0, 1, 1.75e9, 5, "checkpoint", "step 5", {"path": "checkpoints/5", "sizes": [1, 2]}),
    RankStatus(1, "training", 5, CPU, 0.1, {"loss": 0.25}),
    RankFailure(0, "ValueError", "no", "Traceback ...\nValueError: no"),
    RUN,
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_a_pickle(record: Any) -> None:
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize("record", [r for r in RECORDS if r is not RUN], ids=lambda r: type(r).__name__)
def test_a_record_is_plain_json(record: Any) -> None:
    fields = dataclasses.asdict(record)
    assert json.loads(json.dumps(fields)) == fields


@pytest.mark.parametrize("record", [r for r in RECORDS if isinstance(r, Sample | Event)])
def test_a_sample_or_event_comes_back_from_its_line(record: Sample | Event) -> None:
    fields = dataclasses.asdict(record)
    del fields["rank"]
    assert parse(record.rank, json.dumps(fields).encode()) == record


def test_run_info_comes_back_from_json() -> None:
    again = RunInfo.from_json(json.loads(json.dumps(RUN.to_json())))
    assert again == RUN
    assert again.devices == (GPU, CPU)
    assert again.world_size == 2


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_cannot_be_changed(record: Any) -> None:
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)


def test_a_device_has_a_short_name() -> None:
    assert GPU.label() == "GPU 3 NVIDIA H200"
    assert CPU.label() == "CPU rank 1"


def test_epochs_count_on_where_their_steps_become_more_or_fewer() -> None:
    run = dataclasses.replace(RUN, steps_per_epoch=5, epochs_from=((0, 0, 10), (20, 2, 5)))
    assert RunInfo.from_json(json.loads(json.dumps(run.to_json()))) == run
    assert run.epoch_at(1) == EpochSpan(1, 1, 10)
    assert run.epoch_at(20) == EpochSpan(2, 11, 20)
    assert run.epoch_at(21) == EpochSpan(3, 21, 25)
    assert run.epoch_at(26) == EpochSpan(4, 26, 30)
    assert RUN.epoch_at(11) == EpochSpan(2, 11, 20)
