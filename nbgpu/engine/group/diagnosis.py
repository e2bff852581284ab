"""torch's diagnosis of collectives that do not match between the ranks. Its debug mode compares them before
each one begins (TORCH_DISTRIBUTED_DEBUG=DETAIL). Its flight recorder has this rank's last collectives, and is
saved when a run fails.

The recorder holds the last 2000 collectives of gloo or NCCL, with their shapes and whether they ended. A
comparison of the ranks' records shows which collective was missing on which rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from nbgpu.engine.group import collective_timeout, torch_private
from nbgpu.errors import NbgpuError
from nbgpu.machine.files import telling_what_is_not_written, write_whole

_log = logging.getLogger("nbgpu.run")


def path(folder: Path, rank: int) -> Path:
    """Return the path of one rank's file in a run's folder."""
    return folder / f"flight-rank{rank}.json"


@contextmanager
def kept_in(folder: Path, rank: int) -> Iterator[None]:
    """Save the flight recorder's content in a run's folder if the block fails, and name the late ranks if the
    failure comes from a collective that took too long.

    Nothing is written for an error that nbgpu itself explains, such as a bad file: collectives have no part
    in it.
    """
    try:
        yield
    except NbgpuError:
        raise
    except BaseException as error:
        recording = torch_private.flight_recording()
        if recording is not None:
            # A failure to write the file must not hide the failure of the run.
            with telling_what_is_not_written(_log.warning):
                write_whole(path(folder, rank), recording)
        if (explained := collective_timeout.explain(error)) is not error:
            raise explained from None
        raise


def keep_nccl_from_ending_the_process() -> None:
    """Set up ProcessGroupNCCL so that the process outlives a failed collective.

    Call before a group is formed.

    By default torch's watchdog ends the process when a collective fails or times out. Here the sentinel
    aborts the communicators (`group.give_up`), and the process goes on with its variables. PyTorch's own test
    of this (test_restart_pg_after_error) has the same settings. Environment variables that the person has set
    stay.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # torch's own file would be a pickle, which can run any code when it is read; ours is JSON.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # Before torch 2.9, in which gloo has a recorder too, the variable has NCCL's name; without it torch 2.6
    # records nothing, and no collective over NCCL would ever be given up.
    size = "TORCH_FR_BUFFER_SIZE" if torch_private.records_gloo() else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    os.environ.setdefault(size, "2000")


def compare_collectives() -> None:
    """Switch the comparison on for groups that are made from now on."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch_private.read_debug_level()
    mend_ddp()


def mend_ddp() -> None:
    """Make DDP work in debug mode; change nothing where debug mode is off.

    DDP's logger looks for gloo's options in the group, finds the wrapper that compares the collectives, and
    reads it as if it were gloo: a segmentation fault in the constructor (torch 2.13). The options are only
    logged, so that DDP can do without them.
    """
    if torch_private.compares_collectives():
        dist.Logger = torch_private.LoggerWithoutOptions  # type: ignore[attr-defined]
