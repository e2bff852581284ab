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
from nbgpu.recipes.microstructure.measure import S2
from nbgpu.recipes.microstructure.pictures import middle_slices
from nbgpu.recipes.microstructure.structure import mean_structure, structure_errors
from nbgpu.recipes.microstructure.target import (
    Target,
    build_measure,
    holds_descriptors,
    load_target,
    save_descriptors,
)

_DOTS_PER_INCH = 100
_TILE_INCHES = 3.0
_COLOURS = "viridis"


def main() -> None:
    """Read a CharacterizationJob as JSON from stdin, check all its files, then measure one after the other,
    and write a line of JSON to stdout for each.

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
    """Return the reasons why files cannot be measured, or compared with the reference `job.against`; none if
    there is no problem."""
    problems = []
    num_phases: dict[str, int] = {}
    reference = [job.against] if job.against else []
    for settings in [*reference, *(one.settings for one in job.measurements)]:
        config = MicrostructureConfig(**settings)
        try:
            num_phases[config.data] = _count_phases(config, job.only_measured)
        except DataError as error:
            problems += str(error).splitlines()
    if job.against and (wanted := num_phases.pop(job.against["data"], None)) is not None:
        problems += [
            f"{data}: has {_phases(number)}, and {job.against['data']} has {_phases(wanted)}"
            for data, number in num_phases.items()
            if number != wanted
        ]
    return list(dict.fromkeys(problems))


def _phases(number: int) -> str:
    return "two phases, of which the second is measured" if number == 1 else f"{number} phases"


def _count_phases(config: MicrostructureConfig, only_measured: Sequence[str]) -> int:
    """Return the number of phases that would be measured in a file.

    Raises:
        DataError: everything that is wrong with the file or with the weights for Gram matrices.
    """
    if holds_descriptors(config.data):
        return load_target(config, only_measured).num_phases
    measure, names = build_measure(config), [*config.descriptor_types, *only_measured, S2]
    fields, _ = load_fields(config.data, names, measure, config.multiphase, config.threshold)
    # A file of weights is read when a descriptor is first computed: compute each once for a blank slice.
    blank = torch.zeros(1, len(fields[0]), *(2 * measure.limit_to,) * 2, dtype=torch.float64)
    for descriptor in (DESCRIPTORS[name] for name in names if "GramMatrices" in name):
        descriptor.compute(blank[:, 0] if descriptor.of == "phase" else blank, measure)
    return len(fields[0])


def _measured(
    measurement: Measurement, only_measured: Sequence[str], against: Target | None
) -> Characterized:
    """Measure one microstructure and write its files. The descriptors are written last, so that their file
    exists only if all others do.

    Args:
        measurement: the settings, and the path of the files without ending.
        only_measured: descriptors besides those of the settings.
        against: the microstructure with which this one is compared; None for none.
    """
    config = MicrostructureConfig(**measurement.settings)
    target = load_target(config, only_measured)
    characterized = Characterized(
        config.data,
        target.shape,
        phase_rows(target),
        {} if against is None else differences(target, against),
    )
    drawn = io.BytesIO()
    draw_target(target, Path(measurement.stem).name).savefig(drawn, format="png", dpi=_DOTS_PER_INCH)
    write_whole(Path(f"{measurement.stem}.png"), drawn.getvalue())
    write_whole(Path(f"{measurement.stem}.csv"), format_csv(characterized.rows))
    if characterized.differences:
        lines = [("measure", "difference"), *characterized.differences.items()]
        table = "".join(f"{name},{value}\n" for name, value in lines)
        write_whole(Path(f"{measurement.stem}.differences.csv"), table)
    save_descriptors(Path(f"{measurement.stem}.npz"), target)
    return characterized


def phase_rows(target: Target) -> list[PhaseRow]:
    """Return the row of each phase for the table: volume fraction, correlation length and mean chord, in
    pixels. A field that keeps the share of the second phase alone still has a row for both phases."""
    shares = target.shares.tolist()
    lengths_px = target.correlation_lengths_px
    if len(lengths_px) < len(shares):
        # Two phases have the same covariance, because their indicator functions add up to 1.
        lengths_px = lengths_px * len(shares)
    chords_px: list[float | None] = [None] * len(shares)
    if target.structure:
        lines = mean_structure(target.structure).lineal_path
        # The mean chord is the share of the phase divided by the probability that a chord begins at a pixel,
        # which is the first slope of the lineal path.
        chords_px = [
            float(share / begin) if begin > 0 else None
            for share, begin in zip(lines[:, 0], lines[:, 0] - lines[:, 1], strict=True)
        ]
    reach_px = target.measure.limit_to - 1
    return [
        PhaseRow(phase, share, length_px, length_px >= reach_px, chord_px)
        for phase, (share, length_px, chord_px) in enumerate(zip(shares, lengths_px, chords_px, strict=True))
    ]


def format_csv(rows: Sequence[PhaseRow]) -> str:
    """Return the rows as CSV with a heading; values that were not measured are empty."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(PhaseRow)], lineterminator="\n")
    table.writeheader()
    table.writerows(map(asdict, rows))
    return text.getvalue()


def differences(target: Target, other: Target) -> dict[str, float]:
    """Return the mean absolute difference of each descriptor from that of another microstructure with as many
    phases, over values on the full grid, phases and directions; and the errors of the structure if both have
    measured it. Where one of both has a single set for all directions, each direction is compared with it."""
    count = max(len(target.descriptors), len(other.descriptors))
    pairs = [
        (target.descriptors[i % len(target.descriptors)], other.descriptors[i % len(other.descriptors)])
        for i in range(count)
    ]
    errors = {
        name: float(
            torch.stack(
                [(first[name][:, 0] - second[name][:, 0]).abs().mean() for first, second in pairs]
            ).mean()
        )
        for name in target.descriptors[0]
    }
    if target.structure and other.structure:
        structure = [target.structure[i % len(target.structure)] for i in range(count)]
        errors |= structure_errors(structure, other.structure)
    return errors


def draw_target(target: Target, title: str) -> Figure:
    """Draw the phases, if the target has them, the two-point correlation of the last phase, and as curves the
    covariance of each phase and, if it was measured, the probability of lines inside it."""
    tiles = [] if target.phases is None else middle_slices(target.phases)
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
