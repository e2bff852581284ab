"""Applies the trained model of a run to new data, with a share of the samples on each rank."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbgpu.config import TrainConfig
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.group import group, torch_settings
from nbgpu.engine.memory import usage as memory
from nbgpu.engine.model import precision
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.recipe import Concluding, Predicting, file_stems
from nbgpu.errors import ConfigError, DataError
from nbgpu.planning.volume_files import SUFFIXES
from nbgpu.protocol import served
from nbgpu.recipes.trained import load_model, require_trust
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.predictions import Job, Row, RowWriter


@torch_settings.as_at_the_beginning()
def predict_share(job_fields: dict[str, Any], done: Sequence[tuple[bool, str]]) -> list[str]:
    """Predict for this rank's share of the samples, and write the rows to the job's folder. All ranks call
    this function with the same arguments; it calls no collective.

    Args:
        job_fields: the fields of the `Job`.
        done: (is_reference, name) of the samples that earlier attempts have predicted.

    Returns:
        A line for each file that was left out, the same on all ranks.

    Raises:
        ConfigError: the recipe cannot predict, or the settings contradict each other.
        DataError: files are bad by their names or headers, and `skip_bad` is not set. A file whose voxels are
            bad is only reported in its row.
        RunError: the checkpoint is damaged.
    """
    member = group.membership()
    job = _job(job_fields)
    config, recipe = _loaded(job)
    samples, problems = _samples(recipe, job)
    if problems and not job.skip_bad:
        raise DataError("\n".join(problems))
    references = recipe.reference_samples() if isinstance(recipe, Concluding) else []
    stems = file_stems([str(sample["name"]) for sample in samples], SUFFIXES)
    out = Path(job.out)
    earlier = {(bool(is_reference), name) for is_reference, name in done}
    # (is_reference, sample, stem of its files); references write no files.
    work = [(True, sample, out) for sample in references]
    work += [(False, sample, out / stem) for sample, stem in zip(samples, stems, strict=True)]
    work = [one for one in work if (one[0], str(one[1]["name"])) not in earlier]
    try:
        with precision.kernels(config), closing(RowWriter(job, member.rank, len(work))) as writer:
            share = work[member.rank :: member.world_size]
            if not share:
                return problems
            model = load_model(Path(job.run_folder), Path(job.checkpoint), trust=job.trust).to(member.device)
            for is_reference, sample, stem in share:
                writer.add(_row(recipe, model, member.device, sample, stem, is_reference, member.rank))
            return problems
    finally:
        memory.free()


def conclude(job_fields: dict[str, Any], rows_fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Let the recipe add results that need all samples at once, such as a percentile among patients.

    Args:
        job_fields: the fields of the `Job`.
        rows_fields: the fields of all rows of the job.

    Returns:
        `columns`, further columns of the table by the name of the sample, and `notes`, sentences for the
        user; both are empty if the recipe adds nothing.
    """
    job = _job(job_fields)
    _, recipe = _loaded(job)
    rows = [row for row in (Row(**fields) for fields in rows_fields) if not row.failed]
    new = [row for row in rows if not row.is_reference]
    if not isinstance(recipe, Concluding) or not new:
        return {"columns": {}, "notes": []}
    columns, notes = recipe.conclude(new, [row for row in rows if row.is_reference], job)
    return {"columns": columns, "notes": notes}


def check(job_fields: Mapping[str, Any]) -> None:
    """Check the names and headers of the new data.

    Raises:
        ConfigError: the recipe cannot predict, or the settings contradict each other.
        DataError: files are bad by their names or headers, and `skip_bad` is not set.
    """
    job = Job(**job_fields)
    _, recipe = _loaded(job)
    _, problems = _samples(recipe, job)
    if problems and not job.skip_bad:
        raise DataError("\n".join(problems))
    if isinstance(recipe, Concluding):
        recipe.reference_samples()


def _job(fields: Mapping[str, Any]) -> Job:
    """Build the Job from its fields. On another host, its folders are replaced by the copies that this host
    has of them."""
    job = Job(**fields)
    run_folder, checkpoint, out = map(str, map(served.here, (job.run_folder, job.checkpoint, job.out)))
    return replace(job, run_folder=run_folder, checkpoint=checkpoint, out=out)


def _loaded(job: Job) -> tuple[TrainConfig, Predicting]:
    """Return (the run's settings with the job's changes, its recipe).

    Raises:
        ConfigError: the recipe is a user's own file that is not trusted, or it cannot predict.
    """
    folder = Path(job.run_folder)
    _, config = runs.read_settings(folder)
    require_trust(config, folder, job.trust)
    config = config.counting(**{name: _from_json(value) for name, value in job.settings.items()})
    recipe = by_name.load(config, folder)
    if not isinstance(recipe, Predicting):
        raise ConfigError(f"the recipe {config.recipe!r} has no model that could be applied to new data")
    return config, recipe


def _from_json(value: Any) -> Any:
    """Turn a list into a tuple: JSON has no tuples, and settings take no lists."""
    return tuple(value) if isinstance(value, list) else value


def _samples(recipe: Predicting, job: Job) -> tuple[list[Item], list[str]]:
    """Return (the job's samples, a line for each problem). Several samples of one name are a problem, because
    the rows of the table are identified by name; the last of these samples is kept."""
    samples, problems = recipe.new_samples(job.data)
    if not samples:
        raise DataError("\n".join(problems) or f"{job.data}: has nothing to predict")
    counts = Counter(str(sample["name"]) for sample in samples)
    reported = {problem.partition(":")[0] for problem in problems}
    problems += [
        f"{name}: is there several times. Keep one"
        for name, count in sorted(counts.items())
        if count > 1 and name not in reported
    ]
    return list({str(sample["name"]): sample for sample in samples}.values())[: job.max_samples], problems


def _row(
    recipe: Predicting,
    model: nn.Module,
    device: torch.device,
    sample: Item,
    stem: Path,
    is_reference: bool,
    rank: int,
) -> Row:
    """Predict for one sample and return its row. If its file cannot be used, or the memory is too small, the
    row says so. Any other error is raised."""
    name, begun_s = str(sample["name"]), time.monotonic()
    try:
        with torch.no_grad():
            predicted = recipe.predict(model, device, sample, stem)
    except DataError as error:
        return Row(name, rank, failed=str(error), is_reference=is_reference)
    except torch.OutOfMemoryError as error:
        memory.free()
        reason = f"rank {rank}'s memory is too small: {str(error).splitlines()[0]}"
        return Row(name, rank, failed=reason, is_reference=is_reference)
    except Exception as error:
        error.add_note(f"This happened on rank {rank} with the sample {name}.")
        raise
    return Row(
        name,
        rank,
        # The row is written as JSON, which has lists in place of tuples.
        values=json.loads(json.dumps(dict(predicted.values))),
        files=[path.name for path in predicted.files],
        aside=dict(predicted.aside),
        is_reference=is_reference,
        seconds=round(time.monotonic() - begun_s, 3),
    )
