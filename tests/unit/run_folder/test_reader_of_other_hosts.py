"""Records of ranks on other hosts, which come without a socket."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nbgpu.run_folder.rank_files import record_path
from nbgpu.run_folder.reader import Reader


def line(seq: int) -> bytes:
    return (
        json.dumps({"seq": seq, "time_s": 1.0 + seq, "step": seq, "values": {"loss": 0.5}}).encode() + b"\n"
    )


def wait_for(reader: Reader, count: int) -> list[int]:
    give_up_s = time.monotonic() + 300
    while len(records := reader.since()[0]) < count:
        assert time.monotonic() < give_up_s, records
        time.sleep(0.01)
    return [record.seq for record in records]


def test_lines_that_are_heard_before_the_file_has_them_count_once(tmp_path: Path) -> None:
    reader = Reader(tmp_path, 1)
    try:
        reader.hear(0, line(0) + line(1))
        assert wait_for(reader, 2) == [0, 1]
        assert reader.offset_bytes(0) == len(line(0) + line(1))
        # A message may repeat what was heard, or lack what the file has.
        record_path(tmp_path, 0).write_bytes(b"".join(map(line, range(4))))
        reader.hear(0, line(1) + line(2))
        reader.hear(0, line(4))
        assert wait_for(reader, 4)[:4] == [0, 1, 2, 3]
    finally:
        reader.close()
    assert [record.seq for record in reader.since()[0]][:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [b"", line(0)])
def test_a_rank_that_is_heard_of_is_not_silent(tmp_path: Path, batch: bytes) -> None:
    reader = Reader(tmp_path, 1)
    try:
        time.sleep(0.3)
        before_s = reader._sources[0].heard_mono_s
        reader.hear(0, batch)
        assert reader._sources[0].heard_mono_s > before_s
    finally:
        reader.close()
