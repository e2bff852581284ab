"""`nbgpu sweep`."""

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
from nbgpu.cli.command_flags import FileFlag
from nbgpu.client.sweeps import starting
from nbgpu.config import (
    ClusterConfig,
    TrainConfig,
    flags,
    settings_of,
)
from nbgpu.config.settings import unused
from nbgpu.planning import trials
from nbgpu.planning.trials import SweepConfig
from nbgpu.text.console import CommandConsole, say
from nbgpu.ui.sweep import terminal as sweep_terminal

_FIRST = (
    *("config", "preset", "random", "parallel", "sort_by", "goal", "gpus", "ranks"),
    *("data", "batch_size", "epochs", "lr", "amp"),
)
"""The flags that `--help` lists."""


def sweep(arguments: list[str]) -> int:
    """Start or continue a sweep. Returns the exit code, which is 1 if a trial is not finished."""
    models: list[type[BaseModel]] = [FileFlag, SweepConfig, ClusterConfig, TrainConfig]
    general_help("sweep", arguments, models, hidden=("recipe",), as_text=TrainConfig, first=_FIRST)
    ui.connect()
    if recipe := recipe_of(arguments):
        sweep = starting.begin(recipe, _sweep_settings(recipe, arguments[1:]))
    else:
        rest, folder = take_value(arguments, "--resume", "the folder of a sweep")
        if folder is None:
            raise no_recipe(arguments, "nbgpu sweep RECIPE [flags], or nbgpu sweep --resume FOLDER [flags]")
        plan = trials.SweepPlan.read(Path(folder))
        stored = plan.config.model_dump() | plan.cluster.model_dump()
        values = flags.parse([SweepConfig, ClusterConfig], rest, "nbgpu sweep --resume", defaults=stored)
        sweep = starting.go_on(folder, **values)
    console = CommandConsole()
    say(console, f"{len(sweep.trials)} trials, {sweep.num_parallel} side by side; writes to {sweep.folder}")
    sweep_terminal.follow(sweep, console)
    sweep.wait(progress=False)
    return 0 if all(trial.state == "finished" for trial in sweep.trials) else 1


def _sweep_settings(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """Parse the flags of a sweep. Those of the recipe take several values, `--lr 1e-4,1e-3`, or a range."""
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
        first=(*_FIRST, *added_settings(recipe)),
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
    of_sweep = {name: values[name] for name in SweepConfig.model_fields}
    return of_sweep | given | before | varied
