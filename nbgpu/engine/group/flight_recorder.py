"""What torch's flight recorder noted of this rank's last collectives, kept where a run fails.

It holds the last 2000 collectives of gloo or NCCL, with their shapes and whether they ended. Compared over the ranks it
shows which of them was missing where.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nbgpu.engine.group import torch_private
from nbgpu.errors import NbgpuError
from nbgpu.machine.files import write_whole
from nbgpu.run_folder import folder as runs

_log = logging.getLogger("nbgpu.run")


def path(folder: Path, rank: int) -> Path:
    """The file of one rank in a run's folder."""
    return folder / f"flight-rank{rank}.json"


@contextmanager
def kept_in(folder: Path, rank: int) -> Iterator[None]:
    """Writes the recorder's content into a run's folder if what is done meanwhile fails.

    Not where the run failed for a reason that nbgpu knows, such as a file: collectives have no part in it.
    """
    try:
        yield
    except NbgpuError:
        raise
    except BaseException:
        recording = torch_private.flight_recording()
        if recording is not None:
            # In place of the failure nobody wants to read that this could not be written.
            with runs.telling_what_is_not_written(_log.warning):
                write_whole(path(folder, rank), recording)
        raise


def keep_nccl_from_ending_the_process() -> None:
    """Settings of ProcessGroupNCCL for a process whose variables must outlive a failed collective; before a group is formed.

    By default torch's watchdog ends the process when a collective fails or times out. Here the sentinel aborts the
    communicators (`group.give_up`), and the process goes on. PyTorch's own test of that (test_restart_pg_after_error)
    has the same settings. Variables that the person has set stay.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault(
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "0"
    )  # it would be a pickle, and is written here as JSON
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
