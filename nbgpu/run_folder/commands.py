"""Requests to a running run: lines of `commands.jsonl`, which rank 0 reads."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from nbgpu.errors import RunError
from nbgpu.protocol.records import Command
from nbgpu.run_folder import lines, names

_log = logging.getLogger("nbgpu.telemetry")

COMMANDS = "commands.jsonl"


def send_command(folder: Path, command: Command, cluster_folder: Path | None = None, why: str = "") -> None:
    """Ask a run to pause, go on or stop: one line in `commands.jsonl`, which rank 0 watches.

    A file and not a socket, because it works the same for a run that torchrun started, is protected like the
    run's folder, and stays as a record of the requests and their times.

    Args:
        folder: the run's folder.
        command: the command.
        cluster_folder: the cluster's folder, where the line is written if the run's folder is gone, or its
            disk is full or read-only; None for no such second place.
        why: the reason for a command that no person has sent, as a sentence for the run's record.

    Raises:
        OSError: neither folder can be written.
    """
    _send(folder, {"command": command, **({"why": why} if why else {})}, cluster_folder)


def send_settings(folder: Path, values: Mapping[str, Any], cluster_folder: Path | None = None) -> None:
    """Ask a run to go on with other settings, by one line in `commands.jsonl`.

    Args:
        folder: the run's folder.
        values: the new values as JSON, by the name of the setting.
        cluster_folder: the cluster's folder, where the line is written if the run's folder cannot be.

    Raises:
        OSError: neither folder can be written.
    """
    _send(folder, {"set": dict(values)}, cluster_folder)


def pass_over_earlier_requests(folder: Path) -> None:
    """Note that a run which had ended begins again, so that the requests before this line are ignored: also
    by a rank that replaces a lost one, and by a notebook that attaches later.

    Raises:
        OSError: the run's folder cannot be written.
    """
    _send(folder, {"begins_again": True}, None)


def _send(folder: Path, requests: dict[str, Any], cluster_folder: Path | None) -> None:
    """Append a request with the time to `commands.jsonl` in the run's folder, or to a file in the cluster's
    folder if the first cannot be written."""
    line = json.dumps({"time_s": time.time(), **requests}).encode() + b"\n"
    try:
        _append_whole(folder / COMMANDS, line)
    except OSError:
        if cluster_folder is None:
            raise
        _append_whole(_fallback_path(cluster_folder, folder), line)


def _append_whole(path: Path, line: bytes) -> None:
    """Append a line, or leave the file as it was: half a line, on a full disk, would make the next line
    unreadable."""
    with path.open("ab", buffering=0) as file:
        size_bytes = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size_bytes)
            raise


def _fallback_path(cluster_folder: Path, folder: Path) -> Path:
    """Return the file in the cluster's folder for commands to a run whose own folder cannot be written."""
    return cluster_folder / f"{folder.name}.{COMMANDS}"


class CommandWatch:
    """Rank 0's view of the requests to a run: the newest command, and new settings.

    Args:
        folder: the run's folder.
        cluster_folder: the cluster's folder, which has the requests that the run's folder could not take.
        settings_since_s: the time, in seconds since the epoch, before which requests for settings are
            skipped, because the run begins with them. A pause or a stop counts whenever it was requested: a
            run stays paused until the person resumes it.
    """

    def __init__(
        self, folder: Path, cluster_folder: Path | None = None, settings_since_s: float = 0.0
    ) -> None:
        """Begin at the start of both files."""
        self._settings_since_s = settings_since_s
        self._changed_s = _times_of_changes(folder)
        """When each setting was changed last: earlier requests for it have had their effect."""
        paths = [folder / COMMANDS]
        if cluster_folder is not None:
            paths.append(_fallback_path(cluster_folder, folder))
        self._offsets_bytes = dict.fromkeys(paths, 0)
        self._settings: dict[str, Any] = {}
        self.why_stop = ""
        """The reason why the run is to stop, as a sentence; empty if a person stops it."""

    @property
    def has_settings(self) -> bool:
        """Whether `newest` has read settings that `take_settings` has not returned yet."""
        return bool(self._settings)

    def take_settings(self) -> dict[str, Any]:
        """Return the settings that `newest` has read since the last call; of a setting that was sent twice
        the newer value."""
        settings, self._settings = self._settings, {}
        return settings

    def newest(self) -> Command | None:
        """Read new requests and return the newest command, or None. A stop is never overruled by a later
        command."""
        requests = [fields for path in self._offsets_bytes for fields in self._read_new_requests(path)]
        # If the disk was full for a while, newer requests may be in either of the two files.
        requests.sort(key=_asked_s)
        beginnings = [number for number, fields in enumerate(requests) if "begins_again" in fields]
        if beginnings:
            requests = requests[beginnings[-1] + 1 :]
        for fields in requests:
            asked_s = _asked_s(fields)
            if asked_s >= self._settings_since_s:
                new = fields.get("set", {})
                self._settings |= {n: v for n, v in new.items() if asked_s > self._changed_s.get(n, 0.0)}
        commands: list[Command] = [fields["command"] for fields in requests if "command" in fields]
        if "stop" in commands:
            self.why_stop = next(str(f.get("why", "")) for f in requests if f.get("command") == "stop")
            return "stop"
        return commands[-1] if commands else None

    def _read_new_requests(self, path: Path) -> list[dict[str, Any]]:
        """Read the lines added to the file since the last call. A line without its end is left for later."""
        try:
            if path.stat().st_size <= self._offsets_bytes[path]:
                return []
            new, self._offsets_bytes[path] = lines.read_new_lines(path, self._offsets_bytes[path])
        except (OSError, RunError):  # no request was sent yet, or the folder is gone
            return []
        requests = [_request(line) for line in new]
        if None in requests:
            _log.warning(
                "%s of the new lines of %s are not what nbgpu writes, and were passed over",
                requests.count(None),
                path,
            )
        return [fields for fields in requests if fields is not None]


def _times_of_changes(folder: Path) -> dict[str, float]:
    """Return when each setting of a run was changed last, in seconds since the epoch, by name; a file that
    cannot be read has no changes."""
    times: dict[str, float] = {}
    with suppress(OSError, RunError):
        for fields in lines.load_lines(folder / names.CHANGES):
            if fields is None or not isinstance(fields.get("set"), dict):
                continue
            changed_s = fields.get("time_s")
            times |= dict.fromkeys(fields["set"], changed_s if isinstance(changed_s, int | float) else 0.0)
    return times


def _asked_s(fields: Mapping[str, Any]) -> float:
    """Return when a request was made, in seconds since the epoch; one without a time counts as new."""
    asked_s = fields.get("time_s")
    return asked_s if isinstance(asked_s, int | float) else math.inf


def _request(line: bytes) -> dict[str, Any] | None:
    """Parse a line of `commands.jsonl`; None if it is not what nbgpu writes."""
    try:
        fields = lines.decode(line)
    except ValueError:
        return None
    is_known = (
        isinstance(fields, dict)
        and fields.get("command", "stop") in get_args(Command)
        and isinstance(fields.get("set", {}), dict)
    )
    return fields if is_known else None
