"""`nbgpu scaling`."""

from __future__ import annotations

from pydantic import BaseModel

from nbgpu import ui
from nbgpu.cli.asking import (
    added_settings,
    asked_before,
    defaults_of,
    general_help,
    no_recipe,
    recipe_of,
    take_value,
)
from nbgpu.cli.command_flags import StudyFlags
from nbgpu.client.scaling import starting
from nbgpu.client.scaling.study import Study
from nbgpu.config import (
    ClusterConfig,
    TrainConfig,
    flags,
    settings_of,
)
from nbgpu.config.conditions import default_of
from nbgpu.config.settings import unused
from nbgpu.errors import ConfigError
from nbgpu.performance.study_results import PointSummary
from nbgpu.planning import studies, trials
from nbgpu.planning.studies import StudyConfig
from nbgpu.text.console import CommandConsole, say
from nbgpu.ui.study import terminal as study_terminal

_FIRST = (
    *("ranks", "vary", "values", "preset", "mode", "repeats", "measured_steps", "gpus"),
    *("data", "batch_size", "amp"),
)
"""The flags that `--help` lists."""


def scaling(arguments: list[str]) -> int:
    """Start or continue a study. Returns the exit code, which is 1 if a point is not measured."""
    models: list[type[BaseModel]] = [StudyFlags, StudyConfig, ClusterConfig, TrainConfig]
    general_help("scaling", arguments, models, hidden=("recipe", *studies.DECIDED), first=_FIRST)
    ui.connect()
    if recipe := recipe_of(arguments):
        study = _new_study(recipe, arguments[1:])
    else:
        rest, folder = take_value(arguments, "--resume", "the folder of a study")
        if folder is None or rest:
            raise no_recipe(arguments, "nbgpu scaling RECIPE [flags], or nbgpu scaling --resume FOLDER")
        study = Study(folder)
        if study.status != "finished" or any(repeat.why_failed for repeat in study.measured()):
            study.resume()
    console = CommandConsole()
    count = f"{len(study.points)} point{'s' if len(study.points) > 1 else ''}"
    say(console, f"{count}, {study.plan.config.repeats} times each, in turns; writes to {study.folder}")
    study_terminal.follow(study, console)
    study.wait(progress=False)
    return 0 if all(isinstance(summary, PointSummary) for summary in study.summary()) else 1


def _new_study(recipe: str, arguments: list[str]) -> Study:
    """Start the study that the flags describe."""
    cluster, before = asked_before(recipe, arguments)
    model = settings_of(recipe)
    defaults = cluster.model_dump() | defaults_of(recipe, before, arguments) | StudyFlags().model_dump()
    values = flags.parse(
        [StudyFlags, StudyConfig, ClusterConfig, model],
        arguments,
        prog=f"nbgpu scaling {recipe}",
        defaults=defaults,
        hidden=("recipe", *studies.DECIDED, *unused(model)),
        first=(*_FIRST, *added_settings(recipe)),
    )
    asked = StudyFlags(**{name: values.pop(name) for name in StudyFlags.model_fields})
    # What is a default need not stand in study.toml.
    usual = {n: default_of(m, n) for m in (ClusterConfig, StudyConfig) for n in m.model_fields}
    given = {name: value for name, value in values.items() if name in usual and value != usual[name]}
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
