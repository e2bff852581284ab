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
"""For each format, the file that starts the job, which has a template of the same name, and the command to
which the file is given."""
_IN_FOLDER = ("torchrun", "slurm")
"""The formats that write the program's files beside that file. In the other formats the file contains them,
and they are mounted in a container."""


@dataclass(frozen=True)
class Exported:
    """The files of an export. Printed, it is a list of them with the next command to run."""

    folder: Path
    files: Sequence[str]
    next: str
    """The command that starts the job, to be run in the folder."""
    notes: Sequence[str] = ()
    """Sentences for the user, about parts that do not carry over and paths that must exist."""

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
        ConfigError: the folder is not that of a run, or the run cannot be exported in this format; the
            message has every reason.
        RunError: the files cannot be written, or are there already.
    """
    kind, settings = checked(to, values)
    cluster, config = runs.read_settings(run_folder)
    config = runs.with_changes(config, run_folder)
    copy = run_folder / Path(config.recipe).name
    if config.recipe.endswith(".py") and copy.is_file():
        # The recipe's own file may have been edited since the run, but not the copy in the run's folder.
        config = config.changed(recipe=str(copy))
    try:
        devices = runs.read_info(run_folder).devices
        world_size, on_gpus = len(devices), any(device.kind == "cuda" for device in devices)
    except FileNotFoundError:
        world_size, on_gpus = cluster.ranks or 1, cluster.gpus != "none"
    job = program.of_run(cluster, config, world_size, on_gpus, settings, in_container=kind not in _IN_FOLDER)
    return _write(kind, job, settings)


def export_notebook(path: Path, to: str, values: Mapping[str, Any]) -> Exported:
    """Export the distributed cells of a notebook, as a script.

    Raises:
        ConfigError: the file is not a notebook, it has no distributed cell, or it cannot be exported in this
            format.
        RunError: the files cannot be written, or are there already.
    """
    kind, settings = checked(to, values)
    script = notebook.build_script(path)
    job = program.script_program(path.stem, script.text, settings, script.notes)
    return _write(kind, job, settings)


def export_path(path: Path, to: str, values: Mapping[str, Any]) -> Exported:
    """Export a run's folder or a notebook."""
    if path.suffix == ".ipynb":
        return export_notebook(path, to, values)
    if not (path / names.SETTINGS).is_file():
        checked(to, values)
        raise ConfigError(f"{path} is neither a run's folder nor a notebook (.ipynb)")
    return of_run(path, to, values)


def _write(kind: Format, job: Program, settings: ExportConfig) -> Exported:
    """Write the files of a program in one format into its folder; a file that exists is never overwritten.

    Raises:
        RunError: the folder has one of the files, or cannot be written.
    """
    folder = Path(settings.out or job.name).expanduser().absolute()
    starting, command = _START[kind]
    files = {starting: filled(starting, job, settings), **(job.files if kind in _IN_FOLDER else {})}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if existing := [name for name in files if (folder / name).exists()]:
            raise RunError(
                f"{folder} has {', '.join(existing)} already. Nothing was written; give another folder as out"
            )
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"the export cannot be written to {folder}: {error.strerror}") from None
    notes = list(job.notes)
    if missing := [word for word in ("IMAGE", "CLAIM") if any(f": {word}\n" in t for t in files.values())]:
        notes.append(
            f"Change {' and '.join(missing)} in {starting}: the container image, and the volume for runs"
        )
    return Exported(folder, list(files), f"{command} {starting}", notes)


def filled(template: str, job: Program, settings: ExportConfig) -> str:
    """Return the text of a template in `templates/` with its values, which are written as `@{...}`."""
    # Imported here, because few notebooks export anything.
    from jinja2 import Environment, PackageLoader, StrictUndefined

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
    cpus = settings.cpus_per_node or 4 * job.ranks_per_node
    arguments = [f"{IN_CONTAINER}/{word}" if word in job.files else word for word in job.arguments]
    return environment.get_template(template).render(
        program=job,
        settings=settings,
        cpus=cpus,
        threads=max(1, cpus // job.ranks_per_node),
        command=shlex.join(job.arguments),
        options={
            "mem": settings.memory,
            "time": settings.time_limit,
            "partition": settings.partition,
            "account": settings.account,
        },
        arguments_in_container=[json.dumps(word) if word.startswith("-") else word for word in arguments],
        container_folder=IN_CONTAINER,
        container_runs=RUNS_IN_CONTAINER,
    )


def _indented(text: str, by: int) -> str:
    """Return the lines of a text, indented by so many spaces, except empty lines."""
    # A line of spaces is indented, too, because it may be a part of a string in the program.
    return textwrap.indent(text.removesuffix("\n"), " " * by, lambda line: line != "\n")
