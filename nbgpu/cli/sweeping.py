"""`nbgpu sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from nbgpu import ui
from nbgpu.cli.asking import FileFlag, asked_before, defaults_of, no_recipe, recipe_of, take_value
from nbgpu.client.sweeps import starting
from nbgpu.config import (
    ClusterConfig,
    flags,
    settings_of,
)
from nbgpu.config.settings import unused
from nbgpu.planning import trials
from nbgpu.planning.trials import SweepConfig
from nbgpu.ui.sweep import terminal as sweep_terminal


def sweep(arguments: list[str]) -> int:
    """Start or continue a sweep. Returns the exit code, which is 1 if a trial is not finished."""
    ui.connect()
    ui.connect_sweeps()
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
    console = Console()
    console.print(
        f"{len(sweep.trials)} trials, {sweep.num_parallel} side by side; writes to {sweep.folder}",
        highlight=False,
        soft_wrap=True,
    )
    sweep_terminal.follow(sweep, console)
    sweep.wait(progress=False)
    return 0 if all(trial.state == "finished" for trial in sweep.trials) else 1


def _sweep_settings(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """Parse the flags of a sweep. Those of the recipe take several values, `--lr 1e-4,1e-3`, or a range."""
    cluster, before = asked_before(recipe, arguments, ClusterConfig(ranks=1))
    values = flags.parse(
        [FileFlag, SweepConfig, ClusterConfig, settings_of(recipe)],
        arguments,
        prog=f"nbgpu sweep {recipe}",
        defaults=cluster.model_dump() | defaults_of(recipe, before, arguments),
        hidden=("recipe", *unused(settings_of(recipe))),
        as_text=settings_of(recipe),
    )
    for name in FileFlag.model_fields:
        del values[name]
    varied = {
        name: trials.from_text(values.pop(name))
        for name in settings_of(recipe).model_fields
        if values.get(name) is not None
    }
    return {n: v for n, v in values.items() if n not in settings_of(recipe).model_fields} | before | varied
