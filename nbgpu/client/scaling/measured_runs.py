"""The runs of a study: where they are, what is read of them, and on what they were measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from nbgpu.errors import RunError
from nbgpu.machine.files import write_whole
from nbgpu.performance.study_results import Measured
from nbgpu.planning.studies import StudyConfig, StudyPoint
from nbgpu.protocol.records import Device, Sample
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import lines, names
from nbgpu.run_folder.reader import Reader

_NOTE = "repeat.json"
"""What stands in the folder of a repeat that was measured or has failed."""
_PARTS = ("data_s", "forward_s", "backward_s", "optimizer_s")


def folder_of(study: Path, repeat: int, point: int) -> Path:
    """Return the folder that gets the run of one repeat of one point."""
    return study / f"point-{point:02d}-repeat-{repeat:02d}"


def note(study: Path, found: Measured) -> None:
    """Note in the folder of a repeat that it was measured, or why it failed."""
    folder = folder_of(study, found.repeat, found.point)
    folder.mkdir(parents=True, exist_ok=True)
    noted = {"seconds": found.seconds, "why_failed": found.why_failed, "load": os.getloadavg()[0]}
    write_whole(folder / _NOTE, json.dumps(noted) + "\n")


def look_back(
    study: Path, points: Sequence[StudyPoint], config: StudyConfig
) -> dict[tuple[int, int], Measured]:
    """Read the repeats that were measured or have failed, by repeat and point."""
    found = {}
    for repeat in range(config.repeats):
        for point in points:
            folder = folder_of(study, repeat, point.number)
            if (folder / _NOTE).exists():
                found[repeat, point.number] = _look_back(folder, repeat, point, config)
    return found


def _look_back(folder: Path, repeat: int, point: StudyPoint, config: StudyConfig) -> Measured:
    noted = lines.load(folder / _NOTE)
    try:
        seconds, why_failed = float(noted["seconds"]), str(noted["why_failed"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder / _NOTE} is not what nbgpu writes: {error!r}. Take the folder {folder.name} away, and "
            "study.resume() measures the repeat again"
        ) from None
    if why_failed:
        return Measured(point.number, repeat, (), seconds=seconds, why_failed=why_failed)
    # A repeat that was cut off and measured again has two runs; the last one is whole.
    last = max(folder.glob(f"*/{names.INFO}"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if last is None:
        raise RunError(
            f"{folder} has no run any more. Take the folder away, and study.resume() measures the repeat again"
        )
    reader = Reader(last.parent, runs.read_info(last.parent).world_size, live=False)
    return read(reader, repeat, point, config, seconds)


def read(
    reader: Reader, repeat: int, point: StudyPoint, config: StudyConfig, seconds: float = 0.0
) -> Measured:
    """Read what a run has recorded of the steps that count.

    Raises:
        RunError: a rank has not recorded the steps.
    """
    by_step: dict[int, dict[int, Sample]] = {}
    for record in reader.records():
        if isinstance(record, Sample) and "step_s" in record.values:
            by_step.setdefault(record.step, {})[record.rank] = record
    whole = {step: of_ranks for step, of_ranks in by_step.items() if len(of_ranks) == point.ranks}
    counting = [of_ranks for step, of_ranks in sorted(whole.items()) if step > config.warm_up_steps]
    if len(counting) < config.measured_steps:
        raise RunError(
            f"of {config.measured_steps} steps to be measured all ranks have recorded {len(counting)}: a rank was replaced, or "
            "a file could not be written"
        )
    step_s = [max(sample.values["step_s"] for sample in of_ranks.values()) for of_ranks in counting]
    return Measured(
        point=point.number,
        repeat=repeat,
        step_s=tuple(step_s),
        parts_s=_parts(counting, step_s),
        losses=tuple(
            (step, sum(sample.values["loss"] for sample in of_ranks.values()) / len(of_ranks))
            for step, of_ranks in sorted(whole.items())
            if all("loss" in sample.values for sample in of_ranks.values())
        ),
        seconds=seconds,
    )


def _parts(counting: Sequence[dict[int, Sample]], step_s: Sequence[float]) -> dict[str, float]:
    """The mean parts of the middle half of the steps, over the ranks. Means add up, as medians do not."""
    low, _, high = quantiles(step_s, n=4)
    middle = [
        of_ranks for of_ranks, seconds in zip(counting, step_s, strict=True) if low <= seconds <= high
    ] or counting
    samples = [sample for of_ranks in middle for sample in of_ranks.values()]
    parts = {
        name: _mean(sample.values[name] for sample in samples)
        for name in _PARTS
        if all(name in sample.values for sample in samples)
    }
    whole_s = _mean(sample.values["step_s"] for sample in samples)
    return {**parts, "other_s": max(0.0, whole_s - sum(parts.values()))}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def environment(devices: Sequence[Device], transport: str) -> dict[str, Any]:
    """Return what a study is measured on: host, devices, transport, versions and the load at the start."""
    described = runs.environment()
    return {
        "host": platform.node(),
        "devices": list(dict.fromkeys(device.name for device in devices)),
        "cores": len(os.sched_getaffinity(0)),
        "transport": transport,
        "load": round(os.getloadavg()[0], 2),
        "python": described["python"],
        "platform": described["platform"],
        "git": described["git"] or "",
        **described["packages"],
    }
