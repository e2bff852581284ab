"""What a person wants to know of a microstructure at first sight: a few numbers of each phase, and a
picture."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nbgpu.protocol.characterization import Characterized, PhaseRow
from nbgpu.recipes.microstructure.pictures import slices_of
from nbgpu.recipes.microstructure.structure import mean_structure, structure_errors
from nbgpu.recipes.microstructure.target import S2, Target

_TILE_INCHES = 3.0
_COLOURS = "viridis"


def rows_of(target: Target) -> list[PhaseRow]:
    """Return the numbers of each phase, of both phases where the field keeps the share of the second one
    alone."""
    shares = target.shares.tolist()
    lengths = target.correlation_lengths_px
    if len(lengths) < len(shares):
        # Of two phases each has the covariance of the other one.
        lengths = lengths * len(shares)
    chords: list[float | None] = [None] * len(shares)
    if target.structure:
        lines = mean_structure(target.structure).lineal_path
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
    """Return the rows as a table with a heading; what was not measured is left empty."""
    text = io.StringIO()
    table = csv.DictWriter(text, [field.name for field in fields(PhaseRow)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in found.rows)
    return text.getvalue()


def differences(found: Target, wanted: Target) -> dict[str, float]:
    """Return how far descriptors are from others with as many phases, by name, and the structure, if both
    have it.

    Of a descriptor it is the mean absolute difference over its values on the full grid, phases and
    directions; see `structure_errors` for the rest.
    """
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
        drawn.set_xlabel(f"axis {across}, pixels")
        drawn.set_ylabel(f"axis {down}, pixels")
        drawn.set_title("phases" if len(tiles) == 1 else f"phases across axis {direction}")
    _draw_correlation(axes.pop(0), target)
    _draw_covariance(axes.pop(0), target)
    if target.structure:
        _draw_lines(axes.pop(0), target)
    figure.suptitle(title)
    return figure


def _draw_correlation(axes: Axes, target: Target) -> None:
    reach = target.measure.limit_to - 1
    mean = torch.stack([t[S2][-1, 0] for t in target.descriptors]).mean(dim=0)
    axes.imshow(mean.numpy(), cmap=_COLOURS, extent=(-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5))
    axes.set_title(f"correlation of phase {len(target.shares) - 1}")
    axes.set_xlabel("distance, pixels")
    axes.set_ylabel("distance, pixels")


def _draw_covariance(axes: Axes, target: Target) -> None:
    covariances = target.covariances
    first = len(target.shares) - len(covariances)
    for phase, covariance in enumerate(covariances, start=first):
        axes.plot(covariance.numpy(), label=f"phase {phase}")
    axes.axhline(1 / torch.e, color="0.6", linewidth=1)
    axes.set_title("covariance along an axis")
    axes.set_xlabel("distance, pixels")
    axes.set_ylabel("share of the variance")
    axes.legend()


def _draw_lines(axes: Axes, target: Target) -> None:
    lines = mean_structure(target.structure).lineal_path
    for phase, probabilities in enumerate(lines):
        axes.plot(range(1, len(probabilities) + 1), probabilities.numpy(), label=f"phase {phase}")
    axes.set_yscale("log")
    axes.set_title("whole line inside a phase")
    axes.set_xlabel("length, pixels")
    axes.set_ylabel("probability")
    axes.legend()
