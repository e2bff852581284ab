"""Run checks that need torch in processes of their own, which end with their answer or are killed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any

from nbgpu.errors import ClusterError
from nbgpu.machine import devices, interpreter
from nbgpu.protocol.records import Device

_PATIENCE_S = 120.0
"""Long enough for imports on a busy host, and for NCCL's first collective on many GPUs."""
_POLL_PERIOD_S = 0.02


def about_torch() -> dict[str, Any]:
    """The versions that torch is built with, and the number of GPUs that it sees; ClusterError if it cannot
    be imported."""
    (answer,) = _ask([["about"]], {})
    return answer


def all_reduce(chosen: Sequence[Device], backend: str) -> list[dict[str, Any]]:
    """Form a group with one process for each device, and run an all_reduce of a megabyte.

    Returns:
        `form_s` and `all_reduce_s`, in seconds, by rank.

    Raises:
        ClusterError: a process failed or did not answer; the message has the last line of its error output.
    """
    gpus = ",".join(dict.fromkeys(d.uuid for d in chosen if d.kind == "cuda"))
    with tempfile.TemporaryDirectory(prefix="nbgpu-trial-") as folder:
        shared = [folder, str(len(chosen)), backend]
        questions = [
            ["reduce", shared[0], str(rank), *shared[1:], devices.torch_name(device, chosen)]
            for rank, device in enumerate(chosen)
        ]
        return _ask(questions, {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"})


def _ask(questions: Sequence[Sequence[str]], environment: dict[str, str]) -> list[dict[str, Any]]:
    with ExitStack() as open_files:
        # Files take the output and not pipes, because NCCL may be set to log more than a pipe holds.
        outputs, errors = (
            [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in questions] for _ in range(2)
        )
        asked = [
            subprocess.Popen(
                interpreter.command("nbgpu.engine.group.probe", *question),
                stdout=output,
                stderr=error,
                env={**os.environ, **environment},
            )
            for question, output, error in zip(questions, outputs, errors, strict=True)
        ]
        give_up_s = time.monotonic() + _PATIENCE_S
        try:
            # Once one process has failed, the others would wait for it.
            while any(process.poll() is None for process in asked) and not any(p.poll() for p in asked):
                if time.monotonic() > give_up_s:
                    raise ClusterError(f"no answer within {_PATIENCE_S:g} s")
                time.sleep(_POLL_PERIOD_S)
        finally:
            ended = [process.poll() for process in asked]
            for process in asked:
                process.kill()
                process.wait()
        failed = [
            _last_line(error) or f"a process ended with {code}"
            for code, error in zip(ended, errors, strict=True)
            if code
        ]
        if failed:
            raise ClusterError("; ".join(dict.fromkeys(failed)))
        return [json.loads(_last_line(output)) for output in outputs]


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = [line for line in file if line.strip()]
    return lines[-1].strip() if lines else ""
