"""The place in which a notebook is that a site's JupyterHub has started in a job of Slurm's."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from hosts.slurm import Slurm


class BatchStep:
    """Runs one program in a job of its own, on the job's first node; it can be had where a `Host` starts one.

    Args:
        slurm: a Slurm that runs.
        options: of sbatch.
        through: the beginning of the command line in the job, such as ['srun'].
    """

    name = "a job"

    def __init__(self, slurm: Slurm, options: Sequence[str], through: Sequence[str] = ()) -> None:
        self._slurm = slurm
        self._options = options
        self._through = through
        self.job = ""

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Submit a job with this program, and return a process that has its standard input and output."""
        folder = self._slurm.folder / f"job-{secrets.token_hex(4)}"
        folder.mkdir()
        for name in ("in", "out"):
            os.mkfifo(folder / name)
        words = shlex.join([*self._through, *command])
        # Programs find no folder of this test's on a node.
        script = f"#!/bin/bash -l\nunset TMPDIR\nexec {words} <{folder}/in >{folder}/out\n"
        submit = ["sbatch", "--parsable", f"--output={folder}/log", f"--error={folder}/log", *self._options]
        self.job = self._slurm.run(submit, stdin=script).stdout.strip()
        relay = f"exec 3<&0; cat <&3 >{folder}/in & exec cat {folder}/out"
        return self._slurm.login.popen(["sh", "-c", relay], **options)

    def end(self) -> None:
        """End the job."""
        self._slurm.run(["scancel", self.job], check=False)
