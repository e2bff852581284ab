"""Measurement of microstructures in a process of its own, for `nbgpu characterize`.

python -m nbgpu.recipes.microstructure.measuring PARENT_PID < job.json
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from nbgpu.errors import DataError
from nbgpu.machine.files import write_whole
from nbgpu.machine.watched import end_with
from nbgpu.protocol.characterization import BAD_DATA, CharacterizationJob, Characterized, Measurement
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.files import load_fields
from nbgpu.recipes.microstructure.summary import csv_of, csv_of_differences, differences, figure_of, rows_of
from nbgpu.recipes.microstructure.target import (
    S2,
    Target,
    holds_descriptors,
    load_target,
    measure_of,
    save_descriptors,
)

_DOTS_PER_INCH = 100


def main() -> None:
    """Look at all files, then measure one after the other, with a line of JSON on stdout for each.

    The process ends with its parent. Bad files are told on stderr, all of them, before any is measured.
    """
    end_with(int(sys.argv[1]))
    fields = json.load(sys.stdin)
    job = CharacterizationJob(
        **fields | {"measurements": [Measurement(**one) for one in fields["measurements"]]}
    )
    if problems := list(_find_problems(job)):
        sys.stderr.write("\n".join(problems))
        sys.exit(BAD_DATA)
    if job.only_check:
        return
    against = None
    if job.against is not None:
        against = load_target(MicrostructureConfig(**job.against), job.only_measured)
    for measurement in job.measurements:
        measured = _measured(measurement, job.only_measured, against)
        sys.stdout.write(json.dumps(asdict(measured)) + "\n")
        sys.stdout.flush()


def _find_problems(job: CharacterizationJob) -> list[str]:
    """Return why files cannot be measured, or compared with the reference; empty if there is no problem."""
    problems = []
    num_phases: dict[str, int] = {}
    for settings in [*([job.against] if job.against else []), *(one.settings for one in job.measurements)]:
        config = MicrostructureConfig(**settings)
        try:
            num_phases[config.data] = _checked(config, job.only_measured)
        except DataError as error:
            problems += str(error).splitlines()
    num_reference_phases = num_phases.pop(job.against["data"], None) if job.against else None
    problems += [
        f"{data}: has {_phases(number)}, and {job.against['data']} has {_phases(num_reference_phases)}"
        for data, number in num_phases.items()
        if job.against and num_reference_phases is not None and number != num_reference_phases
    ]
    return list(dict.fromkeys(problems))


def _phases(number: int) -> str:
    return "two phases, of which the second is measured" if number == 1 else f"{number} phases"


def _checked(config: MicrostructureConfig, only_measured: Sequence[str]) -> int:
    """Return the number of phases that would be measured, or raise a DataError with all that is wrong with
    one file."""
    if holds_descriptors(config.data):
        return load_target(config, only_measured).num_phases
    measure, names = measure_of(config), [*config.descriptor_types, *only_measured, S2]
    fields, _ = load_fields(config.data, names, measure, config.multiphase, config.threshold)
    # A file of weights is read when a descriptor uses it for the first time.
    blank = torch.zeros(1, len(fields[0]), *(2 * measure.limit_to,) * 2, dtype=torch.float64)
    for descriptor in (DESCRIPTORS[name] for name in names if "GramMatrices" in name):
        descriptor.compute(blank[:, 0] if descriptor.of == "phase" else blank, measure)
    return len(fields[0])


def _measured(
    measurement: Measurement, only_measured: Sequence[str], against: Target | None
) -> Characterized:
    """Measure one microstructure, and write its files; the descriptors last, so that they are there only if
    everything is."""
    config = MicrostructureConfig(**measurement.settings)
    target = load_target(config, only_measured)
    characterized = Characterized(
        config.data,
        target.shape,
        rows_of(target),
        {} if against is None else differences(target, against),
    )
    drawn = io.BytesIO()
    figure_of(target, Path(measurement.stem).name).savefig(drawn, format="png", dpi=_DOTS_PER_INCH)
    write_whole(Path(f"{measurement.stem}.png"), drawn.getvalue())
    write_whole(Path(f"{measurement.stem}.csv"), csv_of(characterized))
    if characterized.differences:
        write_whole(Path(f"{measurement.stem}.differences.csv"), csv_of_differences(characterized))
    save_descriptors(Path(f"{measurement.stem}.npz"), target)
    return characterized


if __name__ == "__main__":
    main()
