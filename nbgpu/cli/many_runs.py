"""The commands that start several runs: `nbgpu scaling` and `nbgpu sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from nbgpu.cli.command_flags import FileFlag, StudyFlags
from nbgpu.client.scaling import starting as starting_studies
from nbgpu.client.scaling.study import Study
from nbgpu.client.sweeps import starting as starting_sweeps
from nbgpu.config import ClusterConfig, TrainConfig, flags, settings_of
from nbgpu.config.conditions import default_of
from nbgpu.config.settings import unused
from nbgpu.errors import ConfigError
from nbgpu.performance.study_results import PointSummary
from nbgpu.planning import studies, trials
from nbgpu.planning.studies import StudyConfig
from nbgpu.planning.trials import SweepConfig
from nbgpu.text.console import CommandConsole, say
from nbgpu.ui import table_in_terminal

_FIRST_OF_SCALING = (
    *("ranks", "vary", "values", "preset", "mode", "repeats", "measured_steps", "gpus"),
    *("data", "batch_size", "amp"),
)
_FIRST_OF_SWEEP = (
    *("config", "preset", "random", "parallel", "sort_by", "goal", "gpus", "ranks"),
    *("data", "batch_size", "epochs", "lr", "amp"),
)
"""The flags that `--help` of each command lists."""


def scaling(arguments: list[str]) -> int:
    """Start or continue a study. Returns the exit code, which is 1 if a point is not measured."""
    models: list[type[BaseModel]] = [StudyFlags, StudyConfig, ClusterConfig, TrainConfig]
    general_help("scaling", arguments, models, hidden=("recipe", *studies.DECIDED), first=_FIRST_OF_SCALING)
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
    table_in_terminal.follow_study(study, console)
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
        first=(*_FIRST_OF_SCALING, *added_settings(recipe)),
    )
    study = StudyFlags(**{name: values.pop(name) for name in StudyFlags.model_fields})
    # Defaults are left out, so that they are not written to study.toml.
    defaults = {n: default_of(m, n) for m in (ClusterConfig, StudyConfig) for n in m.model_fields}
    given = {name: value for name, value in values.items() if value != defaults.get(name, value)}
    given |= {name: value for name, value in before.items() if name in {*values, "preset"}}
    given |= {name: values[name] for name in flags.given(arguments, values)}
    if not study.vary:
        return starting_studies.begin(recipe, studies.RANKS, _parse_numbers(study.ranks), given)
    vary = study.vary.replace("-", "_")
    if vary not in model.model_fields:
        raise ConfigError(
            f"{study.vary} is not a setting of {recipe}. Settings: {', '.join(model.model_fields)}"
        )
    ranks = _parse_numbers(study.ranks) if flags.values_of(arguments, "ranks") else [None]
    if len(ranks) != 1:
        raise ConfigError(f"--ranks {study.ranks} are several numbers. With --vary give one")
    field = model.model_fields[vary]
    varied = [trials.item(part.strip(), field) for part in study.values.split(",") if part.strip()]
    return starting_studies.begin(recipe, vary, varied, given | {"ranks": ranks[0]})


def _parse_numbers(text: str) -> list[int]:
    """Parse a value of --ranks such as '1,2,4'."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--ranks {text!r} must be whole numbers separated by commas, such as 1,2,4"
        ) from None


def sweep(arguments: list[str]) -> int:
    """Start or continue a sweep. Returns the exit code, which is 1 if a trial is not finished."""
    models: list[type[BaseModel]] = [FileFlag, SweepConfig, ClusterConfig, TrainConfig]
    general_help("sweep", arguments, models, hidden=("recipe",), as_text=TrainConfig, first=_FIRST_OF_SWEEP)
    ui.connect()
    if recipe := recipe_of(arguments):
        sweep = starting_sweeps.begin(recipe, _sweep_settings(recipe, arguments[1:]))
    else:
        rest, folder = take_value(arguments, "--resume", "the folder of a sweep")
        if folder is None:
            raise no_recipe(arguments, "nbgpu sweep RECIPE [flags], or nbgpu sweep --resume FOLDER [flags]")
        plan = trials.SweepPlan.read(Path(folder))
        stored = plan.config.model_dump() | plan.cluster.model_dump()
        values = flags.parse([SweepConfig, ClusterConfig], rest, "nbgpu sweep --resume", defaults=stored)
        sweep = starting_sweeps.go_on(folder, **values)
    console = CommandConsole()
    say(console, f"{len(sweep.trials)} trials, {sweep.num_parallel} side by side; writes to {sweep.folder}")
    table_in_terminal.follow_sweep(sweep, console)
    sweep.wait(progress=False)
    return 0 if all(trial.state == "finished" for trial in sweep.trials) else 1


def _sweep_settings(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """Parse the flags of a sweep. Flags of the recipe take several values, `--lr 1e-4,1e-3`, or a range."""
    cluster, before = asked_before(recipe, arguments)
    values = flags.parse(
        [FileFlag, SweepConfig, ClusterConfig, settings_of(recipe)],
        arguments,
        prog=f"nbgpu sweep {recipe}",
        defaults={
            **cluster.model_dump(),
            "ranks": cluster.ranks or 1,
            **defaults_of(recipe, before, arguments),
        },
        hidden=("recipe", *unused(settings_of(recipe))),
        as_text=settings_of(recipe),
        first=(*_FIRST_OF_SWEEP, *added_settings(recipe)),
    )
    for name in FileFlag.model_fields:
        del values[name]
    varied = {
        name: trials.from_text(values.pop(name))
        for name in settings_of(recipe).model_fields
        if values.get(name) is not None
    }
    given = cluster.given | {
        name: values[name] for name in flags.given(arguments, ClusterConfig.model_fields)
    }
    return {name: values[name] for name in SweepConfig.model_fields} | given | before | varied
