"""The settings of an export: the machines on which the job runs, and its limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args

from pydantic import Field

from nbgpu.config.settings import Settings, control
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean

Format = Literal["torchrun", "slurm", "job", "jobset", "trainjob"]
"""The format of an export: for torchrun alone, for Slurm's sbatch, and for Kubernetes an indexed Job, a
JobSet or a TrainJob of Kubeflow Trainer."""
FORMATS: tuple[Format, ...] = get_args(Format)

_EVERY = {"nodes", "gpus_per_node", "ranks_per_node", "cpus_per_node", "max_restarts", "name", "out"}
_KUBERNETES = {"memory", "image", "claim", "shared_memory"}
USED: Mapping[Format, frozenset[str]] = {
    "torchrun": frozenset(_EVERY | {"min_nodes", "setup", "interface"}),
    "slurm": frozenset(
        _EVERY | {"memory", "time_limit", "warn_before_s", "partition", "account", "setup", "interface"}
    ),
    "job": frozenset(_EVERY | _KUBERNETES | {"time_limit"}),
    "jobset": frozenset(_EVERY | _KUBERNETES | {"queue"}),
    "trainjob": frozenset(_EVERY | _KUBERNETES | {"queue", "time_limit"}),
}
"""The settings that each format uses. Any other setting is refused."""

_KUBERNETES_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"


class ExportConfig(Settings):
    """Write the files with which a run, or a notebook's distributed cells, run elsewhere."""

    nodes: int = Field(1, ge=1, le=10_000, json_schema_extra=control("Place", "Machines"))
    """machines"""
    min_nodes: int | None = Field(
        None, ge=1, le=10_000, json_schema_extra=control("Place", "Fewest machines")
    )
    """machines with which training goes on where others are lost (torchrun's --nnodes=MIN:MAX); the samples
    of a step stay as many. Left out: all of them are needed"""
    gpus_per_node: int | None = Field(None, ge=0, le=64, json_schema_extra=control("Place", "GPUs each"))
    """GPUs of each machine; 0 for CPU ranks; left out: as the run had"""
    ranks_per_node: int | None = Field(
        None, ge=1, le=512, json_schema_extra=control("Place", "CPU ranks each")
    )
    """CPU ranks of each machine; with GPUs there is one for each"""
    cpus_per_node: int | None = Field(
        None, ge=1, le=4096, json_schema_extra=control("Place", "CPU cores each")
    )
    """CPU cores of each machine; left out: 4 for each rank"""
    memory: str = Field("", json_schema_extra=control("Place", "Memory each"))
    """memory of each machine, such as '128G'; empty for the site's default"""
    time_limit: str = Field("", json_schema_extra=control("Place", "Time limit"))
    """the longest time, as [DAYS-]HH:MM:SS; empty for the site's default"""
    warn_before_s: int = Field(
        120, ge=10, le=86_400, json_schema_extra=control("Place", "Warning before limit", unit="s")
    )
    """seconds before the time limit at which the run writes a checkpoint and the job queues again"""
    partition: str = Field("", pattern=r"^[\w.,-]*$", json_schema_extra=control("Place", "Partition"))
    """Slurm's partition, or several"""
    account: str = Field("", pattern=r"^[\w.-]*$", json_schema_extra=control("Place", "Account"))
    """Slurm's account"""
    setup: str = Field("", json_schema_extra=control("Place", "Shell line before"))
    """shell line before training, such as 'module load cuda && source .venv/bin/activate'"""
    interface: str = Field(
        "", pattern=r"^[\w.@-]{0,15}$", json_schema_extra=control("Place", "Network interface")
    )
    """network interface between the machines, such as ib0; empty for the one that faces the first machine"""
    image: str = Field("", pattern=r"^\S*$", json_schema_extra=control("Place", "Container image"))
    """container image with nbgpu in it"""
    claim: str = Field("", json_schema_extra=control("Place", "Volume for runs"))
    """PersistentVolumeClaim with space for runs, which is mounted at /runs"""
    queue: str = Field("", json_schema_extra=control("Place", "Queue"))
    """Kueue's queue"""
    shared_memory: str = Field("", json_schema_extra=control("Place", "Shared memory"))
    """size of /dev/shm, through which data workers pass samples; empty for half of memory"""
    max_restarts: int = Field(3, ge=0, le=1000, json_schema_extra=control("Place", "Restarts"))
    """how often torchrun starts failed ranks again"""
    name: str = Field("", json_schema_extra=control("Place", "Job's name"))
    """the job's name, which also names its run; left out: made of the recipe and four digits"""
    out: str = Field("", json_schema_extra=control("Place", "Folder for the files"))
    """new folder for the files; left out: the job's name"""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value, or pair of values, that is not valid though its type is."""
        if self.name and not re.fullmatch(_KUBERNETES_NAME, self.name):
            yield (
                f"name = {self.name!r}: give at most 40 small letters, digits and hyphens, with a letter first and no "
                "hyphen last, as Kubernetes takes them"
            )
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            yield f"min_nodes = {self.min_nodes} is more than nodes = {self.nodes}"
        if self.gpus_per_node and self.ranks_per_node not in (None, self.gpus_per_node):
            yield "ranks_per_node is for CPU ranks (gpus_per_node = 0): there is one rank for each GPU"
        for field in ("memory", "shared_memory"):
            text = getattr(self, field)
            if text and not re.fullmatch(r"[1-9]\d*[KMGT]", text):
                yield f"{field} = {text!r}: give a whole number and K, M, G or T, such as '128G'"
        if self.time_limit and not re.fullmatch(r"(\d+-)?\d{1,4}:[0-5]\d:[0-5]\d", self.time_limit):
            yield f"time_limit = {self.time_limit!r}: give [DAYS-]HH:MM:SS, such as '24:00:00'"
        for field in ("image", "claim", "queue", "setup"):
            if re.search(r"[\n\r]", getattr(self, field)):
                yield f"{field} must be one line"
        for field in ("claim", "queue"):
            text = getattr(self, field)
            if text and not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", text):
                yield f"{field} = {text!r}: Kubernetes' names have small letters, digits, hyphens and dots, and begin and end with a letter or digit"

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds; 0 where there is none."""
        if not self.time_limit:
            return 0
        days, _, clock = self.time_limit.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def checked(to: str, values: Mapping[str, Any]) -> tuple[Format, ExportConfig]:
    """Validate the format and the settings of an export, and return them.

    Args:
        to: the format.
        values: the values of the settings by name.

    Raises:
        ConfigError: there is no such format, a value is not valid, or the format does not use a setting; the
            message has every problem.
    """
    problems: list[str] = []
    if to not in FORMATS:
        problems.append(
            f"there is no export to {to!r}.{did_you_mean(to, FORMATS)} There are: {', '.join(FORMATS)}"
        )
    settings = None
    try:
        settings = ExportConfig.checked(**values)
    except ConfigError as error:
        problems.append(str(error))
    kind = cast(Format, to)
    if to in FORMATS:
        given = {name for name, value in values.items() if value not in ("", None)}
        for name in sorted(given & ExportConfig.model_fields.keys() - USED[kind]):
            others = ", ".join(other for other in FORMATS if name in USED[other])
            problems.append(f"{name}: an export to {to} has no place for it; {others} can take it")
        if (
            settings is not None
            and "warn_before_s" in USED[kind]
            and 0 < settings.time_limit_s <= settings.warn_before_s
        ):
            problems.append(
                f"time_limit = {settings.time_limit!r} is not longer than warn_before_s = {settings.warn_before_s}"
            )
    if problems or settings is None:
        raise ConfigError("\n".join(problems))
    return kind, settings
