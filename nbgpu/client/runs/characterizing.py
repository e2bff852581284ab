"""Measure the descriptors of microstructures, in a process that loads torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nbgpu.config.characterization import CharacterizeConfig
from nbgpu.config.settings import paths_to_read
from nbgpu.errors import DataError, RunError
from nbgpu.machine import interpreter
from nbgpu.protocol.characterization import (
    BAD_DATA,
    CharacterizationJob,
    Characterized,
    Measurement,
    PhaseRow,
)
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.text.tables import aligned

_SUFFIXES = (".npz", ".csv", ".png")
"""What is written for each microstructure: the descriptors, the table and the picture."""
_OF_COMPARISON = ".differences.csv"
"""What is written if it is compared."""
_HEADINGS = ("", "pixels", "phase", "share", "correlation length, px", "mean chord, px")


def job_of(
    files: Sequence[str], asked: CharacterizeConfig, measuring: Mapping[str, Any]
) -> CharacterizationJob:
    """Return the job that is asked for.

    Args:
        files: the microstructures, each as the recipe's `data`: one file, or three pictures separated by
            commas.
        asked: what to measure, and the folder for the results.
        measuring: values of the recipe's settings that say how descriptors are measured.

    Raises:
        ConfigError: the settings do not go together.
    """
    out = Path(asked.out).expanduser()
    configs = [asked.recipes_settings(data, measuring) for data in files]
    return CharacterizationJob(
        [Measurement(c.model_dump(), str(out / _name_of(c.data))) for c in configs],
        asked.only_measured,
        asked.recipes_settings(asked.against, measuring).model_dump() if asked.against else None,
        only_check=False,
    )


def require(job: CharacterizationJob) -> None:
    """Raise a DataError with everything that is wrong with the files, before any is measured, as far as that
    shows without torch; where something does, also with what torch's process finds in the other files."""
    problems = list(_wrong_names(job))
    missing = [_missing(measurement.settings) for measurement in job.measurements]
    of_reference = _missing(job.against) if job.against else []
    problems += [problem for found in (*missing, of_reference) for problem in found]
    if problems:
        there = [m for m, lacking in zip(job.measurements, missing, strict=True) if not lacking]
        against = None if of_reference else job.against
        try:
            list(_ran(replace(job, measurements=there, against=against, only_check=True)))
        except DataError as error:
            problems += str(error).splitlines()
        raise DataError("\n".join(problems))


def characterized(job: CharacterizationJob) -> Iterator[Characterized]:
    """Measure, and yield each microstructure when its files are written.

    Raises:
        DataError: lists every problem of all files; nothing was measured.
        RunError: the folder cannot be made, or the process that measures has failed.
    """
    for folder in {Path(measurement.stem).parent for measurement in job.measurements}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"{folder} cannot be made: {error.strerror}. Take another folder with --out"
            ) from None
    for fields in _ran(job):
        rows = [PhaseRow(**row) for row in fields.pop("rows")]
        yield Characterized(**fields | {"shape": tuple(fields["shape"])}, rows=rows)


def table_of_differences(found: Sequence[Characterized]) -> list[str]:
    """Return lines with the differences of each microstructure from what all were compared with."""
    names = [name for name in found[0].differences if all(name in one.differences for one in found)]
    rows = [(one.data, *(f"{one.differences[name]:.4g}" for name in names)) for one in found]
    return aligned([("", *names), *rows], right=range(1, len(names) + 1))


def written(measurement: Measurement, job: CharacterizationJob) -> str:
    """Return the names of the files with the results, in words."""
    return _listed(measurement.stem, _suffixes(job))


def _suffixes(job: CharacterizationJob) -> Sequence[str]:
    return [*_SUFFIXES, *([_OF_COMPARISON] if job.against else [])]


def table(found: Sequence[Characterized]) -> list[str]:
    """Return lines with the numbers of each phase of each microstructure."""
    rows = [_HEADINGS]
    for one in found:
        for index, row in enumerate(one.rows):
            first = (one.data, " x ".join(map(str, one.shape))) if not index else ("", "")
            length = f"{'at least ' if row.is_longer else ''}{row.correlation_length_px:.1f}"
            chord = "" if row.mean_chord_px is None else f"{row.mean_chord_px:.1f}"
            rows.append((*first, str(row.phase), f"{row.share:.4f}", length, chord))
    return aligned(rows, right={2, 3, 4, 5})


def _listed(stem: str, suffixes: Sequence[str]) -> str:
    *others, last = suffixes
    return stem + (f"{', '.join(others)} and {last}" if others else last)


def _name_of(data: str) -> str:
    return "+".join(Path(part.strip()).stem for part in data.split(","))


def _missing(settings: Mapping[str, Any]) -> list[str]:
    paths = paths_to_read(MicrostructureConfig(**settings), "data")
    return [f"{path}: there is no such file" for path in paths if not path.is_file()]


def _wrong_names(job: CharacterizationJob) -> Iterator[str]:
    for folder in {Path(measurement.stem).parent for measurement in job.measurements}:
        if folder.exists() and not folder.is_dir():
            yield f"{folder} is a file. Take a folder with --out"
    stems = Counter(measurement.stem for measurement in job.measurements)
    for stem, count in stems.items():
        if count > 1:
            same = [str(m.settings["data"]) for m in job.measurements if m.stem == stem]
            yield (
                f"{' and '.join(same)} would both be written to {stem}{_SUFFIXES[0]}. Characterize them into folders of their own"
            )
    for measurement in job.measurements:
        if there := [suffix for suffix in _suffixes(job) if Path(f"{measurement.stem}{suffix}").exists()]:
            yield (
                f"{_listed(measurement.stem, there)} would be written over. Take another folder with --out, or remove "
                "what is there"
            )


def _ran(job: CharacterizationJob) -> Iterator[dict[str, Any]]:
    """Run the process that measures, and yield what it writes."""
    command = interpreter.command("nbgpu.recipes.microstructure.measuring", str(os.getpid()))
    with (
        tempfile.TemporaryFile("w+") as words,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin:
                json.dump(asdict(job), process.stdin)
            yield from map(json.loads, process.stdout)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        words.seek(0)
        said = words.read().strip()
    if code == BAD_DATA:
        raise DataError(said)
    if code != 0:
        raise RunError(f"the process that measures ended with code {code}: {said or 'it said nothing'}")
