"""The state of a run in words and in a few numbers, for the panel, for a line of text and for a screen
reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbgpu.protocol.records import FINAL_STATES, HIGH, LOW, RankStatus, RunInfo
from nbgpu.run_folder.progress import ProgressBar, progress
from nbgpu.text.durations import duration
from nbgpu.text.ranks import count_of_ranks
from nbgpu.ui.run.history import History, Series

SILENCE_WORTH_SAYING_S = 3.0
"""A rank that trains and was not heard for this long gets a warning."""
SILENCE_OF_IMPORTS_S = 60.0
"""A rank that does not train yet gets the warning after this time: some packages hold the GIL for long while
they are loaded."""
MEMORY_WORTH_SAYING = 0.9
"""The share of a device's memory above which the panel warns."""

_UNITS = {"db": "dB", "s": "s", "percent": "%", "bytes": "bytes", "nm": "nm", "mm": "mm"}

_RECENT_STEPS = 20
"""The ranks' times are compared by their means over this many of the newest records."""
_PACE_TOLERANCE = 0.05
"""Ranks whose times differ by less than this share count as equally fast."""


def readable(name: str) -> str:
    """The name of a series as words with its unit: 'val_psnr_db' becomes 'psnr (dB)'."""
    words = name.removeprefix("val_").split("_")
    unit = _UNITS.get(words[-1]) if len(words) > 1 else None
    return " ".join(words) if unit is None else f"{' '.join(words[:-1])} ({unit})"


def validated(newest: Mapping[str, float]) -> list[str]:
    """The newest loss of the validations, and their values that have intervals, each in words.

    Args:
        newest: the newest value of each series, by name.
    """
    parts = [f"validation loss {newest['val_loss']:.4g}"] if "val_loss" in newest else []
    with_intervals = [name for name in newest if name.startswith("val_") and name + LOW in newest]
    return parts + [f"{readable(name)} {with_interval(name, newest, '.3g')}" for name in with_intervals]


def with_interval(name: str, values: Mapping[str, float], digits: str) -> str:
    """A value with the interval that is recorded beside it: '0.71 (0.55 to 0.84)'; alone where there is
    none."""
    low, high = values.get(name + LOW), values.get(name + HIGH)
    interval = "" if low is None or high is None else f" ({low:{digits}} to {high:{digits}})"
    return f"{values[name]:{digits}}{interval}"


def epochs(now: ProgressBar) -> str:
    """The epoch in words; empty where it is not known, and where the run has only one."""
    if now.num_epochs > 1:
        return f"epoch {now.epoch} of {now.num_epochs}"
    return f"epoch {now.epoch}" if now.epoch and not now.num_epochs else ""


def memory_bytes(status: RankStatus) -> float | None:
    """The memory of the device that a rank holds: CUDA memory reserved by torch, or the process's resident
    memory; None before the first sample."""
    return status.values.get("memory_reserved_bytes", status.values.get("memory_rss_bytes"))


def state(status: RankStatus) -> str:
    """Return the state of a rank; while it works out the result, with the number of samples done."""
    if status.state != "working out the result" or status.done == status.total:
        return status.state
    return f"{status.state}, {status.done} of {status.total}"


def evaluated(statuses: Sequence[RankStatus]) -> str:
    """Return how many samples of the result all ranks together have evaluated; empty before that and at the
    end."""
    done, total = sum(s.done for s in statuses), sum(s.total for s in statuses)
    is_over = all(s.state in FINAL_STATES for s in statuses)
    return "" if is_over or done == total else f"{done} of {total} samples of the result evaluated"


def warning(status: RankStatus) -> str:
    """A warning about a rank in words; empty where all is well.

    A silent rank may be in C code that holds the GIL, so this never says that it is dead.
    """
    before_training = status.state in ("starting", "loading packages")
    worth_saying_s = SILENCE_OF_IMPORTS_S if before_training else SILENCE_WORTH_SAYING_S
    if status.state not in FINAL_STATES and status.silent_s >= worth_saying_s:
        return f"no heartbeat for {status.silent_s:.0f} s"
    used = memory_bytes(status)
    share = used / status.device.memory_bytes if used is not None and status.device.memory_bytes else 0.0
    return f"memory {share:.0%}".replace("%", " %") if share >= MEMORY_WORTH_SAYING else ""


def pace(history: History, num_ranks: int) -> str:
    """One sentence that names the slowest rank and says by how much it is slower; empty until that is known.
    Ranks from `num_ranks` on are lost with their host, and have no pace.

    Under DDP all ranks end a step together, so equal step times can hide a rank for which the others wait.
    The series `compute_s` and `data_s` have each rank's own share of the work, where they were measured.
    """
    # The most telling series comes first: how long a rank works by itself.
    for name, what in (
        ("compute_s", "spends {more} longer on each step's own work than rank {fast}"),
        ("data_s", "waits {more} longer for data than rank {fast}"),
        ("step_s", "takes {more} longer for a step than rank {fast}"),
    ):
        by_rank = _series_of(history, name, num_ranks)
        if len(by_rank) < 2:
            continue
        means = {rank: series.recent_mean(_RECENT_STEPS) for rank, series in by_rank.items()}
        slow, fast = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        step_means = [s.recent_mean(_RECENT_STEPS) for s in _series_of(history, "step_s", num_ranks).values()]
        reference_s = max([*step_means, means[slow]])
        difference_s = means[slow] - means[fast]
        if reference_s > 0 and difference_s / reference_s > _PACE_TOLERANCE:
            more = f"{duration(difference_s)} ({difference_s / reference_s:.0%} of a step)".replace("%", " %")
            return f"Rank {slow} is the slowest: it {what.format(more=more, fast=fast)}."
    if len(_series_of(history, "step_s", num_ranks)) < 2:
        return ""
    return f"All ranks keep the same pace: their times differ by less than {_PACE_TOLERANCE:.0%} of a step.".replace(
        "%", " %"
    )


def _series_of(history: History, name: str, num_ranks: int) -> dict[int, Series]:
    return {rank: series for rank, series in history.ranks_of(name).items() if rank < num_ranks}


def time_left(left_s: float | None) -> str:
    """Return a text about the time until a run's job ends; empty if no such time is known."""
    return "" if left_s is None else f"the job ends in {duration(left_s)}"


def recent(history: History, num_marks: int = 3) -> list[str]:
    """The latest events of a run, with a line for each."""
    return [
        f"step {mark.step}: {mark.text if mark.kind == 'note' else f'{mark.kind} {mark.text}'}"
        for mark in history.marks[-num_marks:]
    ]


def summary(info: RunInfo, state: str, statuses: Sequence[RankStatus], history: History | None = None) -> str:
    """One line about the progress of a run, for a notebook with no frontend and for the saved output. The
    losses are those of the history, or without one the newest that each rank has told."""
    now = progress(info, state, statuses)
    by_rank = {status.rank: status.values for status in statuses} if history is None else history.newest()
    losses = [values["loss"] for values in by_rank.values() if "loss" in values]
    rate = f"{now.samples_per_s:.3g} samples/s on {count_of_ranks(info.world_size)}"
    parts = [
        f"{info.title}: {state}",
        now.in_steps,
        epochs(now),
        f"loss {sum(losses) / len(losses):.4g}" if losses else "",
        *validated(by_rank.get(0, {})),
        rate if now.samples_per_s > 0 else "",
        evaluated(statuses),
        info.simulated,
        f"{duration(now.eta_s)} left" if now.eta_s is not None else "",
    ]
    return ", ".join(filter(None, parts))
