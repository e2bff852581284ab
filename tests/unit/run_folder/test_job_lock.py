"""A run's folder that a job goes on with is held by one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbgpu.errors import RunError
from nbgpu.run_folder import job

HOLD = """
import sys, time
from pathlib import Path
from nbgpu.run_folder import job
job.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_LOCK_PATIENCE_S", 0.5)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="is trained by another process, perhaps of the same job"):
            job.hold(tmp_path)
        first.kill()
    os.close(job.hold(tmp_path))
