"""The folder of a training run, and the files in it that describe the run."""

from __future__ import annotations

import grp
import json
import logging
import os
import platform
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nbgpu.config import ClusterConfig, TrainConfig, own_file, read_toml, site_file, write_toml
from nbgpu.errors import ConfigError, RunError
from nbgpu.machine.devices import inventory
from nbgpu.machine.files import new_folder, write_whole
from nbgpu.protocol.records import FINAL_STATES, Chosen, RankFailure, RunInfo, RunState
from nbgpu.run_folder import lines, names, resume
from nbgpu.run_folder.settling import SettledConfig
from nbgpu.version import VERSION

_log = logging.getLogger("nbgpu.runs")

_PACKAGES = ("torch", "monai", "ipyparallel", "ipykernel", "plotly", "numpy")


def create(settled: SettledConfig, cluster: ClusterConfig) -> Path:
    """Make the folder of a new run, which only the user can enter, with run.toml and env.json in it.

    If the run may resume a checkpoint, resume.json names that checkpoint. If settings were left out and
    chosen by the data, chosen.json has the reasons; their values are in run.toml as if they had been given.

    Args:
        settled: the run's settings.
        cluster: the settings of the cluster.

    Raises:
        RunError: the folder cannot be made, and nothing of it is left.
    """
    config = settled.config
    for note in settled.beginning.notes:
        _log.warning(note)
    folder = new_folder(config.runs_dir, config.folder_title)
    runs_dir = folder.parent
    missing = [path for path in folder.parents if not path.exists()]
    try:
        folder.mkdir(parents=True, mode=0o700)
        write_toml(folder / names.SETTINGS, cluster, config)
        if own_file.is_file(config.recipe):
            # A rank that joins in the middle of the run uses the same code as the others, even if the file
            # was edited.
            shutil.copy(config.recipe, folder)
        if config.resume:
            settled.beginning.write(folder)
        if settled.chosen.words:
            (folder / names.CHOSEN).write_text(json.dumps(asdict(settled.chosen), indent=2) + "\n")
        (folder / names.ENVIRONMENT).write_text(json.dumps(environment(), indent=2) + "\n")
    except BaseException as error:
        # A part of a run's folder is of no use. It is removed, and so are the parent folders made for it.
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # a parent was not made, or has other content by now
            for path in missing:
                path.rmdir()
        if isinstance(error, OSError):
            raise RunError(
                f"the run's folder cannot be made in {runs_dir}: {error.strerror}. Nothing was started; runs_dir names another "
                "place"
            ) from None
        raise
    if others := who_may_rename(runs_dir):
        _log.warning(
            "%s may rename what is in runs_dir = %s, and so put something else in the place of a run's folder. What is not your own "
            "is not loaded from there; take a folder that only you can write to",
            others,
            runs_dir,
        )
    return folder


def read_settings(folder: Path) -> tuple[ClusterConfig, TrainConfig]:
    """Read the settings with which a run was started.

    Raises:
        ConfigError: the folder is no run's, or its settings cannot be read.
    """
    # run.toml has all settings, which the present defaults of the site must not change.
    with site_file.ignored():
        return read_toml(folder / names.SETTINGS)


def last_settings(runs_dir: Path, recipe: str) -> tuple[Path, TrainConfig] | None:
    """Return (folder, settings) of this user's newest run of a recipe whose settings this version can read;
    None if there is none."""
    folders = resume.run_folders(runs_dir.absolute(), recipe, "")
    for folder in sorted(folders, key=lambda f: (f / names.SETTINGS).stat().st_mtime, reverse=True):
        try:
            return folder, read_settings(folder)[1]
        except ConfigError:
            continue
    return None


def who_may_rename(folder: Path) -> str:
    """Return a phrase that names the other users who may rename or replace a folder or one of its parents;
    empty if nobody else may."""
    for path in (folder.resolve(), *folder.resolve().parents):
        status = path.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"the owner of {path} (uid {status.st_uid})"
        # In a folder with the sticky bit, such as /tmp, users can rename only their own files.
        if status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"every user of this machine ({path} has mode {stat.filemode(status.st_mode)})"
        if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
            return f"the group with gid {status.st_gid} ({path} has mode {stat.filemode(status.st_mode)})"
    return ""


def _is_private_group(gid: int) -> bool:
    """Return whether this user is the only member of a group, apart from root, as of the private group that
    many systems make for each user."""
    try:
        user, group, everyone = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid), pwd.getpwall()
        # The users of a directory service (SSSD, LDAP) are not all listed, and may have the same primary
        # group as a local user, such as `users`. Only a private group has its user's name.
        is_private = (group.gr_name, gid) == (user.pw_name, user.pw_gid)
        if not is_private or user.pw_name not in {one.pw_name for one in everyone}:
            return False
        members = {*group.gr_mem, *(one.pw_name for one in everyone if one.pw_gid == gid)}
        return members <= {"root", user.pw_name}
    except KeyError:  # the group or the user has no name
        return False


