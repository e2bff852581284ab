"""`nbgpu scaling`."""

from __future__ import annotations

from pydantic import Field
from rich.console import Console

from nbgpu import ui
from nbgpu.cli.asking import FileFlag, asked_before, defaults_of, no_recipe, recipe_of, take_value
from nbgpu.client.scaling import starting
from nbgpu.client.scaling.study import Study
from nbgpu.config import (
    ClusterConfig,
    flags,
    settings_of,
)
from nbgpu.config.settings import unused
from nbgpu.errors import ConfigError
from nbgpu.performance.study_results import PointSummary
from nbgpu.planning import studies, trials
from nbgpu.planning.studies import StudyConfig
from nbgpu.ui.study import terminal as study_terminal


class _StudyFlags(FileFlag):
    """The flags of `nbgpu scaling` that are no settings."""

    ranks: str = Field(
        "1,2", description="numbers of ranks to measure, such as 1,2,4; with --vary one number"
    )
    vary: str = Field(
        "", description="a setting of the recipe to vary in place of the number of ranks, such as bucket-mb"
    )
    values: str = Field("", description="the values of that setting, such as 1,5,25")


def scaling(arguments: list[str]) -> int:
    """Start or continue a study. Returns the exit code, which is 1 if a point is not measured."""
    ui.connect()
    ui.connect_studies()
    if recipe := recipe_of(arguments):
        study = _new_study(recipe, arguments[1:])
    else:
        rest, folder = take_value(arguments, "--resume", "the folder of a study")
        if folder is None or rest:
            raise no_recipe(arguments, "nbgpu scaling RECIPE [flags], or nbgpu scaling --resume FOLDER")
        study = Study(folder)
        if study.status != "finished" or any(each.why_failed for each in study.measured()):
            study.resume()
    console = Console()
    count = f"{len(study.points)} point{'s' if len(study.points) > 1 else ''}"
    console.print(
        f"{count}, {study.plan.config.repeats} times each, in turns; writes to {study.folder}",
        highlight=False,
        soft_wrap=True,
    )
    study_terminal.follow(study, console)
    study.wait()
    return 0 if all(isinstance(found, PointSummary) for found in study.summary()) else 1


def _new_study(recipe: str, arguments: list[str]) -> Study:
    """Start the study that the flags describe."""
    cluster, before = asked_before(recipe, arguments)
    model = settings_of(recipe)
    defaults = cluster.model_dump() | defaults_of(recipe, before, arguments) | _StudyFlags().model_dump()
    values = flags.parse(
        [_StudyFlags, StudyConfig, ClusterConfig, model],
        arguments,
        prog=f"nbgpu scaling {recipe}",
        defaults=defaults,
        hidden=("recipe", *studies.DECIDED, *unused(model)),
    )
    asked = _StudyFlags(**{name: values.pop(name) for name in _StudyFlags.model_fields})
    # What is a default need not stand in study.toml.
    known = {n: field.default for m in (ClusterConfig, StudyConfig) for n, field in m.model_fields.items()}
    given = {name: value for name, value in values.items() if name in known and value != known[name]}
    given |= {name: value for name, value in before.items() if name in {*values, "preset"}}
    given |= {name: values[name] for name in flags.given(arguments, values)}
    if not asked.vary:
        return starting.begin(recipe, studies.RANKS, _numbers(asked.ranks), given)
    vary = asked.vary.replace("-", "_")
    if vary not in model.model_fields:
        raise ConfigError(
            f"{asked.vary} is not a setting of {recipe}. Settings: {', '.join(model.model_fields)}"
        )
    ranks = _numbers(asked.ranks) if flags.values_of(arguments, "ranks") else [None]
    if len(ranks) != 1:
        raise ConfigError(f"--ranks {asked.ranks} are several numbers. With --vary give one")
    field = model.model_fields[vary]
    varied = [trials.item(part.strip(), field) for part in asked.values.split(",") if part.strip()]
    return starting.begin(recipe, vary, varied, given | {"ranks": ranks[0]})


def _numbers(text: str) -> list[int]:
    """The numbers in a text such as '1,2,4'."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--ranks {text!r} must be whole numbers separated by commas, such as 1,2,4"
        ) from None
