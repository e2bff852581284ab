"""The commands on runs, files and microstructures: `predict`, `result`, `report`, `export`, `convert`,
`characterize`."""

from __future__ import annotations

import itertools
from pathlib import Path

from nbgpu import ui
from nbgpu.cli.asking import cluster_of, general_help
from nbgpu.cli.catalogue import UsageError
from nbgpu.cli.command_flags import ConvertFlags, ExportFlags
from nbgpu.client.cluster.cluster import cluster_with
from nbgpu.client.engines import preloading
from nbgpu.client.host import gpu_choice
from nbgpu.client.runs import characterizing, data_check, predicting
from nbgpu.config import ClusterConfig, flags
from nbgpu.config.characterization import MEASURING, CharacterizeConfig
from nbgpu.config.conditions import field_defaults
from nbgpu.config.prediction import PredictConfig
from nbgpu.config.settings import together
from nbgpu.conversion import convert as conversion
from nbgpu.errors import RunError
from nbgpu.exports import export as exports
from nbgpu.exports.settings import ExportConfig
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.run_folder import folder as runs
from nbgpu.text.console import CommandConsole, say
from nbgpu.ui.prediction import terminal as terminal_progress
from nbgpu.ui.run import terminal

_MAIN_FLAGS_OF_EXPORT = (
    *("to", "nodes", "gpus_per_node", "time_limit", "memory"),
    *("partition", "image", "claim", "out"),
)
_MAIN_FLAGS_OF_PREDICT = (
    *("data", "out", "checkpoint", "max_samples", "skip_bad"),
    *("gpus", "ranks", "batch_size", "amp"),
)
"""The flags that `--help` lists; `--help-all` lists all."""


def predict(arguments: list[str]) -> int:
    """Apply a run's trained model to new data. Returns the exit code, which is 1 if a sample failed."""
    general_help("predict", arguments, [PredictConfig, ClusterConfig], first=_MAIN_FLAGS_OF_PREDICT)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "usage: nbgpu predict RUN_FOLDER --data NEW [--out FOLDER] [flags], and nbgpu predict RUN_FOLDER --help"
        )
    folder, *rest = arguments
    _, config = runs.read_settings(Path(folder).expanduser())
    model = type(config)
    values = flags.parse(
        [PredictConfig, ClusterConfig, model],
        rest,
        prog=f"nbgpu predict {folder}",
        # The settings of the training's cluster are not defaults, because its hosts may not be this one.
        defaults=config.model_dump() | field_defaults(PredictConfig),
        hidden=[
            n for n in model.model_fields if n not in (*model.AT_PREDICTION, *PredictConfig.model_fields)
        ],
        description=f"{flags.summary(PredictConfig)} It writes {model.PREDICTS}." if model.PREDICTS else None,
        first=_MAIN_FLAGS_OF_PREDICT,
    )
    predict_values = {name: values.pop(name) for name in PredictConfig.model_fields}
    cluster_values = {name: values.pop(name) for name in ClusterConfig.model_fields}
    changed = {name: value for name, value in values.items() if value != getattr(config, name)}
    cluster, job = together(
        lambda: cluster_of(ClusterConfig.checked(), rest, cluster_values),
        lambda: predicting.job_of(folder, PredictConfig.checked(**predict_values), changed),
    )
    console = CommandConsole()
    with preloading.begun(gpu_choice.choose, cluster):
        data_check.require_good_new_data(job)
        with cluster_with(cluster) as started, terminal_progress.shown(console) as show:
            say(console, started.describe())
            predictions = started.parts.runs.predict_with(job, show)
    say(console, str(predictions))
    return 1 if predictions.failed else 0


