"""Measure the descriptors of microstructures, in a process that loads torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
    """Raise a DataError if anything is wrong with the names of the files, before any file is measured.

    This process looks at the names. If some are wrong, the process with torch checks the contents of the
    other files, so that the error has the problems of all.
    """
    problems = list(_wrong_names(job))
    missing = [_missing(measurement.settings) for measurement in job.measurements]
    reference_missing = _missing(job.against) if job.against else []
    problems += [problem for of_file in (*missing, reference_missing) for problem in of_file]
    if problems:
        there = [m for m, lacking in zip(job.measurements, missing, strict=True) if not lacking]
        against = None if reference_missing else job.against
        try:
            if there or against:
                list(_ran(replace(job, measurements=there, against=against, only_check=True)))
        except DataError as error:
            problems += str(error).splitlines()
        except RunError as error:
            problems.append(f"the other files could not be checked: {error}")
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


def table_of_differences(results: Sequence[Characterized]) -> list[str]:
    """Return lines with the differences of each microstructure from what all were compared with."""
    names = [name for name in results[0].differences if all(name in r.differences for r in results)]
    rows = [(r.data, *(f"{r.differences[name]:.4g}" for name in names)) for r in results]
    return aligned([("", *names), *rows], right=range(1, len(names) + 1))


def written(measurement: Measurement, job: CharacterizationJob) -> str:
    """Return the names of the files with the results, in words."""
    return _listed(measurement.stem, _suffixes(job))


def _suffixes(job: CharacterizationJob) -> Sequence[str]:
    return [*_SUFFIXES, *([_OF_COMPARISON] if job.against else [])]


def table(results: Sequence[Characterized]) -> list[str]:
    """Return lines with the numbers of each phase of each microstructure."""
    rows = [_HEADINGS]
    for result in results:
        for index, row in enumerate(result.rows):
            first = (result.data, " x ".join(map(str, result.shape))) if not index else ("", "")
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
    """Run the process that measures, and yield each result as the fields of a `Characterized`.

    Raises:
        DataError: the process found problems in the files.
        RunError: the process failed.
    """
    command = interpreter.command("nbgpu.recipes.microstructure.measuring", str(os.getpid()))
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # A process that has ended before it read the job says why by its code and its errors.
            with suppress(BrokenPipeError), process.stdin:
                json.dump(asdict(job), process.stdin)
            yield from map(json.loads, process.stdout)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        message = errors.read().strip()
    if code == BAD_DATA:
        raise DataError(message)
    if code != 0:
        raise RunError(f"the process that measures ended with code {code}: {message or 'it said nothing'}")
