"""The progress of a prediction in words, for a notebook (`line`) and a terminal (`terminal`)."""

from __future__ import annotations

from nbgpu.run_folder.predictions import Progress


def in_words(progress: Progress) -> str:
    """Return how many samples of a prediction are done, how many have failed, and the newest one."""
    if progress.num_samples is None:
        return "looking at the data"
    if not progress.num_samples:
        return "nothing is left to do"
    text = f"{progress.num_done} of {progress.num_samples} samples"
    if progress.num_failed:
        text += f", {progress.num_failed} without a prediction"
    return f"{text}; last {progress.newest}" if progress.newest else text
