"""`nbgpu train`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nbgpu import ui
from nbgpu.cli.asking import (
    added_settings,
    asked_before,
    cluster_of,
    defaults_of,
    general_help,
    no_recipe,
    recipe_of,
)
from nbgpu.cli.command_flags import TrainFlags
from nbgpu.client.cluster.cluster import cluster_with
from nbgpu.client.engines import preloading
from nbgpu.client.host import gpu_choice
from nbgpu.client.runs import data_check, planning
from nbgpu.client.runs.run import Run
from nbgpu.config import ClusterConfig, OwnConfig, TrainConfig, flags, settings_of, train_config
from nbgpu.config.settings import together, unused
from nbgpu.errors import ConfigError
from nbgpu.machine import requirements
from nbgpu.planning.suitability import require_paths
from nbgpu.run_folder import resume
from nbgpu.text.console import CommandConsole, say
from nbgpu.ui.run import terminal

_FIRST = (
    *("data", "preset", "config", "gpus", "ranks", "batch_size", "epochs", "lr", "amp"),
    *("cache_rate", "resume", "plan", "find_batch_size"),
)
"""The flags that `--help` lists."""


def train(arguments: list[str]) -> None:
    """Train a recipe on a new cluster. Before the cluster starts, all settings, files and checkpoints are
    checked that can be checked without ranks."""
    general_help(
        "train", arguments, [TrainFlags, ClusterConfig, TrainConfig], hidden=("recipe",), first=_FIRST
    )
    recipe, rest = recipe_of(arguments), arguments[1:]
    if recipe is None:
        raise no_recipe(arguments, "nbgpu train RECIPE [flags]")
    cluster, before = asked_before(recipe, rest)
    model = settings_of(recipe)
    values = flags.parse(
        [TrainFlags, ClusterConfig, model],
        rest,
        prog=f"nbgpu train {recipe}",
        defaults=defaults_of(recipe, before, rest) | cluster.model_dump() | TrainFlags().model_dump(),
        hidden=("recipe", *unused(model)),
        first=(*_FIRST, *added_settings(recipe)),
    )
    command = TrainFlags(**{name: values.pop(name) for name in TrainFlags.model_fields})
    cluster_values = {name: values.pop(name) for name in ClusterConfig.model_fields}
    given = {name: values[name] for name in flags.given(rest, values)}
    # `together` reports the errors of both at once.
    cluster, config = together(
        lambda: cluster_of(cluster, rest, cluster_values),
        lambda: train_config(recipe, **{**before, **given}),
    )
    if command.find_batch_size:
        _require_search(config, rest)
    requirements.require_extras(config)
    together(lambda: resume.find(config, check_sha256=False), lambda: require_paths(config))
    # The fork server imports torch while the data are read.
    with preloading.begun(gpu_choice.choose, cluster):
        data_check.require_good_data(config)
        _run(cluster, config, command)


def _run(cluster: ClusterConfig, config: TrainConfig, command: TrainFlags) -> None:
    """Start a cluster, plan the run and, without --plan, train."""
    console = CommandConsole()
    ui.connect()
    with cluster_with(cluster) as started:
        say(console, started.describe())
        if command.find_batch_size:
            search = started.parts.runs.find_batch_size_with(config)
            say(console, str(search))
            config = config.changed(batch_size=search.batch_size, global_batch_size=None)
        plan = started.parts.runs.plan_with(config)
        say(console, str(plan))
        if command.plan:
            return
        run = started.parts.runs.train_with(config)
        say(console, f"writes to {run.folder}")
        try:
            terminal.follow(run, console, printed=plan.data)
            run.wait(progress=False)
        finally:
            say(console, f"{run.status} at step {max(s.step for s in run.statuses())}: {run.folder}")
            # The lines are not wrapped, so that commands can be copied.
            console.print("\n".join(_next_commands(run)), highlight=False, soft_wrap=True)


def _next_commands(run: Run) -> list[str]:
    """Return lines with the commands that can be used on a run that has ended."""
    folder = shlex.quote(str(run.folder))
    commands = [f"nbgpu report {folder}"]
    if run.can_work_out_result:
        commands.append(f"nbgpu result {folder}")
    if isinstance(run.config, OwnConfig):
        if {"new_data", "predict"} <= run.config.METHODS:
            commands.append(f"nbgpu predict {folder} --data NEW --trust")
    elif run.config.PREDICTS:
        commands.append(f"nbgpu predict {folder} --data NEW")
    return ["go on with:", *(f"  {command}" for command in commands)]


def _require_search(config: TrainConfig, arguments: Sequence[str]) -> None:
    """Raise a ConfigError for flags that do not go with --find-batch-size."""
    planning.for_search(config)
    for name in ("batch_size", "global_batch_size"):
        if flags.values_of(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--find-batch-size finds the batch size, and {flag} gives one. Leave one of them out"
            )
    if config.smoke_test:
        raise ConfigError(
            "--smoke-test trains with batches of 2 samples, whatever fits. Leave out --smoke-test or --find-batch-size"
        )
