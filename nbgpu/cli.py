"""The `nbgpu` command; every flag is read off the settings' models."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from nbgpu import extras, flags, resume, ui
from nbgpu.client import doctor, listing
from nbgpu.client import run as client_run
from nbgpu.client.cluster import Cluster
from nbgpu.client.run import Run
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, read_toml, train_config
from nbgpu.errors import NbgpuError
from nbgpu.records import Event

_USAGE = """\
nbgpu train RECIPE [flags] [--config run.toml]   train on all GPUs, or on CPU ranks where there is none
nbgpu train RECIPE --help                        the recipe's settings
nbgpu report RUN_FOLDER                          one page that shows a run, from its folder; needs no network
nbgpu doctor [--json]                            looks at this machine: what works, what does not, what to do
nbgpu ps                                         your clusters on this host, also those that were left over
nbgpu stop [ID ...] [--all]                      end those; with no ID the ones that were left over

Recipes: {recipes}
The same training under torchrun, with no notebook and no cluster:
torchrun --nproc-per-node=N -m nbgpu.engine.train run.toml
"""
_REFRESH_PERIOD_S = 0.25


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; exits with 1 and the error's message where it fails."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    try:
        if command == "train":
            _train(list(rest))
        elif command == "report":
            _report(list(rest))
        elif command == "ps":
            print(listing.table())
        elif command == "stop":
            _stop(list(rest))
        elif command == "doctor":
            sys.exit(_doctor(list(rest)))
        elif command in ("--help", "-h"):
            print(_USAGE.format(recipes=", ".join(TRAIN_CONFIGS)), end="")
        else:
            sys.exit(
                f"nbgpu {command}: there is no such command.\n{_USAGE.format(recipes=', '.join(TRAIN_CONFIGS))}"
            )
    except NbgpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _train(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in TRAIN_CONFIGS:
        named = (
            f"{arguments[0]!r} is not a recipe. " if arguments and not arguments[0].startswith("-") else ""
        )
        sys.exit(f"{named}usage: nbgpu train RECIPE [flags]. Recipes: {', '.join(TRAIN_CONFIGS)}")
    recipe, *rest = arguments
    rest, file = _take_config_file(rest)
    cluster, train = read_toml(file, recipe=recipe) if file else (ClusterConfig(), train_config(recipe))
    values = flags.parse(
        [ClusterConfig, TRAIN_CONFIGS[recipe]],
        rest,
        prog=f"nbgpu train {recipe}",
        defaults=cluster.model_dump() | train.model_dump(),
        hidden=("recipe",),
    )
    settings = {name: value for name, value in values.items() if name not in ClusterConfig.model_fields}
    # A bad value, or a checkpoint that does not fit, is told before any engine starts.
    config = train_config(recipe, **settings)
    extras.require(config)
    resume.find(config, contents=False)
    console = Console()
    client_run.presenter = ui
    with Cluster(**{name: values[name] for name in ClusterConfig.model_fields}) as started:
        console.print(started.describe())
        run = started.train(recipe, **settings)
        console.print(f"writes to {run.folder}")
        try:
            _follow(run, console)
            run.wait()
        finally:
            console.print(f"{run.status} at step {max(s.step for s in run.statuses())}: {run.folder}")


def _report(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit("usage: nbgpu report RUN_FOLDER, such as nbgpu_runs/20260101-120000-autoencoder-1f2e")
    # Drawing takes a second to import.
    from nbgpu.ui.snapshot import write_report
    from nbgpu.ui.stored import StoredRun

    print(write_report(StoredRun(Path(arguments[0]))))


def _stop(arguments: list[str]) -> None:
    names = [name for name in arguments if not name.startswith("-")]
    if (unknown := set(arguments) - {*names, "--all"}) or (names and "--all" in arguments):
        wrong = f"{', '.join(sorted(unknown))} is no flag. " if unknown else ""
        sys.exit(f"{wrong}usage: nbgpu stop [ID ...] or nbgpu stop --all. `nbgpu ps` lists the ids")
    ended = listing.stop(names, everything="--all" in arguments)
    print("\n".join(ended or ["nothing was left over"]))


def _doctor(arguments: list[str]) -> int:
    """Prints the findings as they come; returns the exit code, 1 where something does not work."""
    rest, runs_dir = _take_value(arguments, "--runs-dir", "a folder, such as nbgpu_runs")
    if set(rest) - {"--json"}:
        sys.exit("usage: nbgpu doctor [--json] [--runs-dir FOLDER]")
    findings = []
    for finding in doctor.examine(runs_dir or str(TrainConfig.model_fields["runs_dir"].default)):
        findings.append(finding)
        if not rest:
            print(doctor.line(finding), flush=True)
    print(doctor.as_json(findings) if rest else doctor.summary(findings))
    return doctor.exit_code(findings)


def _take_value(arguments: list[str], flag: str, what: str) -> tuple[list[str], str | None]:
    """Takes `flag VALUE` out of the arguments."""
    if flag not in arguments:
        return arguments, None
    place = arguments.index(flag)
    if place + 1 == len(arguments):
        sys.exit(f"{flag} needs {what}")
    return arguments[:place] + arguments[place + 2 :], arguments[place + 1]


def _take_config_file(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Takes `--config FILE` out of the arguments: its values are the defaults of all other flags."""
    rest, file = _take_value(arguments, "--config", "a file, such as run.toml")
    return rest, None if file is None else Path(file)


def _follow(run: Run, console: Console) -> None:
    """Shows a progress bar until the run is over. Ctrl-C stops the run, a second one leaves at once."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(run.status, total=run.info.total_steps)
        cursor = 0
        try:
            while not run.over:
                _update(progress, bar, run)
                cursor = _print_notes(console, run, cursor)
                time.sleep(_REFRESH_PERIOD_S)
        except KeyboardInterrupt:
            run.stop()
            console.print("stopping after this step, with a checkpoint")
            while not run.over:
                time.sleep(_REFRESH_PERIOD_S)
        _update(progress, bar, run)
        _print_notes(console, run, cursor)


def _print_notes(console: Console, run: Run, cursor: int) -> int:
    """Prints what the ranks want a person to know since `cursor`; returns where to go on."""
    records, cursor = run.reader.since(cursor)
    told_at_the_start = resume.Beginning.read(run.folder).notes
    for record in records:
        if not isinstance(record, Event):
            continue
        if record.kind == "note" and record.text not in told_at_the_start:
            console.print(record.text, highlight=False)
        elif record.kind == "profile":
            console.print(f"rank {record.rank}, {record.text}", highlight=False)
    return cursor


def _update(progress: Progress, bar: TaskID, run: Run) -> None:
    statuses = run.statuses()
    losses = [s.values["loss"] for s in statuses if "loss" in s.values]
    loss = f", loss {sum(losses) / len(losses):.4g}" if losses else ""
    progress.update(
        bar,
        description=run.status + loss,
        completed=min(s.step for s in statuses),
        total=run.info.total_steps,
    )


if __name__ == "__main__":
    main()
