"""The `nbgpu` command. All its flags are derived from the models of the settings."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nbgpu import ui
from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.engines import preloading
from nbgpu.client.host import doctor, ps
from nbgpu.client.runs import characterizing, data_check, planning, predicting
from nbgpu.client.scaling import starting
from nbgpu.client.scaling.study import Study
from nbgpu.client.sweeps import sweep as client_sweep
from nbgpu.config import (
    TRAIN_CONFIGS,
    ClusterConfig,
    MicrostructureConfig,
    TrainConfig,
    flags,
    own_file,
    presets,
    read_toml,
    settings_beside,
    settings_of,
    train_config,
)
from nbgpu.config.characterization import MEASURING, CharacterizeConfig
from nbgpu.config.conditions import deciding
from nbgpu.config.prediction import PredictConfig
from nbgpu.config.settings import together, unused
from nbgpu.conversion import convert
from nbgpu.errors import ConfigError, NbgpuError, RankError, RunError
from nbgpu.machine import extras
from nbgpu.performance.study_results import PointSummary
from nbgpu.planning import studies, trials
from nbgpu.planning.studies import StudyConfig
from nbgpu.planning.suitability import require_paths
from nbgpu.planning.trials import SweepConfig
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import resume
from nbgpu.ui.prediction import terminal as terminal_progress
from nbgpu.ui.run import terminal
from nbgpu.ui.study import terminal as study_terminal
from nbgpu.ui.sweep import terminal as sweep_terminal

_USAGE = """\
nbgpu train RECIPE [flags] [--config run.toml]   train on all GPUs, or on CPU ranks where there is none
nbgpu new my_recipe                              writes my_recipe.py: your own dataset, model and loss, ready to train
nbgpu train my_recipe.py [flags]                 train it; it goes wherever RECIPE stands
nbgpu recipes                                    what there is, what it takes, and how long it takes
nbgpu train RECIPE --help                        the recipe's settings
nbgpu train RECIPE --preset NAME --data FILES    train with the settings of a guide; `nbgpu recipes` lists them
nbgpu train RECIPE [flags] --plan                what the run would do and take, and no more
nbgpu train RECIPE [flags] --find-batch-size     the largest batch that fits, found by trying, and the run with it
nbgpu sweep RECIPE --lr 1e-4,1e-3 --seed 0,1     train with every combination, as many side by side as there are GPUs
nbgpu sweep --resume SWEEP_FOLDER                what of it is not finished
nbgpu scaling RECIPE --ranks 1,2,4               how much faster a step becomes with more ranks, and where its time goes
nbgpu scaling RECIPE --vary bucket-mb --values 1,5,25 --ranks 2   what one setting does to the time of a step
nbgpu scaling --resume STUDY_FOLDER              what of it was not measured
nbgpu convert config.json environment.json --out run.toml   settings from the files of MONAI's 3d_ldm, or of Fast-DDPM
nbgpu predict RUN_FOLDER --data NEW --out FOLDER what its trained model makes of new data: images, latents, risks or contours
nbgpu characterize FILE [FILE ...] --out FOLDER  measures the descriptors of microstructures, each a target for the recipe
nbgpu report RUN_FOLDER                          one page that shows a run, from its folder; needs no network
nbgpu doctor [--json]                            looks at this machine: what works, what does not, what to do
nbgpu ps                                         your clusters on this host, also those that were left over
nbgpu stop [ID ...] [--all]                      end those; with no ID the ones that were left over

Recipes: {recipes}
The same training under torchrun, with no notebook and no cluster:
torchrun --nproc-per-node=N -m nbgpu.engine.train run.toml
"""


class _FileFlag(BaseModel):
    """The flag of every command that takes settings from a file."""

    config: str = Field(
        "",
        description="TOML file, such as a run's run.toml, whose values are the defaults of the other flags; or a JSON or "
        "YAML file that `nbgpu convert` takes",
    )
    environment_file: str = Field(
        "", description="the environment.json that belongs to the config.json of MONAI's tutorial 3d_ldm"
    )
    preset: str = Field(
        "",
        description="a set of values, such as demo, that are the defaults of the other flags, and of what --config leaves "
        "out; `nbgpu recipes` lists them",
    )


class _ConvertFlags(BaseModel):
    """Turn another tool's configuration files into a TOML file for --config."""

    out: str = Field("", description="the TOML file to write; empty to print it")
    data: str = Field("", description="the data to train on, in place of what the files say")
    perceptual_network: str = Field(
        "", description="a local file of weights for the autoencoder's perceptual distance"
    )


