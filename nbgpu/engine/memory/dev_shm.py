"""Advice for when /dev/shm is full: worker processes of torch's DataLoader send tensors through it."""

from __future__ import annotations

import shutil

from nbgpu.text.sizes import in_words

FOLDER = "/dev/shm"
_TORCH_MESSAGES = (
    "unable to allocate shared memory(shm)",
    "out of shared memory",  # of a worker that SIGBUS has killed
)


def is_full(error: BaseException) -> bool:
    """Return whether torch has raised this error because /dev/shm had no room."""
    return any(message in str(error) for message in _TORCH_MESSAGES)


def advice() -> str:
    """Return a sentence with the size of /dev/shm and ways to need less of it or have more."""
    return (
        f"/dev/shm, through which worker processes send their samples, has {in_words(shutil.disk_usage(FOLDER).total)} and "
        "is full. Give it more (docker run --shm-size=8g), or take fewer workers (num_workers=0 for none), a smaller batch, "
        "or fewer batches ahead"
    )
