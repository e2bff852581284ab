"""The runs of a study: their folders, the measurements in their records, and the environment of a study."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from nbgpu.client.runs import explaining
from nbgpu.errors import RunError
from nbgpu.machine.cgroups import usable_cores
from nbgpu.machine.files import write_whole
from nbgpu.performance import step_parts
from nbgpu.performance.bottlenecks import Explanation
from nbgpu.performance.step_parts import StepParts
from nbgpu.performance.study_results import Measured
from nbgpu.planning.studies import StudyConfig, StudyPoint
from nbgpu.protocol.records import Device, Sample
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import lines, names
from nbgpu.run_folder.reader import Reader

_OUTCOME = "repeat.json"
"""The file in a repeat's folder that says that the repeat was measured, or why it failed."""


def repeat_folder(study: Path, repeat: int, point: int) -> Path:
    """Return the folder for the run of one repeat of one point."""
    return study / f"point-{point:02d}-repeat-{repeat:02d}"


def write_outcome(study: Path, outcome: Measured) -> None:
    """Write into a repeat's folder that it was measured, or why it failed."""
    folder = repeat_folder(study, outcome.repeat, outcome.point)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"seconds": outcome.seconds, "why_failed": outcome.why_failed, "load": os.getloadavg()[0]}
    write_whole(folder / _OUTCOME, json.dumps(fields) + "\n")


def read_finished(
    study: Path, points: Sequence[StudyPoint], config: StudyConfig
) -> dict[tuple[int, int], Measured]:
    """Read the repeats that were measured or have failed, by repeat and point."""
    finished = {}
    for repeat in range(config.repeats):
        for point in points:
            folder = repeat_folder(study, repeat, point.number)
            if (folder / _OUTCOME).exists():
                finished[repeat, point.number] = _read_finished(folder, repeat, point, config)
    return finished


def _read_finished(folder: Path, repeat: int, point: StudyPoint, config: StudyConfig) -> Measured:
    """Read the outcome of one repeat: why it failed or, from its run's records, its measured steps.

    Raises:
        RunError: the outcome's file or the records cannot be used.
    """
    fields = lines.load(folder / _OUTCOME)
    try:
        seconds, why_failed = float(fields["seconds"]), str(fields["why_failed"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder / _OUTCOME} is not what nbgpu writes: {error!r}. Take the folder {folder.name} away, and "
            "study.resume() measures the repeat again"
        ) from None
    if why_failed:
        return Measured(point.number, repeat, (), seconds=seconds, why_failed=why_failed)
    return read_measurement(_open_reader(_run_folder_in(folder)), repeat, point, config, seconds)


