"""Measurement of microstructures in a process of its own, for `nbgpu characterize`: all descriptors, a few
numbers of each phase, and a picture.

python -m nbgpu.recipes.microstructure.measuring PARENT_PID < job.json
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nbgpu.errors import DataError
from nbgpu.machine.files import write_whole
from nbgpu.machine.watched import end_with
from nbgpu.protocol.characterization import (
    BAD_DATA,
    CharacterizationJob,
    Characterized,
    Measurement,
    PhaseRow,
)
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.files import load_fields
from nbgpu.recipes.microstructure.pictures import slices_of
from nbgpu.recipes.microstructure.structure import mean_structure, structure_errors
from nbgpu.recipes.microstructure.target import (
    S2,
    Target,
    holds_descriptors,
    load_target,
    measure_of,
    save_descriptors,
)

_DOTS_PER_INCH = 100


_TILE_INCHES = 3.0
_COLOURS = "viridis"


def main() -> None:
    """Check all files, then measure one after the other, and write a line of JSON to stdout for each.

    The process ends with its parent. Problems of all files go to stderr before any file is measured.
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


def rows_of(target: Target) -> list[PhaseRow]:
    """Return the row of each phase for the table: share, correlation length and mean chord. A field that
    keeps the share of the second phase alone has a row for both phases."""
    shares = target.shares.tolist()
    lengths = target.correlation_lengths_px
    if len(lengths) < len(shares):
        # Two phases have the same covariance, because their indicator functions add up to 1.
        lengths = lengths * len(shares)
    chords: list[float | None] = [None] * len(shares)
    if target.structure:
        lines = mean_structure(target.structure).lineal_path
        # The mean chord is the share of the phase divided by the probability that a chord begins at a pixel,
        # which is the first slope of the lineal path.
        chords = [
            float(share / begun) if begun > 0 else None
            for share, begun in zip(lines[:, 0], lines[:, 0] - lines[:, 1], strict=True)
        ]
    reach = target.measure.limit_to - 1
    return [
        PhaseRow(phase, share, length, length >= reach, chord)
        for phase, (share, length, chord) in enumerate(zip(shares, lengths, chords, strict=True))
    ]


def csv_of(found: Characterized) -> str:
    """Return the rows as CSV with a heading; values that were not measured are empty."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(PhaseRow)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in found.rows)
    return text.getvalue()


def differences(found: Target, wanted: Target) -> dict[str, float]:
    """Return the mean absolute difference of each descriptor from that of another microstructure with as many
    phases, over values on the full grid, phases and directions; and the errors of the structure if both have
    measured it. One set of descriptors is compared with each of several directions."""
    count = max(len(found.descriptors), len(wanted.descriptors))
    pairs = [
        (found.descriptors[i % len(found.descriptors)], wanted.descriptors[i % len(wanted.descriptors)])
        for i in range(count)
    ]
    errors = {
        name: float(
            torch.stack([(one[name][:, 0] - other[name][:, 0]).abs().mean() for one, other in pairs]).mean()
        )
        for name in found.descriptors[0]
    }
    if found.structure and wanted.structure:
        own = [found.structure[i % len(found.structure)] for i in range(count)]
        errors |= structure_errors(own, wanted.structure)
    return errors


def csv_of_differences(found: Characterized) -> str:
    """Return the differences as a table with a heading."""
    return "".join(
        f"{name},{value}\n" for name, value in [("measure", "difference"), *found.differences.items()]
    )


def figure_of(target: Target, title: str) -> Figure:
    """Draw the phases, if they are known, and as curves along an axis the covariance of each phase and the
    probability of lines inside it."""
    tiles = [] if target.phases is None else slices_of(target.phases)
    num_axes = len(tiles) + 2 + bool(target.structure)
    figure = Figure(figsize=(_TILE_INCHES * num_axes, _TILE_INCHES), layout="constrained")
    axes = list(figure.subplots(1, num_axes, squeeze=False)[0])
    for direction, tile in enumerate(tiles):
        drawn = axes.pop(0)
        drawn.imshow(tile.numpy(), cmap=_COLOURS, vmin=0, vmax=len(target.shares) - 1)
        down, across = (0, 1) if len(tiles) == 1 else tuple(a for a in range(3) if a != direction)
        tile_title = "phases" if len(tiles) == 1 else f"phases across axis {direction}"
        drawn.set(title=tile_title, xlabel=f"axis {across}, pixels", ylabel=f"axis {down}, pixels")
    _draw_correlation(axes.pop(0), target)
    _draw_covariance(axes.pop(0), target)
    if target.structure:
        _draw_lines(axes.pop(0), target)
    figure.suptitle(title)
    return figure


def _draw_correlation(axes: Axes, target: Target) -> None:
    """Plot the two-point correlation of the last phase over lags in pixels, as a mean over the directions."""
    reach = target.measure.limit_to - 1
    mean = torch.stack([t[S2][-1, 0] for t in target.descriptors]).mean(dim=0)
    axes.imshow(mean.numpy(), cmap=_COLOURS, extent=(-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5))
    title = f"correlation of phase {len(target.shares) - 1}"
    axes.set(title=title, xlabel="distance, pixels", ylabel="distance, pixels")


def _draw_covariance(axes: Axes, target: Target) -> None:
    """Plot the covariance of each phase over the distance along the axes, divided by the variance. Where a
    curve falls below the line at 1 / e is the correlation length."""
    covariances = target.covariances
    # A field of two phases has the indicator of phase 1 only, so that its curves begin with phase 1.
    first_phase = len(target.shares) - len(covariances)
    for phase, covariance in enumerate(covariances, start=first_phase):
        axes.plot(covariance.numpy(), label=f"phase {phase}")
    axes.axhline(1 / torch.e, color="0.6", linewidth=1)
    axes.set(title="covariance along an axis", xlabel="distance, pixels", ylabel="share of the variance")
    axes.legend()


def _draw_lines(axes: Axes, target: Target) -> None:
    """Plot the lineal path function of each phase: the probability that a line of a length lies in it as a
    whole."""
    lines = mean_structure(target.structure).lineal_path
    for phase, probabilities in enumerate(lines):
        axes.plot(range(1, len(probabilities) + 1), probabilities.numpy(), label=f"phase {phase}")
    axes.set(title="whole line inside a phase", xlabel="length, pixels", ylabel="probability", yscale="log")
    axes.legend()


if __name__ == "__main__":
    main()
