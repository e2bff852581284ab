"""The defaults and limits that an administrator may set for all users of a host.

A file has the tables [defaults] and [limits]. A default counts where a person has not given the setting. A
limit cannot be given by a person, and what exceeds it is refused. It is an agreement among people who share a
machine, and not a lock: a program that uses the GPUs without nbgpu is not held back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbgpu.config import site_file
from nbgpu.config.cluster import ClusterConfig
from nbgpu.config.site_file import SiteFile
from nbgpu.config.training import LogSettings
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean

GPUS_PER_PERSON = "gpus_per_person"
"""The limit of the number of GPUs that all clusters of one person on this host have together."""
_DEFAULTS = (*ClusterConfig.FROM_SITE.values(), "runs_dir")
_TABLES = {"defaults": _DEFAULTS, "limits": (GPUS_PER_PERSON,)}


def most_gpus() -> int | None:
    """Return the largest number of GPUs that one person may have on this host; None for any number. Within a
    Slurm job Slurm's own limits count instead."""
    return None if os.environ.get("SLURM_JOB_ID") else site_file.read().limits.get(GPUS_PER_PERSON)


def require_within_limit(num_wanted: int, num_others: int = 0, others: str = "") -> None:
    """Refuse more GPUs than one person may have on this host.

    Args:
        num_wanted: the number of GPUs that a cluster is to have.
        num_others: the number of GPUs that this person's other clusters have besides these.
        others: these clusters in words.

    Raises:
        ConfigError: it is more than the site's file allows.
    """
    most = most_gpus()
    if most is None or num_wanted + num_others <= most:
        return
    have = f", and your other clusters have {num_others} ({others})" if num_others else ""
    raise ConfigError(
        f"the cluster would have {num_wanted} GPU(s){have}: one person may have {most} on this host "
        f"({GPUS_PER_PERSON} in {site_file.read().path}). Take fewer, or end a cluster with nbgpu stop"
    )


def in_words(site: SiteFile) -> str:
    """The rows of a file: "gpus='free:1', gpus_per_person=2"."""
    return ", ".join(f"{name}={value!r}" for name, value in {**site.defaults, **site.limits}.items())


def _checked(path: Path, tables: Mapping[str, Any]) -> SiteFile:
    """Return the defaults and limits of a file, converted to the types of the settings.

    Raises:
        ConfigError: with a line for each bad row.
    """
    defaults, limits = tables.get("defaults", {}), tables.get("limits", {})
    problems = list(_odd_rows(tables))
    given: dict[str, Any] = {}
    if isinstance(defaults, dict):
        # What counts with one launcher alone may stand beside another one, for those who choose the first.
        alone = {name for rule in ClusterConfig.SITE_ONLY_WITH for name in rule.names}
        rows = {name: value for name, value in defaults.items() if name in ClusterConfig.FROM_SITE}
        for group in (rows.keys() - alone, rows.keys() & alone):
            try:
                given |= ClusterConfig.checked(**{name: rows[name] for name in rows if name in group}).given
            except ConfigError as error:
                problems += [f"[defaults] {line}" for line in str(error).splitlines()]
        # A list or a table becomes the text that the setting takes; a number stays as it was written.
        given = {name: rows[name] if rows[name] == value else value for name, value in given.items()}
        if "runs_dir" in defaults:
            try:
                checked = LogSettings.checked(runs_dir=defaults["runs_dir"])
                # Each user has a folder of their own: '/scratch/$USER/runs', '~/runs'.
                given["runs_dir"] = str(Path(os.path.expandvars(checked.runs_dir)).expanduser())
            except ConfigError as error:
                problems.append(f"[defaults] {error}")
    most = limits.get(GPUS_PER_PERSON) if isinstance(limits, dict) else None
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        problems.append(f"[limits] {GPUS_PER_PERSON} = {most!r} is not valid. Give a whole number from 1 on")
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return SiteFile(path, given, {} if most is None else {GPUS_PER_PERSON: most})


def _odd_rows(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each table and each row that the file may not have."""
    for table, rows in tables.items():
        if table not in _TABLES:
            yield f"[{table}] is no table of this file.{did_you_mean(table, _TABLES)} It may have [defaults] and [limits]"
        elif not isinstance(rows, dict):
            yield f"{table} must be a table: [{table}]"
        else:
            names = _TABLES[table]
            yield from (
                f"[{table}] {name} cannot be set for a site.{did_you_mean(name, names)} It may have: {', '.join(names)}"
                for name in rows
                if name not in names
            )


site_file.check = _checked
