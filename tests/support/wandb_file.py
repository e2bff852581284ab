"""Reads what W&B wrote in its offline mode, as JSON. The package itself only sends such a file on.

python tests/support/wandb_file.py run-ID.wandb
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 2**15
_FILE_HEADER_BYTES, _HEADER_BYTES = 7, 7
_FULL, _LAST = 1, 4


def _records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format behind a header of W&B's own."""
    assert content.startswith(b":W&B")
    place, whole = _FILE_HEADER_BYTES, b""
    while place < len(content):
        if _BLOCK_BYTES - place % _BLOCK_BYTES < _HEADER_BYTES:
            place += _BLOCK_BYTES - place % _BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + _HEADER_BYTES])
        place += _HEADER_BYTES
        whole += content[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield whole
            whole = b""


def read(path: Path) -> dict[str, Any]:
    """Id, project, name and configuration of the run, its steps, and whether its end is there."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"history": [], "ended": False}
    for content in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            found["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
            found["history"].append(items)
        elif kind == "exit":
            found["ended"] = True
    return found


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]))))
