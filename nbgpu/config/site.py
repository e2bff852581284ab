"""The defaults and limits that an administrator may set for all users of a host.

A file has the tables [defaults] and [limits]. A default applies if the user has not given the setting. Users
cannot change a limit, and a cluster that would exceed it is refused. Limits are an agreement among people who
share a machine, and not a lock: programs that use the GPUs without nbgpu are not stopped.
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
"""The limit of the total number of GPUs of all clusters of one person on this host."""
_DEFAULTS = (*ClusterConfig.FROM_SITE.values(), "runs_dir")
_TABLES = {"defaults": _DEFAULTS, "limits": (GPUS_PER_PERSON,)}


def most_gpus() -> int | None:
    """Return the largest number of GPUs that one person may have on this host; None for no limit. Within a
    Slurm job only Slurm's limits apply."""
    return None if os.environ.get("SLURM_JOB_ID") else site_file.read().limits.get(GPUS_PER_PERSON)


def require_within_limit(num_wanted: int, num_others: int = 0, others: str = "") -> None:
    """Refuse more GPUs than one person may have on this host.

    Args:
        num_wanted: the number of GPUs of the cluster that is to start.
        num_others: the number of GPUs of this person's other clusters.
        others: a description of these clusters for the message.

    Raises:
        ConfigError: the sum exceeds the limit of the site's file.
    """
    limit = most_gpus()
    if limit is None or num_wanted + num_others <= limit:
        return
    others_text = f", and your other clusters have {num_others} ({others})" if num_others else ""
    raise ConfigError(
        f"the cluster would have {num_wanted} GPU(s){others_text}: one person may have {limit} on this host "
        f"({GPUS_PER_PERSON} in {site_file.read().path}). Take fewer, or end a cluster with nbgpu stop"
    )


def in_words(site: SiteFile) -> str:
    """Return the rows of a file as text: "gpus='free:1', gpus_per_person=2"."""
    return ", ".join(f"{name}={value!r}" for name, value in {**site.defaults, **site.limits}.items())


def _checked(path: Path, tables: Mapping[str, Any]) -> SiteFile:
    """Return the defaults and limits of a file, converted to the types of the settings.

    Raises:
        ConfigError: with a line for each bad row.
    """
    defaults, limits = tables.get("defaults", {}), tables.get("limits", {})
    problems = list(_unknown_rows(tables))
    given: dict[str, Any] = {}
    if isinstance(defaults, dict):
        # A file may have defaults of settings that do not go together, such as `gpus` for the local launcher
        # beside another launcher. So the settings with such conditions are checked apart from the others.
        conditional = {name for rule in ClusterConfig.SITE_ONLY_WITH for name in rule.names}
        rows = {name: value for name, value in defaults.items() if name in ClusterConfig.FROM_SITE}
        for names in (rows.keys() - conditional, rows.keys() & conditional):
            try:
                given |= ClusterConfig.checked(**{name: rows[name] for name in rows if name in names}).given
            except ConfigError as error:
                problems += [f"[defaults] {line}" for line in str(error).splitlines()]
        # A list or table is replaced by the text that the setting holds; a number stays as it was written.
        given = {name: rows[name] if rows[name] == value else value for name, value in given.items()}
        if "runs_dir" in defaults:
            try:
                checked = LogSettings.checked(runs_dir=defaults["runs_dir"])
                # The path may depend on the user: '/scratch/$USER/runs', '~/runs'.
                given["runs_dir"] = str(Path(os.path.expandvars(checked.runs_dir)).expanduser())
            except ConfigError as error:
                problems.append(f"[defaults] {error}")
    limit = limits.get(GPUS_PER_PERSON) if isinstance(limits, dict) else None
    if limit is not None and (type(limit) is not int or limit < 1):
        problems.append(f"[limits] {GPUS_PER_PERSON} = {limit!r} is not valid. Give a whole number from 1 on")
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return SiteFile(path, given, {} if limit is None else {GPUS_PER_PERSON: limit})


def _unknown_rows(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each table or row that a site's file cannot have."""
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
