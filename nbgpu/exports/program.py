"""The program that an exported job starts on every rank: training with the settings of a run, or the script
of a notebook."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from nbgpu.config import ClusterConfig, TrainConfig, own_file
from nbgpu.config.settings import paths_to_read
from nbgpu.errors import ConfigError
from nbgpu.exports.settings import ExportConfig
from nbgpu.text.ranks import count_of_ranks

IN_CONTAINER = "/run/nbgpu"
"""The folder of the program's files in a container."""
RUNS_IN_CONTAINER = "/runs"


@dataclass(frozen=True)
class Program:
    """A program for torchrun, and where it runs."""

    title: str
    """The program as a phrase, such as 'the notebook lesson'."""
    name: str
    """The job's name."""
    files: Mapping[str, str]
    """The texts of the program's files by name."""
    arguments: Sequence[str]
    """The command line after torchrun's options. Names of `files` are relative to the job's folder."""
    ranks_per_node: int
    gpus_per_node: int
    notes: Sequence[str] = ()
    """Sentences for the user, about consequences and steps that remain."""

    @property
    def file_name(self) -> str:
        """The name of the first file, with the settings or the script."""
        return next(iter(self.files))


def of_run(
    cluster: ClusterConfig,
    config: TrainConfig,
    world_size: int,
    on_gpus: bool,
    settings: ExportConfig,
    in_container: bool,
) -> Program:
    """Return the program that trains with the settings of a run.

    Args:
        cluster: the settings of the run's cluster.
        config: the settings of the run.
        world_size: the number of ranks of the run.
        on_gpus: whether these ranks had GPUs.
        settings: the settings of the export.
        in_container: whether the program runs in containers, which have other paths.

    Raises:
        ConfigError: the run cannot be exported with these settings; the message has every reason.
    """
    problems = []
    if cluster.simulated:
        problems.append(f"the run has a {cluster.simulated}, which only nbgpu's own ranks have")
    per_node, gpus = ranks_and_gpus_per_node(settings, world_size, on_gpus)
    name = settings.name or f"{job_name(config.run_name or config.title)}-{secrets.token_hex(2)}"
    notes = []
    runs_dir = RUNS_IN_CONTAINER if in_container else str(Path(config.runs_dir).expanduser().absolute())
    # A job that is started again resumes its newest checkpoint, which it finds by the name of its run.
    changes: dict[str, object] = {"resume": "auto", "run_name": name, "runs_dir": runs_dir}
    for setting in type(config).model_fields:
        if setting == "resume":
            continue
        paths = paths_to_read(config, setting)
        if paths and in_container:
            notes.append(f"{setting} = {getattr(config, setting)} must be there in the container")
        elif paths:
            changes[setting] = ",".join(str(path.absolute()) for path in paths)
    if settings.min_nodes is not None:
        # If torchrun goes on with fewer machines, a step must keep its number of samples.
        num_samples = config.samples_per_step(per_node * settings.nodes)
        for nodes in range(settings.min_nodes, settings.nodes):
            if num_samples % (per_node * nodes * config.accumulate):
                problems.append(
                    f"min_nodes = {settings.min_nodes}: the {num_samples} samples of a step cannot be divided among "
                    f"{per_node * nodes} ranks. Choose another batch_size, or other numbers of machines"
                )
                break
        changes["global_batch_size"] = num_samples
    files = {}
    if own_file.is_file(config.recipe):
        path = Path(config.recipe).expanduser()
        files[path.name] = own_file.read_text(path)
        changes["recipe"] = f"{IN_CONTAINER}/{path.name}" if in_container else f"./{path.name}"
    if problems:
        raise ConfigError("\n".join(problems))
    cluster_table = cluster.model_dump(mode="json", exclude_none=True, exclude=set(_ONLY_IN_NOTEBOOK))
    cluster_table["gpus"] = "all" if gpus else "none"
    train_table = config.model_dump(mode="json", exclude_none=True) | changes
    if "global_batch_size" in changes:
        train_table.pop("batch_size", None)
    toml = tomli_w.dumps({"cluster": cluster_table, "train": train_table})
    files = {"run.toml": toml, **files}
    arguments = ("-m", "nbgpu.engine.train", "run.toml")
    return Program(f"the run {name}", name, files, arguments, per_node, gpus, notes)


_ONLY_IN_NOTEBOOK = (
    *("ranks", "threads_per_rank", "wait", "share_gpus", "keep", "release_after_s", "save_on_release"),
    *("launcher", "hosts", "nodes", "gpus_per_node", "interface", "launcher_options", "setup"),
    *("spare", "save_before_time_limit"),
)
"""Settings of the notebook's cluster that do not apply to the job."""


def script_program(title: str, script: str, settings: ExportConfig, notes: Sequence[str]) -> Program:
    """Return the program that runs a script: on GPUs if their number is given, else on two CPU ranks for each
    machine."""
    per_node, gpus = ranks_and_gpus_per_node(
        settings, 2 * settings.nodes, on_gpus=bool(settings.gpus_per_node)
    )
    name = settings.name or f"{job_name(title)}-{secrets.token_hex(2)}"
    return Program(f"the notebook {title}", name, {"cells.py": script}, ("cells.py",), per_node, gpus, notes)


def ranks_and_gpus_per_node(settings: ExportConfig, world_size: int, on_gpus: bool) -> tuple[int, int]:
    """Return (the number of ranks, the number of GPUs) of each machine. If the settings have neither, the
    ranks of the run are divided among the machines.

    Args:
        settings: the settings of the export.
        world_size: the number of ranks of the run.
        on_gpus: whether these ranks had GPUs.

    Raises:
        ConfigError: the ranks cannot be divided evenly, or `ranks_per_node` is given for a run with GPUs.
    """
    gpus, ranks = settings.gpus_per_node, settings.ranks_per_node
    if gpus:
        return gpus, gpus
    if gpus is None and ranks is not None and on_gpus:
        raise ConfigError("ranks_per_node is for CPU ranks, and the run had GPUs: give gpus_per_node")
    if ranks is not None:
        return ranks, 0
    share, left_over = divmod(world_size, settings.nodes)
    if left_over or not share:
        setting = "gpus_per_node" if on_gpus and gpus is None else "ranks_per_node"
        raise ConfigError(
            f"the run had {count_of_ranks(world_size)}, which nodes = {settings.nodes} machines cannot share evenly: give "
            f"{setting}, or another number of nodes"
        )
    return share, share if on_gpus and gpus is None else 0


def job_name(text: str) -> str:
    """Return a text as a name that Slurm and Kubernetes accept."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^(?=[^a-z])", "n", name)[:30].strip("-") or "run"