def result(arguments: list[str]) -> None:
    """Compute the result of a run that ended without one, on the run's number of ranks."""
    general_help("result", arguments, [ClusterConfig], first=("gpus", "launcher"))
    if not arguments or arguments[0].startswith("-"):
        raise UsageError("usage: nbgpu result RUN_FOLDER [flags of a cluster], and nbgpu result --help")
    folder, rest = Path(arguments[0]).expanduser(), arguments[1:]
    runs.read_settings(folder)
    with_ranks = ClusterConfig.checked(ranks=runs.read_info(folder).world_size)
    values = flags.parse(
        [ClusterConfig], rest, prog=f"nbgpu result {folder}", defaults=with_ranks.model_dump()
    )
    console = CommandConsole()
    ui.connect()
    with cluster_with(cluster_of(with_ranks, rest, values)) as started:
        say(console, started.describe())
        run = started.work_out_result(folder)
        terminal.follow(run, console)
        run.wait(progress=False)
        say(console, f"nbgpu report {folder} writes the page with the result")


def report(arguments: list[str]) -> None:
    """Write the report of a run into its folder, and print the path."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(
            "usage: nbgpu report RUN_FOLDER, such as nbgpu_runs/20260101-120000-autoencoder-1f2e"
        )
    # Imported here, because the modules for drawing take a second to import.
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


def convert(arguments: list[str]) -> None:
    """Convert another tool's configuration files to settings, and print them or write them into a file."""
    general_help("convert", arguments, [ConvertFlags])
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not files:
        raise UsageError(
            "usage: nbgpu convert config.json [environment.json] [--out run.toml] [--data FOLDER]"
        )
    values = flags.parse([ConvertFlags], arguments[len(files) :], prog="nbgpu convert FILE [FILE ...]")
    given = ConvertFlags(**values)
    converted = conversion.convert([Path(file) for file in files], given.data, given.perceptual_network)
    if not given.out:
        print(converted.to_toml(), end="")
        return
    conversion.write(converted, Path(given.out))
    print("\n".join([*converted.notes(), f"nbgpu train {converted.recipe} --config {given.out}"]))


def characterize(arguments: list[str]) -> None:
    """Measure the descriptors of microstructures, and print a table of the most important numbers."""
    hidden = [
        n
        for n in MicrostructureConfig.model_fields
        if n not in (*MEASURING, *CharacterizeConfig.model_fields)
    ]
    general_help("characterize", arguments, [CharacterizeConfig, MicrostructureConfig], hidden=hidden)
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not files:
        raise UsageError(
            "usage: nbgpu characterize FILE [FILE ...] [--out FOLDER] [flags], such as alloy.npy"
        )
    values = flags.parse(
        [CharacterizeConfig, MicrostructureConfig],
        arguments[len(files) :],
        prog="nbgpu characterize FILE [FILE ...]",
        description=flags.summary(CharacterizeConfig),
        hidden=hidden,
    )
    config = CharacterizeConfig.checked(
        **{name: values.pop(name) for name in CharacterizeConfig.model_fields}
    )
    job = characterizing.job_of(files, config, values)
    characterizing.require(job)
    results = []
    for result, measurement in zip(characterizing.characterized(job), job.measurements, strict=True):
        results.append(result)
        print(f"{result.data}: {characterizing.written(measurement, job)}", flush=True)
    print("\n".join(["", *characterizing.table(results)]))
    if config.against:
        lines = characterizing.table_of_differences(results)
        print("\n".join(["", f"mean absolute differences from {config.against}", *lines]))


def export(arguments: list[str]) -> None:
    """Write files with which a run or a notebook's distributed cells can run elsewhere."""
    general_help("export", arguments, [ExportFlags, ExportConfig], first=_MAIN_FLAGS_OF_EXPORT)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            "usage: nbgpu export RUN_OR_NOTEBOOK --to torchrun|slurm|job|jobset|trainjob [flags], and nbgpu export --help"
        )
    source, *rest = arguments
    values = flags.parse(
        [ExportFlags, ExportConfig],
        rest,
        prog=f"nbgpu export {source}",
        description=flags.summary(ExportConfig),
        first=_MAIN_FLAGS_OF_EXPORT,
    )
    given = {name: values[name] for name in flags.given(rest, ExportConfig.model_fields)}
    print(exports.export_path(Path(source).expanduser(), values["to"], given))
