"""Runs one check in a process of its own, and leaves its record in a file.

    python tests/gpu/one_check.py NAME RECORD.json [--rehearse]

The record is written after every figure, so that a check that is cut off keeps those it had.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support" / "kernels"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support" / "warm"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from checks import Place, Skipped, load


def main(name: str, record: Path, rehearsal: bool) -> None:
    found = load()[name]
    began_s = time.monotonic()
    status, reason = "failed", "it was cut off"

    def keep() -> None:
        seconds = round(time.monotonic() - began_s, 1)
        content = {"status": status, "reason": reason, "figures": place.figures, "seconds": seconds}
        part = record.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.replace(record)

    with tempfile.TemporaryDirectory(prefix="nbgpu-check-") as folder:
        place = Place(not rehearsal, Path(folder), keep)
        keep()
        try:
            found.function(place)
            status, reason = "passed", ""
        except Skipped as error:
            status, reason = "skipped", str(error)
        except BaseException as error:  # noqa: BLE001 - whatever ended it belongs into the record, a stop too
            traceback.print_exc()
            message = str(error).strip() or traceback.format_exc().strip().splitlines()[-2].strip()
            status, reason = "failed", f"{type(error).__name__}: {message}"[:2000]
        keep()
    print(f"{name}: {status}{f', {reason}' if reason else ''}", flush=True)
    sys.exit(status == "failed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--rehearse" in sys.argv)
