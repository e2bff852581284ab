"""Applies a run's trained model to new data, with a share of the samples on each rank."""

from __future__ import annotations

import json
import time
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
from nbgpu.recipes.trained import model_of, require_trust
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.predictions import Job, Row, RowWriter


@torch_settings.as_at_the_beginning()
def predict_share(job_fields: dict[str, Any], done: Sequence[tuple[bool, str]]) -> list[str]:
    """Predict for this rank's share of the samples; all ranks call it with the same arguments, and no
    collective is called. Return a line for each file that was left out, the same on all ranks.

    Args:
        job_fields: the fields of the `Job`.
        done: the samples of earlier attempts that are left out: whether each is a reference, and its name.

    Raises:
        ConfigError: the recipe cannot predict, or the settings contradict each other.
        DataError: files are bad by their names or headers, and `skip_bad` is not set. A file that turns out
            to be bad later fails alone.
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
    known = {(bool(is_reference), name) for is_reference, name in done}
    work = [(True, item, out) for item in references]
    work += [(False, item, out / stem) for item, stem in zip(samples, stems, strict=True)]
    left = [one for one in work if (one[0], str(one[1]["name"])) not in known]
    try:
        with precision.kernels(config), closing(RowWriter(job, member.rank, len(left))) as writer:
            share = left[member.rank :: member.world_size]
            if not share:
                return problems
            model = model_of(Path(job.run_folder), Path(job.checkpoint), trust=job.trust).to(member.device)
            for is_reference, sample, stem in share:
                writer.add(_row(recipe, model, member.device, sample, stem, is_reference, member.rank))
            return problems
    finally:
        memory.free()


def conclude(job_fields: dict[str, Any], rows_fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Let the recipe add results that need all samples at once, such as a rank among patients. Return
    `columns`, further values of the table by the name of the sample, and `notes`, sentences; both empty if
    the recipe adds nothing.

    Args:
        job_fields: the fields of the `Job`.
        rows_fields: the fields of all its rows.
    """
    job = _job(job_fields)
    _, recipe = _loaded(job)
    rows = [row for row in (Row(**fields) for fields in rows_fields) if not row.failed]
    own = [row for row in rows if not row.is_reference]
    if not isinstance(recipe, Concluding) or not own:
        return {"columns": {}, "notes": []}
    references = [row for row in rows if row.is_reference]
    columns, notes = recipe.conclude(own, references, job)
    return {"columns": columns, "notes": notes}


def check(job_fields: Mapping[str, Any]) -> None:
    """Look at the names and headers of the new data.

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
    """Build the Job from its fields, with the paths of the copies that this rank's host has of its
    folders."""
    job = Job(**fields)
    run_folder, checkpoint, out = map(str, map(served.here, (job.run_folder, job.checkpoint, job.out)))
    return replace(job, run_folder=run_folder, checkpoint=checkpoint, out=out)


def _loaded(job: Job) -> tuple[TrainConfig, Predicting]:
    """Return (the run's settings with the job's changes, its recipe).

    Raises:
        ConfigError: the recipe is a person's own file and the job has no trust, or it cannot predict.
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
    """Return (the job's samples, a line for each problem). Samples of the same name are a problem, because
    rows are told apart by name; the last one of them is kept."""
    samples, problems = recipe.new_samples(job.data)
    names = [str(sample["name"]) for sample in samples]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    reported = {problem.partition(":")[0] for problem in problems}
    problems += [f"{name}: is there several times. Keep one" for name in twice if name not in reported]
    if not samples:
        raise DataError("\n".join(problems) or f"{job.data}: has nothing to predict")
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
    """Predict for one sample and return its row. A file that cannot be used, or a lack of memory, fails this
    sample alone; any other error is raised."""
    name, begun_s = str(sample["name"]), time.monotonic()
    try:
        with torch.no_grad():
            found = recipe.predict(model, device, sample, stem)
    except DataError as error:
        return Row(name, rank, failed=str(error), is_reference=is_reference)
    except torch.OutOfMemoryError as error:
        memory.free()
        why = str(error).splitlines()[0]
        return Row(name, rank, failed=f"rank {rank}'s memory is too small: {why}", is_reference=is_reference)
    except Exception as error:
        error.add_note(f"This happened on rank {rank} with the sample {name}.")
        raise
    return Row(
        name,
        rank,
        # A row is written as JSON. Converting here turns tuples into lists, as a reader will see them.
        values=json.loads(json.dumps(dict(found.values))),
        files=[path.name for path in found.files],
        aside=dict(found.aside),
        is_reference=is_reference,
        seconds=round(time.monotonic() - begun_s, 3),
    )