class _TrainFlags(_FileFlag):
    """The flags of `nbgpu train` that are no settings."""

    plan: Annotated[bool, flags.SWITCH] = Field(
        False, description="say what the run would do and take, and do not train"
    )
    find_batch_size: Annotated[bool, flags.SWITCH] = Field(
        False, description="find the largest batch that fits, by trying, and take it as batch_size"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. If it fails, exit with 1 and the error's message."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    try:
        if command == "train":
            _train(list(rest))
        elif command == "sweep":
            sys.exit(_sweep(list(rest)))
        elif command == "scaling":
            sys.exit(_scaling(list(rest)))
        elif command == "convert":
            _convert(list(rest))
        elif command == "predict":
            sys.exit(_predict(list(rest)))
        elif command == "characterize":
            _characterize(list(rest))
        elif command == "report":
            _report(list(rest))
        elif command == "new":
            _new(list(rest))
        elif command == "recipes":
            _recipes()
        elif command == "ps":
            print(ps.table())
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
    except RankError as error:
        sys.exit(_with_tracebacks(error))
    except NbgpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _with_tracebacks(error: RankError) -> str:
    """The text of an error as in a notebook, with the ranks' own tracebacks; in colour on a terminal."""
    trace = "\n".join(error._render_traceback_())
    return trace if sys.stderr.isatty() else Text.from_ansi(trace).plain


def _is_recipe(name: str) -> bool:
    return name in TRAIN_CONFIGS or own_file.is_file(name)


def _new(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit("usage: nbgpu new NAME, such as my_recipe: writes my_recipe.py into this folder")
    path = own_file.create(arguments[0])
    print(f"{path}: trains a small network on generated points. Try it:\n    nbgpu train {path}")


def _recipes() -> None:
    table = Table("recipe", "what it trains", "what it takes as --data", "without --data")
    for name, model in TRAIN_CONFIGS.items():
        table.add_row(name, flags.summary(model), model.INPUTS, model.TRIAL)
    table.add_row("my_recipe.py", "your own dataset, model and loss: nbgpu new my_recipe", "", "")
    of_presets = Table("recipe", "--preset", "what it sets", "where its numbers come from")
    for preset in (presets.read(recipe, name) for recipe in TRAIN_CONFIGS for name in presets.names(recipe)):
        of_presets.add_row(preset.recipe, preset.name, preset.description, preset.source)
    console = Console()
    console.print(table)
    console.print(of_presets)
    console.print("nbgpu train RECIPE --help lists a recipe's settings", highlight=False)


def _train(arguments: list[str]) -> None:
    if not arguments or not _is_recipe(arguments[0]):
        named = (
            f"{arguments[0]!r} is not a recipe. " if arguments and not arguments[0].startswith("-") else ""
        )
        sys.exit(f"{named}usage: nbgpu train RECIPE [flags]. Recipes: {', '.join(TRAIN_CONFIGS)}")
    recipe, *rest = arguments
    cluster, before = _asked_before(recipe, rest)
    model = settings_of(recipe)
    values = flags.parse(
        [_TrainFlags, ClusterConfig, model],
        rest,
        prog=f"nbgpu train {recipe}",
        defaults=_defaults(recipe, before, rest) | cluster.model_dump() | _TrainFlags().model_dump(),
        hidden=("recipe", *unused(model)),
    )
    asked = _TrainFlags(**{name: values.pop(name) for name in _TrainFlags.model_fields})
    of_cluster = {name: values.pop(name) for name in ClusterConfig.model_fields}
    # A bad value, a checkpoint that does not fit, and bad data are reported before any engine starts.
    given = {name: values[name] for name in flags.given(rest, values)}
    cluster, config = together(
        lambda: ClusterConfig.checked(**of_cluster), lambda: train_config(recipe, **{**before, **given})
    )
    if asked.find_batch_size:
        _require_search(config, rest)
    extras.require(config)
    together(lambda: resume.find(config, contents=False), lambda: require_paths(config))
    # The fork server imports torch while the data are read.
    with preloading.begun(cluster):
        data_check.require(config)
        _run(cluster, config, asked)


def _run(cluster: ClusterConfig, config: TrainConfig, asked: _TrainFlags) -> None:
    """Plan a run on a cluster of its own and, unless only the plan is asked for, train."""
    console = Console()
    ui.connect()
    with Cluster.with_config(cluster) as started:
        console.print(started.describe())
        if asked.find_batch_size:
            found = started.find_batch_size_with(config)
            console.print(str(found), highlight=False)
            config = config.changed(batch_size=found.batch_size, global_batch_size=None)
        plan = started.plan_with(config)
        console.print(str(plan), highlight=False, soft_wrap=True)
        if asked.plan:
            return
        run = started.train_with(config)
        console.print(f"writes to {run.folder}", soft_wrap=True)
        try:
            terminal.follow(run, console, known=plan.data)
            run.wait()
        finally:
            ended = f"{run.status} at step {max(s.step for s in run.statuses())}: {run.folder}"
            console.print(ended, soft_wrap=True)


def _sweep(arguments: list[str]) -> int:
    """Start or continue a sweep. Returns the exit code, which is 1 if a trial is not finished."""
    ui.connect()
    ui.connect_sweeps()
    if arguments and _is_recipe(arguments[0]):
        sweep = client_sweep.begin(arguments[0], _sweep_settings(arguments[0], arguments[1:]))
    else:
        rest, folder = _take_value(arguments, "--resume", "the folder of a sweep")
        if folder is None:
            sys.exit(
                "usage: nbgpu sweep RECIPE [flags], or nbgpu sweep --resume FOLDER [flags]. "
                f"Recipes: {', '.join(TRAIN_CONFIGS)}"
            )
        plan = trials.SweepPlan.read(Path(folder))
        stored = plan.config.model_dump() | plan.cluster.model_dump()
        values = flags.parse([SweepConfig, ClusterConfig], rest, "nbgpu sweep --resume", defaults=stored)
        sweep = client_sweep.go_on(folder, **values)
    console = Console()
    console.print(
        f"{len(sweep.trials)} trials, {sweep.num_parallel} side by side; writes to {sweep.folder}",
        highlight=False,
        soft_wrap=True,
    )
    sweep_terminal.follow(sweep, console)
    sweep.wait()
    return 0 if all(trial.state == "finished" for trial in sweep.trials) else 1


def _sweep_settings(recipe: str, arguments: list[str]) -> dict[str, Any]:
    """Parse the flags of a sweep. Those of the recipe take several values, `--lr 1e-4,1e-3`, or a range."""
    cluster, before = _asked_before(recipe, arguments, ClusterConfig(ranks=1))
    values = flags.parse(
        [_FileFlag, SweepConfig, ClusterConfig, settings_of(recipe)],
        arguments,
        prog=f"nbgpu sweep {recipe}",
        defaults=cluster.model_dump() | _defaults(recipe, before, arguments),
        hidden=("recipe", *unused(settings_of(recipe))),
        as_text=settings_of(recipe),
    )
    for name in _FileFlag.model_fields:
        del values[name]
    varied = {
        name: trials.from_text(values.pop(name))
        for name in settings_of(recipe).model_fields
        if values.get(name) is not None
    }
    return {n: v for n, v in values.items() if n not in settings_of(recipe).model_fields} | before | varied


class _StudyFlags(_FileFlag):
    """The flags of `nbgpu scaling` that are no settings."""

    ranks: str = Field(
        "1,2", description="numbers of ranks to measure, such as 1,2,4; with --vary one number"
    )
    vary: str = Field(
        "", description="a setting of the recipe to vary in place of the number of ranks, such as bucket-mb"
    )
    values: str = Field("", description="the values of that setting, such as 1,5,25")


def _scaling(arguments: list[str]) -> int:
    """Start or continue a study. Returns the exit code, which is 1 if a point is not measured."""
    ui.connect()
    ui.connect_studies()
    if arguments and _is_recipe(arguments[0]):
        study = _new_study(arguments[0], arguments[1:])
    else:
        rest, folder = _take_value(arguments, "--resume", "the folder of a study")
        if folder is None or rest:
            sys.exit(
                "usage: nbgpu scaling RECIPE [flags], or nbgpu scaling --resume FOLDER. "
                f"Recipes: {', '.join(TRAIN_CONFIGS)}"
            )
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
    cluster, before = _asked_before(recipe, arguments)
    model = settings_of(recipe)
    defaults = cluster.model_dump() | _defaults(recipe, before, arguments) | _StudyFlags().model_dump()
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


def _predict(arguments: list[str]) -> int:
    """Apply a run's trained model to new data. Returns the exit code, which is 1 if a sample failed."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit(
            "usage: nbgpu predict RUN_FOLDER --data NEW [--out FOLDER] [flags], and nbgpu predict RUN_FOLDER --help"
        )
    folder, *rest = arguments
    _, config = runs.read_settings(Path(folder).expanduser())
    model = type(config)
    values = flags.parse(
        [PredictConfig, ClusterConfig, model],
        rest,
        prog=f"nbgpu predict {folder}",
        # The machine of the training need not be this one.
        defaults=config.model_dump() | {n: f.default for n, f in PredictConfig.model_fields.items()},
        hidden=[
            n for n in model.model_fields if n not in (*model.AT_PREDICTION, *PredictConfig.model_fields)
        ],
        description=f"{flags.summary(PredictConfig)} It writes {model.PREDICTS}." if model.PREDICTS else None,
    )
    of_prediction = {name: values.pop(name) for name in PredictConfig.model_fields}
    of_cluster = {name: values.pop(name) for name in ClusterConfig.model_fields}
    changed = {name: value for name, value in values.items() if value != getattr(config, name)}
    cluster, job = together(
        lambda: ClusterConfig.checked(**of_cluster),
        lambda: predicting.job_of(folder, PredictConfig.checked(**of_prediction), changed),
    )
    console = Console()
    with preloading.begun(cluster):
        data_check.require_new(job)
        with Cluster.with_config(cluster) as started, terminal_progress.shown(console) as show:
            console.print(started.describe())
            found = started.predict_with(job, show)
    console.print(str(found), highlight=False, soft_wrap=True)
    return 1 if found.failed else 0


def _characterize(arguments: list[str]) -> None:
    """Measure microstructures, and print what a person wants to know of them first."""
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not files and not {"--help", "-h"} & set(arguments):
        sys.exit("usage: nbgpu characterize FILE [FILE ...] [--out FOLDER] [flags], such as alloy.npy")
    values = flags.parse(
        [CharacterizeConfig, MicrostructureConfig],
        arguments[len(files) :],
        prog="nbgpu characterize FILE [FILE ...]",
        description=flags.summary(CharacterizeConfig),
        hidden=[
            n
            for n in MicrostructureConfig.model_fields
            if n not in (*MEASURING, *CharacterizeConfig.model_fields)
        ],
    )
    of_command = {name: values.pop(name) for name in CharacterizeConfig.model_fields}
    asked = CharacterizeConfig.checked(**of_command)
    job = characterizing.job_of(files, asked, values)
    characterizing.require(job)
    found = []
    for one, measurement in zip(characterizing.characterized(job), job.measurements, strict=True):
        found.append(one)
        print(f"{one.data}: {characterizing.written(measurement, job)}", flush=True)
    print("\n".join(["", *characterizing.table(found)]))
    if asked.against:
        lines = characterizing.table_of_differences(found)
        print("\n".join(["", f"mean absolute differences from {asked.against}", *lines]))


def _report(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit("usage: nbgpu report RUN_FOLDER, such as nbgpu_runs/20260101-120000-autoencoder-1f2e")
    # Drawing takes a second to import.
    from nbgpu.ui.run.snapshot import write_report
    from nbgpu.ui.run.stored import StoredRun

    folder = Path(arguments[0])
    try:
        print(write_report(StoredRun(folder)))
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: {error.strerror}. The report, metrics.csv and epochs.jsonl are written into the run's "
            "folder; copy it to where you may write"
        ) from None


def _stop(arguments: list[str]) -> None:
    names = [name for name in arguments if not name.startswith("-")]
    if (unknown := set(arguments) - {*names, "--all"}) or (names and "--all" in arguments):
        wrong = f"{', '.join(sorted(unknown))} is no flag. " if unknown else ""
        sys.exit(f"{wrong}usage: nbgpu stop [ID ...] or nbgpu stop --all. `nbgpu ps` lists the ids")
    ended = ps.stop(names, everything="--all" in arguments)
    print("\n".join(ended or ["nothing was left over"]))


def _doctor(arguments: list[str]) -> int:
    """Print the findings as they come. Returns the exit code, which is 1 if something does not work."""
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
    """Take `flag VALUE` out of the arguments."""
    if flag not in arguments:
        return arguments, None
    place = arguments.index(flag)
    if place + 1 == len(arguments):
        sys.exit(f"{flag} needs {what}")
    return arguments[:place] + arguments[place + 2 :], arguments[place + 1]


def _asked_before(
    recipe: str, arguments: Sequence[str], cluster: ClusterConfig | None = None
) -> tuple[ClusterConfig, dict[str, Any]]:
    """(the settings of the cluster, what is asked for of the training) by `--config` and `--preset`, which
    are read before the other flags.

    Args:
        cluster: the settings of the cluster where there is no file; None for the defaults.
    """
    presets = flags.values_of(arguments, "preset")
    if None in presets or len(presets) > 1:
        raise ConfigError("--preset needs one name, such as demo; `nbgpu recipes` lists them")
    before: dict[str, Any] = {"preset": presets[0]} if presets else {}
    found = _from_file(arguments, recipe)
    if found is None:
        return cluster or ClusterConfig(), before
    cluster, train = found
    return cluster, before | {name: value for name, value in train.given.items() if name != "recipe"}


def _defaults(recipe: str, before: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The defaults of the training's flags beside what is asked for before them, and beside those among them
    that decide about defaults."""
    decide = {name: flags.values_of(arguments, name) for name in deciding(settings_of(recipe))}
    return settings_beside(
        recipe, {**before, **{name: values[-1] for name, values in decide.items() if values and values[-1]}}
    )


def _from_file(arguments: Sequence[str], recipe: str) -> tuple[ClusterConfig, TrainConfig] | None:
    """The settings in the file of `--config`, which are the defaults of the other flags; None without that
    flag. What a file of another tool has beside them is printed."""
    file, environment = _file(arguments, "config"), _file(arguments, "environment_file")
    if environment and not (file and convert.is_foreign(file)):
        raise ConfigError(
            "--environment-file is the environment.json of MONAI's tutorial 3d_ldm, and belongs to its --config config.json"
        )
    if file is None:
        return None
    if not convert.is_foreign(file):
        return read_toml(file, recipe=recipe)
    data, network = (
        next(iter(flags.values_of(arguments, name)), None) or "" for name in ("data", "perceptual_network")
    )
    converted = convert.convert([file, *([environment] if environment else [])], data, network)
    if converted.recipe != recipe:
        raise ConfigError(
            f"{file} is for the recipe {converted.recipe}: nbgpu train {converted.recipe} --config {file}"
        )
    print("\n".join(converted.notes()), file=sys.stderr)
    return ClusterConfig(), converted.config()


def _file(arguments: Sequence[str], name: str) -> Path | None:
    """The file that a flag names; it is read before the other flags."""
    files, flag = flags.values_of(arguments, name), f"--{name.replace('_', '-')}"
    if None in files:
        raise ConfigError(
            f"{flag} needs a file, such as {'run.toml' if name == 'config' else 'environment.json'}"
        )
    if len(files) > 1:
        raise ConfigError(f"{flag} stands there {len(files)} times. Give one file, and other values as flags")
    return Path(str(files[0])) if files else None


def _convert(arguments: list[str]) -> None:
    """Print settings that come from another tool's files, or write them into a file."""
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not files and not {"--help", "-h"} & {*arguments}:
        sys.exit("usage: nbgpu convert config.json [environment.json] [--out run.toml] [--data FOLDER]")
    values = flags.parse([_ConvertFlags], arguments[len(files) :], prog="nbgpu convert FILE [FILE ...]")
    asked = _ConvertFlags(**values)
    found = convert.convert([Path(file) for file in files], asked.data, asked.perceptual_network)
    if not asked.out:
        print(found.to_toml(), end="")
        return
    convert.write(found, Path(asked.out))
    print("\n".join([*found.notes(), f"nbgpu train {found.recipe} --config {asked.out}"]))


def _require_search(config: TrainConfig, arguments: Sequence[str]) -> None:
    """ConfigError where these flags leave nothing for --find-batch-size to find."""
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


if __name__ == "__main__":
    main()
