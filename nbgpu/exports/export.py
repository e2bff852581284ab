"""Write an export: a new folder with the files of one format."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbgpu.errors import ConfigError, RunError
from nbgpu.exports import notebook, program
from nbgpu.exports.program import IN_CONTAINER, RUNS_IN_CONTAINER, Program
from nbgpu.exports.settings import ExportConfig, Format, checked
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import names
from nbgpu.text.html import shown_as_html

_START: Mapping[Format, tuple[str, str]] = {
    "torchrun": ("torchrun.sh", "bash"),
    "slurm": ("job.sbatch", "sbatch"),
    "job": ("job.yaml", "kubectl apply -f"),
    "jobset": ("jobset.yaml", "kubectl apply -f"),
    "trainjob": ("trainjob.yaml", "kubectl apply -f"),
}
"""The file that starts an export, which has a template of the same name, and the command that takes it."""
_IN_FOLDER = ("torchrun", "slurm")
"""The formats whose program lies beside that file; in the others it is in a container, as a volume."""


@dataclass(frozen=True)
class Exported:
    """The files of an export. It prints as a list of them with the next command to run."""

    folder: Path
    files: Sequence[str]
    next: str
    """The command that starts it, in that folder."""
    notes: Sequence[str] = ()
    """Sentences that a person has to know: parts that do not carry over, and paths that must exist."""

    def __str__(self) -> str:
        listed = ", ".join(self.files)
        return "\n".join(
            [f"wrote {listed} to {self.folder}", *self.notes, f"cd {self.folder} && {self.next}"]
        )

    __repr__ = __str__
    _repr_html_ = shown_as_html


def of_run(run_folder: Path, to: str, values: Mapping[str, Any]) -> Exported:
    """Export the settings of a run.

    Raises:
        ConfigError: the folder is no run's, or the run cannot be exported in this format; every mistake is
            named.
        RunError: the files cannot be written, or are there already.
    """
    kind, settings = checked(to, values)
    cluster, config = runs.read_settings(run_folder)
    config = runs.with_changes(config, run_folder)
    copy = run_folder / Path(config.recipe).name
    if config.recipe.endswith(".py") and copy.is_file():
        # The run's copy: the file itself may have been edited since.
        config = config.changed(recipe=str(copy))
    try:
        devices = runs.read_info(run_folder).devices
        world_size, on_gpus = len(devices), any(device.kind == "cuda" for device in devices)
    except FileNotFoundError:
        world_size, on_gpus = cluster.ranks or 1, cluster.gpus != "none"
    made = program.of_run(cluster, config, world_size, on_gpus, settings, in_container=kind not in _IN_FOLDER)
    return _write(kind, made, settings)


def export_notebook(path: Path, to: str, values: Mapping[str, Any]) -> Exported:
    """Export the distributed cells of a notebook, as a script.

    Raises:
        ConfigError: the file is no notebook, it has no distributed cell, or it cannot be exported in this
            format.
        RunError: the files cannot be written, or are there already.
    """
    kind, settings = checked(to, values)
    script = notebook.script_of(path)
    made = program.script_program(path.stem, script.text, settings, script.notes)
    return _write(kind, made, settings)


def export_path(path: Path, to: str, values: Mapping[str, Any]) -> Exported:
    """Export a run's folder or a notebook."""
    if path.suffix == ".ipynb":
        return export_notebook(path, to, values)
    if not (path / names.SETTINGS).is_file():
        checked(to, values)
        raise ConfigError(f"{path} is neither a run's folder nor a notebook (.ipynb)")
    return of_run(path, to, values)


def _write(kind: Format, made: Program, settings: ExportConfig) -> Exported:
    """Write the files of a program in one format into its folder; a file that exists is never overwritten.

    Raises:
        RunError: the folder has one of the files, or cannot be written.
    """
    folder = Path(settings.out or made.name).expanduser().absolute()
    starting, command = _START[kind]
    files = {starting: filled(starting, made, settings), **(made.files if kind in _IN_FOLDER else {})}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := [name for name in files if (folder / name).exists()]:
            raise RunError(
                f"{folder} has {', '.join(there)} already. Nothing was written; give another folder as out"
            )
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"the export cannot be written to {folder}: {error.strerror}") from None
    notes = list(made.notes)
    if missing := [word for word in ("IMAGE", "CLAIM") if any(f": {word}\n" in t for t in files.values())]:
        notes.append(
            f"Change {' and '.join(missing)} in {starting}: the container image, and the volume for runs"
        )
    return Exported(folder, list(files), f"{command} {starting}", notes)


def filled(template: str, made: Program, settings: ExportConfig) -> str:
    """Return the text of a template in `templates/`, which has values in `@{...}`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # hardly any notebook exports anything

    environment = Environment(
        loader=PackageLoader("nbgpu.exports"),
        variable_start_string="@{",
        variable_end_string="}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["indent"] = _indented
    cpus = settings.cpus_per_node or 4 * made.ranks_per_node
    words = [f"{IN_CONTAINER}/{word}" if word in made.files else word for word in made.arguments]
    return environment.get_template(template).render(
        program=made,
        settings=settings,
        cpus=cpus,
        threads=max(1, cpus // made.ranks_per_node),
        command=shlex.join(made.arguments),
        options={
            "mem": settings.memory,
            "time": settings.time_limit,
            "partition": settings.partition,
            "account": settings.account,
        },
        arguments_in_container=[json.dumps(word) if word.startswith("-") else word for word in words],
        container_folder=IN_CONTAINER,
        container_runs=RUNS_IN_CONTAINER,
    )


def _indented(text: str, by: int) -> str:
    # A line of spaces may be a part of a string in the program, and keeps its own.
    return textwrap.indent(text.removesuffix("\n"), " " * by, lambda line: line != "\n")