def require_own(path: Path) -> None:
    """Refuse a run's folder or file that another user may have put in its place, because its content decides
    which code is run and which files are deleted.

    Raises:
        RunError: the path is another user's, or is a link.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise RunError(f"{path} is a link, and not what the run has made. Nothing in it is used")
    if status.st_uid != os.geteuid():
        raise RunError(f"{path} belongs to another user (uid {status.st_uid}). Nothing in it is used")


def leave_outcome(folder: Path, rank: int, outcome: RunState | RankFailure | None) -> None:
    """Record how the training of a rank ended, for a notebook that attaches after the end.

    Args:
        folder: the run's folder.
        rank: the rank.
        outcome: the final state or the error; None removes the record, because the training goes on.
    """
    path = _outcome_path(folder, rank)
    if outcome is None:
        path.unlink(missing_ok=True)
        return
    fields = {"failure": asdict(outcome)} if isinstance(outcome, RankFailure) else {"state": outcome}
    write_whole(path, json.dumps(fields))


def outcome(folder: Path, rank: int) -> RunState | RankFailure | None:
    """Return how the training of a rank ended; None while it goes on, or where the rank was killed.

    Raises:
        RunError: the file with the outcome cannot be read.
    """
    path = _outcome_path(folder, rank)
    try:
        fields = lines.load(path)
    except FileNotFoundError:
        return None
    try:
        if "failure" in fields:
            return TypeAdapter(RankFailure).validate_python(fields["failure"])
        state: RunState = fields["state"]
        if state in FINAL_STATES:
            return state
    except (KeyError, TypeError, ValidationError):
        pass  # the error below is raised for all other content
    raise RunError(
        f"{path} is not what nbgpu writes. Take it away, and what the rank recorded in rank{rank}.jsonl counts"
    )


def world_size(folder: Path, otherwise: int) -> int:
    """Return the number of ranks of a run; `otherwise` if its ranks have not read their data yet.

    Raises:
        RunError: `run_info.json` cannot be read.
    """
    try:
        return read_info(folder).world_size
    except FileNotFoundError:
        return otherwise


def end_state(folder: Path, num_ranks: int) -> RunState | None:
    """Return the state in which a run ended, from the outcomes of all of its ranks; None while it goes on.

    Raises:
        RunError: the file of a rank cannot be read.
    """
    outcomes = [outcome(folder, rank) for rank in range(num_ranks)]
    if None in outcomes:  # a rank that was killed has no outcome, and the run may go on without it
        return None
    if any(isinstance(one, RankFailure) for one in outcomes):
        return "failed"
    return "finished" if set(outcomes) == {"finished"} else "stopped"


def read_chosen(folder: Path) -> Chosen:
    """Return the settings that the data of a run have chosen, with the reasons; no settings if all were
    given.

    Raises:
        RunError: `chosen.json` cannot be read.
    """
    path = folder / names.CHOSEN
    try:
        return TypeAdapter(Chosen).validate_python(lines.load(path))
    except FileNotFoundError:
        return Chosen()
    except (ValueError, TypeError):
        raise RunError(f"{path} is not what nbgpu writes. Take it away: the values are in run.toml") from None


def read_info(folder: Path) -> RunInfo:
    """Read `run_info.json` in a run's folder.

    Raises:
        FileNotFoundError: the file does not exist, because the ranks have not read their data yet.
        RunError: the file cannot be read.
    """
    fields = lines.load(folder / names.INFO)
    try:
        return RunInfo.from_json(fields)
    except ValueError as error:
        raise RunError(
            f"{folder}: {error}. Nothing can be shown of the run without it: put a copy of it back"
        ) from None


def note_change(folder: Path, step: int, settings: Mapping[str, Any]) -> None:
    """Record in `changes.jsonl` that a run goes on with other settings after a step. `run.toml` keeps the
    settings of the start."""
    line = json.dumps({"time_s": time.time(), "step": step, "set": dict(settings)})
    with (folder / names.CHANGES).open("a") as file:
        file.write(line + "\n")


def with_changes(config: TrainConfig, folder: Path) -> TrainConfig:
    """Return the present settings of a run: `config`, those of its start, with the changes in
    `changes.jsonl`. An unreadable line of that file is skipped with a warning.

    Raises:
        ConfigError: the file changes something that is no setting of this run, or to a value that is not
            valid.
        RunError: the file cannot be opened.
    """
    path = folder / names.CHANGES
    try:
        records = lines.load_lines(path)
    except FileNotFoundError:
        return config
    changes: dict[str, Any] = {}
    damaged = []
    for number, fields in enumerate(records, 1):
        if fields is not None and isinstance(fields.get("set"), dict):
            changes |= fields["set"]
        else:
            damaged.append(number)
    if damaged:
        _log.warning(
            "%s: settings that were changed there are shown as before", lines.passed_over(path, damaged)
        )
    try:
        return config.changed(**changes)
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"{path} holds a change that does not fit the run: {error}. Take its line out"
        ) from None


def _outcome_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.outcome.json"


def environment() -> dict[str, Any]:
    """Return what is needed to repeat a run: the versions of Python and packages, the GPUs, and the commit of
    the working folder, as `git describe` names it."""
    commit = None
    if git := shutil.which("git"):
        command = [git, "describe", "--always", "--dirty"]
        described = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = described.stdout.strip() if described.returncode == 0 else None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"nbgpu": VERSION, **{name: metadata.version(name) for name in _PACKAGES}},
        "gpus": [{"name": d.name, "uuid": d.uuid} for d in inventory()],
        "git": commit,
    }