def _run_folder_in(folder: Path) -> Path:
    """Return the folder of the run of a repeat."""
    # A repeat that was interrupted and measured again has two runs, of which the last one is complete.
    last = max(folder.glob(f"*/{names.INFO}"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if last is None:
        raise RunError(
            f"{folder} has no run any more. Take the folder away, and study.resume() measures the repeat again"
        )
    return last.parent


def _open_reader(run: Path) -> Reader:
    return Reader(run, runs.read_info(run).world_size, live=False)


def explain(study: Path, point: StudyPoint, config: StudyConfig) -> Explanation:
    """Say what bounds the last measured repeat of a point, which has at least one.

    Raises:
        RunError: too few steps were recorded.
    """
    folders = [repeat_folder(study, repeat, point.number) for repeat in range(config.repeats)]
    outcomes = [folder / _OUTCOME for folder in folders if (folder / _OUTCOME).exists()]
    measured = [path.parent for path in outcomes if not lines.load(path)["why_failed"]]
    run = _run_folder_in(measured[-1])
    return explaining.explain(run, _open_reader(run), point.config, point.ranks)


def read_measurement(
    reader: Reader, repeat: int, point: StudyPoint, config: StudyConfig, seconds: float = 0.0
) -> Measured:
    """Read what a study needs from a run: the times of the measured steps, which follow the warm-up, and the
    losses of all steps.

    If validations or checkpoints come between the steps (`point.cycle`), `step_s` has instead the mean time
    of a step in each whole cycle, with these, and the part 'between_s' is what they add to a step.

    Args:
        reader: the reader of the run's records.
        repeat, point: what was run.
        config: the settings of the study.
        seconds: the time that the repeat took as a whole, 0 if it is not known.

    Raises:
        RunError: a rank has not recorded all measured steps or, with `point.cycle`, the beginning of the step
            after them.
    """
    records = list(reader.records())
    samples = [record for record in records if isinstance(record, Sample)]
    steps = step_parts.parts_of(records, point.ranks)
    last = config.warm_up_steps + config.measured_steps
    measured_parts = [parts for parts in steps if config.warm_up_steps < parts.step <= last]
    # The time of a step is that of its slowest rank.
    step_s: dict[int, float] = {}
    for parts in measured_parts:
        step_s[parts.step] = max(parts.step_s, step_s.get(parts.step, 0.0))
    if len(step_s) < config.measured_steps:
        raise RunError(
            f"of {config.measured_steps} steps to be measured all ranks have recorded {len(step_s)}: a rank was replaced, or "
            "a file could not be written"
        )
    times_s, parts_s = list(step_s.values()), step_parts.middle_half(measured_parts)
    if point.cycle:
        times_s, between_s = _mean_step_with_overhead(steps, config.warm_up_steps, last, point.cycle)
        parts_s |= {"between_s": between_s}
    return Measured(
        point=point.number,
        repeat=repeat,
        step_s=tuple(times_s),
        parts_s=parts_s,
        slowest=step_parts.slowest_rank(measured_parts),
        losses=_losses(samples, point.ranks),
        parameters=runs.read_info(reader.folder).parameters,
        seconds=seconds,
    )


def _mean_step_with_overhead(
    steps: Sequence[StepParts], warm_up_steps: int, last: int, cycle: int
) -> tuple[list[float], float]:
    """Measure steps with the validations and checkpoints between them, on rank 0.

    Args:
        steps: the steps of all ranks.
        warm_up_steps: the number of steps before the measurement.
        last: the last measured step.
        cycle: the number of steps after which validations and checkpoints repeat.

    Returns:
        (the mean time of a step in each cycle, including validations and checkpoints; the mean time that
        these add to a step), in seconds.
    """
    begun_s = {parts.step: parts.begun_at_s for parts in steps if parts.rank == 0}
    step_s = {parts.step: parts.step_s for parts in steps if parts.rank == 0}
    if last + 1 not in begun_s:
        raise RunError(f"the beginning of step {last + 1} was not recorded, with which the measurement ends")
    ends = range(warm_up_steps + 1, last + 2, cycle)
    means_s = [(begun_s[end] - begun_s[begin]) / cycle for begin, end in pairwise(ends)]
    whole_s = begun_s[last + 1] - begun_s[warm_up_steps + 1]
    measured = range(warm_up_steps + 1, last + 1)
    return means_s, max(0.0, (whole_s - sum(step_s[step] for step in measured)) / len(measured))


def _losses(samples: Sequence[Sample], num_ranks: int) -> tuple[tuple[int, float], ...]:
    """Return (step, mean loss over the ranks) for the steps whose loss all ranks have recorded."""
    by_step: dict[int, dict[int, float]] = {}
    for sample in samples:
        if "step_s" in sample.values and "loss" in sample.values:
            by_step.setdefault(sample.step, {})[sample.rank] = sample.values["loss"]
    return tuple(
        (step, sum(losses.values()) / num_ranks)
        for step, losses in sorted(by_step.items())
        if len(losses) == num_ranks
    )


def environment(
    devices: Sequence[Device], transport: str, other_hosts: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the environment of a study: hosts, devices, transport, versions, and the load at the start if
    the ranks are on this host.

    Args:
        devices: the devices of the ranks.
        transport: the description of the transport between them.
        other_hosts: the number of cores by the host's name, if the ranks are on other hosts; empty while
            these are not known. None if the ranks are on this host.
    """
    described = runs.environment()
    where: dict[str, Any] = {
        "host": platform.node(),
        "cores": usable_cores(),
        "load": round(os.getloadavg()[0], 2),
    }
    if other_hosts is not None:
        where = {"host": ", ".join(other_hosts), "cores": sum(other_hosts.values())}
    return {
        **where,
        "devices": list(dict.fromkeys(device.name for device in devices)),
        "transport": transport,
        "python": described["python"],
        "platform": described["platform"],
        "git": described["git"] or "",
        **described["packages"],
    }
