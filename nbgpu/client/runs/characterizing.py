"""Measure the descriptors of microstructures, in a process that loads torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
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
"""The suffixes of the files for each microstructure: the descriptors, the table and the picture."""
_COMPARISON_SUFFIX = ".differences.csv"
"""The suffix of the further file if the microstructures are compared with another one."""
_HEADINGS = ("", "pixels", "phase", "share", "correlation length, px", "mean chord, px")


def job_of(
    files: Sequence[str], request: CharacterizeConfig, measuring: Mapping[str, Any]
) -> CharacterizationJob:
    """Return the job for the process that measures.

    Args:
        files: the microstructures, each in the form of the recipe's setting `data`: one file, or three
            pictures separated by commas.
        request: what to measure, and the folder for the results.
        measuring: values of the recipe's settings that say how descriptors are measured.

    Raises:
        ConfigError: the settings do not go together.
    """
    out = Path(request.out).expanduser()
    configs = [request.recipes_settings(data, measuring) for data in files]
    return CharacterizationJob(
        [Measurement(c.model_dump(), str(out / _name_of(c.data))) for c in configs],
        request.only_measured,
        request.recipes_settings(request.against, measuring).model_dump() if request.against else None,
        only_check=False,
    )


def require(job: CharacterizationJob) -> None:
    """Raise a DataError if an input file is missing or an output file cannot be written under its name,
    before any file is measured.

    Then the process with torch also checks the contents of the other files, so that the error lists the
    problems of all files.
    """
    missing = [_missing(measurement.settings) for measurement in job.measurements]
    reference_missing = _missing(job.against) if job.against else []
    problems = [*_output_problems(job), *chain.from_iterable(missing), *reference_missing]
    if not problems:
        return
    present = [m for m, problem in zip(job.measurements, missing, strict=True) if not problem]
    against = None if reference_missing else job.against
    try:
        if present or against:
            list(_run_process(replace(job, measurements=present, against=against, only_check=True)))
    except DataError as error:
        problems += str(error).splitlines()
    except RunError as error:
        problems.append(f"the other files could not be checked: {error}")
    raise DataError("\n".join(problems))


def characterized(job: CharacterizationJob) -> Iterator[Characterized]:
    """Measure the microstructures, and yield the result of each when its files are written.

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
    for fields in _run_process(job):
        rows = [PhaseRow(**row) for row in fields.pop("rows")]
        yield Characterized(**fields | {"shape": tuple(fields["shape"])}, rows=rows)


def table_of_differences(results: Sequence[Characterized]) -> list[str]:
    """Return the lines of a table: each microstructure's differences from the one that all were compared
    with."""
    names = [name for name in results[0].differences if all(name in r.differences for r in results)]
    rows = [(r.data, *(f"{r.differences[name]:.4g}" for name in names)) for r in results]
    return aligned([("", *names), *rows], right=range(1, len(names) + 1))


def written(measurement: Measurement, job: CharacterizationJob) -> str:
    """Return the names of the result files, such as 'out/a.npz, .csv and .png'."""
    return _listed(measurement.stem, _suffixes(job))


def _suffixes(job: CharacterizationJob) -> Sequence[str]:
    return [*_SUFFIXES, _COMPARISON_SUFFIX] if job.against else _SUFFIXES


def table(results: Sequence[Characterized]) -> list[str]:
    """Return the lines of a table: the numbers of each phase of each microstructure."""
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
    """Return a problem for each input file that does not exist."""
    paths = paths_to_read(MicrostructureConfig(**settings), "data")
    return [f"{path}: there is no such file" for path in paths if not path.is_file()]


def _output_problems(job: CharacterizationJob) -> Iterator[str]:
    """Yield why the results cannot be written: no folder, two inputs of one name, or existing files."""
    for folder in {Path(measurement.stem).parent for measurement in job.measurements}:
        if folder.exists() and not folder.is_dir():
            yield f"{folder} is a file. Take a folder with --out"
    files_by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for measurement in job.measurements:
        files_by_stem[measurement.stem].append(str(measurement.settings["data"]))
    for stem, files in files_by_stem.items():
        if len(files) > 1:
            yield (
                f"{' and '.join(files)} would both be written to {stem}{_SUFFIXES[0]}. Characterize them into folders of their own"
            )
    for measurement in job.measurements:
        if existing := [suffix for suffix in _suffixes(job) if Path(f"{measurement.stem}{suffix}").exists()]:
            yield (
                f"{_listed(measurement.stem, existing)} would be written over. Take another folder with --out, or remove "
                "what is there"
            )


def _run_process(job: CharacterizationJob) -> Iterator[dict[str, Any]]:
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
            # A process that ended before it read the job has its reason in its exit code and on stderr.
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
