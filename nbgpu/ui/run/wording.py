"""The state of a run as short texts, for the panel, the terminal, the saved notebook and screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbgpu.protocol.records import FINAL_STATES, HIGH, LOW, RankStatus, RunInfo
from nbgpu.run_folder.progress import ProgressBar, progress
from nbgpu.text.durations import duration
from nbgpu.text.ranks import count_of_ranks
from nbgpu.ui.run.history import History

SILENCE_WORTH_SAYING_S = 3.0
"""A rank that trains and has sent no heartbeat for this long gets a warning."""
SILENCE_OF_IMPORTS_S = 60.0
"""A rank that does not train yet gets the warning after this time, because some packages hold the GIL long
while they are imported."""
MEMORY_WORTH_SAYING = 0.9
"""The share of a device's memory above which the panel warns."""

_UNITS = {"db": "dB", "s": "s", "percent": "%", "bytes": "bytes", "nm": "nm", "mm": "mm"}

_RECENT_RECORDS = 20
"""The ranks' times are compared by their means over this many of the newest records."""
_PACE_TOLERANCE = 0.05
"""Ranks whose times differ by less than this share count as equally fast."""


def readable(name: str) -> str:
    """The name of a series as words with its unit: 'val_psnr_db' becomes 'psnr (dB)'."""
    words = name.removeprefix("val_").split("_")
    unit = _UNITS.get(words[-1]) if len(words) > 1 else None
    return " ".join(words) if unit is None else f"{' '.join(words[:-1])} ({unit})"


def validated(newest: Mapping[str, float]) -> list[str]:
    """Texts about the newest validation: its loss, and its values that have an interval.

    Args:
        newest: the newest value of each series, by name.
    """
    parts = [f"validation loss {newest['val_loss']:.4g}"] if "val_loss" in newest else []
    with_intervals = [name for name in newest if name.startswith("val_") and name + LOW in newest]
    return parts + [f"{readable(name)} {with_interval(name, newest, '.3g')}" for name in with_intervals]


def with_interval(name: str, values: Mapping[str, float], digits: str) -> str:
    """A value with its interval, such as '0.71 (0.55 to 0.84)'; the value alone if no interval is recorded.

    Args:
        name: the name of the value in `values`.
        values: the newest value of each series, by name; the ends of the interval are separate series.
        digits: the format of the numbers, such as '.3g'.
    """
    low, high = values.get(name + LOW), values.get(name + HIGH)
    interval = "" if low is None or high is None else f" ({low:{digits}} to {high:{digits}})"
    return f"{values[name]:{digits}}{interval}"


def epochs(now: ProgressBar) -> str:
    """The epoch, such as 'epoch 2 of 10'; empty if it is not known, or if the run has only one."""
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
    """Return how many samples of the result all ranks together have evaluated; empty while the ranks do not
    work on the result."""
    done, total = sum(s.done for s in statuses), sum(s.total for s in statuses)
    is_over = all(s.state in FINAL_STATES for s in statuses)
    return "" if is_over or done == total else f"{done} of {total} samples of the result evaluated"


def warning(status: RankStatus) -> str:
    """A warning about a rank that is silent or has little memory left; empty for other ranks.

    A silent rank may be in C code that holds the GIL, so the text never says that the rank is dead.
    """
    before_training = status.state in ("starting", "loading packages")
    worth_saying_s = SILENCE_OF_IMPORTS_S if before_training else SILENCE_WORTH_SAYING_S
    if status.state not in FINAL_STATES and status.silent_s >= worth_saying_s:
        return f"no heartbeat for {status.silent_s:.0f} s"
    used = memory_bytes(status)
    share = used / status.device.memory_bytes if used is not None and status.device.memory_bytes else 0.0
    return f"memory {100 * share:.0f} %" if share >= MEMORY_WORTH_SAYING else ""


def pace(history: History, num_ranks: int) -> str:
    """One sentence that names the slowest rank and its delay; empty before two ranks have recorded times.

    Under DDP all ranks end a step together, so equal step times can hide a rank for which the others wait.
    The times that a rank spends on its own computation (`compute_s`) and on waiting for data (`data_s`) are
    therefore compared first, if they were measured.

    Args:
        history: the run's numbers.
        num_ranks: the present number of ranks. Ranks with higher numbers are lost with their host.
    """
    step_s = _recent_means(history, "step_s", num_ranks)
    for name, difference in (
        ("compute_s", "spends {more} longer on each step's own work than rank {fast}"),
        ("data_s", "waits {more} longer for data than rank {fast}"),
        ("step_s", "takes {more} longer for a step than rank {fast}"),
    ):
        means_s = _recent_means(history, name, num_ranks)
        if len(means_s) < 2:
            continue
        slow, fast = max(means_s, key=means_s.__getitem__), min(means_s, key=means_s.__getitem__)
        whole_step_s = max([*step_s.values(), means_s[slow]])
        difference_s = means_s[slow] - means_s[fast]
        if whole_step_s > 0 and difference_s / whole_step_s > _PACE_TOLERANCE:
            more = f"{duration(difference_s)} ({100 * difference_s / whole_step_s:.0f} % of a step)"
            return f"Rank {slow} is the slowest: it {difference.format(more=more, fast=fast)}."
    if len(step_s) < 2:
        return ""
    return f"All ranks keep the same pace: their times differ by less than {100 * _PACE_TOLERANCE:.0f} % of a step."


def _recent_means(history: History, name: str, num_ranks: int) -> dict[int, float]:
    """The mean of the newest values of a series, by rank."""
    by_rank = history.ranks_of(name)
    return {rank: by_rank[rank].recent_mean(_RECENT_RECORDS) for rank in by_rank if rank < num_ranks}


def time_left(left_s: float | None) -> str:
    """Return a text about the time until a run's job ends; empty if that time is not known."""
    return "" if left_s is None else f"the job ends in {duration(left_s)}"


def recent(history: History, num_marks: int = 3) -> list[str]:
    """The latest events of a run, with a line for each."""
    return [
        f"step {mark.step}: {mark.text if mark.kind == 'note' else f'{mark.kind} {mark.text}'}"
        for mark in history.marks[-num_marks:]
    ]


def summary(info: RunInfo, state: str, statuses: Sequence[RankStatus], history: History | None = None) -> str:
    """One line about the progress of a run. The losses are the newest of the history; without a history,
    those of the ranks' statuses."""
    now = progress(info, state, statuses)
    by_rank = {status.rank: status.values for status in statuses} if history is None else history.newest()
    # The history still has ranks that the run has lost with their host.
    losses = [v["loss"] for rank, v in by_rank.items() if "loss" in v and rank < info.world_size]
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
