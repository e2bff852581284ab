"""The files of a checkpoint, and the check whether they are intact. Needs no torch, so that the notebook's
kernel can use it.

    checkpoints/step-00000010/    model.safetensors, optimizer.safetensors, state.json; average.safetensors if
                                  the run averages its weights, discriminator.safetensors if it has one
                                  manifest.json: size and sha256 of each of them, and of itself
    best.json                     the checkpoint with the best validation, if the setting best_metric is given

A checkpoint is written into a folder whose name ends in `.unfinished`, which is renamed once all of its
content is on the disk. One that keeps this name was left by a save that was killed, and is no checkpoint.
Nothing here or in the engine unpickles.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import safetensors

from nbgpu.errors import RunError
from nbgpu.machine.files import write_whole

MODEL, OPTIMIZER, AVERAGE, DISCRIMINATOR, STATE, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "average.safetensors",
    "discriminator.safetensors",
    "state.json",
    "manifest.json",
)
FILES = (MODEL, OPTIMIZER, STATE)
"""The files that every checkpoint has."""
UNFINISHED = ".unfinished"
BEST = "best.json"

_FORMAT = 1

_log = logging.getLogger("nbgpu.run")


@dataclass(frozen=True)
class Seal:
    """The size and the hash of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of `manifest.json`."""

    step: int
    time_s: float
    """The time at which it was written, in seconds since the epoch."""
    seals: Mapping[str, Seal]
    """The seals by file name."""


@dataclass(frozen=True)
class Score:
    """The result of one validation."""

    step: int
    """The number of optimizer steps done at that time."""
    metric: str
    value: float


@dataclass(frozen=True)
class Best:
    """The content of a run's `best.json`."""

    checkpoint: Path
    """A checkpoint in the run's folder, or in that of the earlier run that it resumed from."""
    score: Score


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, and the damaged ones that are newer."""

    checkpoint: Path | None
    damaged: Sequence[tuple[Path, str]]
    """The damaged checkpoints, each with the reason, the newest first."""


def checkpoints_folder(run_folder: Path) -> Path:
    return run_folder / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints(run_folder: Path) -> list[Path]:
    """Return the run's finished checkpoints, intact or not, the newest first."""
    parent = checkpoints_folder(run_folder)
    paths = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def sealed(content: bytes | memoryview) -> Seal:
    """Return the seal of a file with this content."""
    return Seal(len(content), hashlib.sha256(content).hexdigest())


def seal_of(path: Path) -> Seal:
    """Return the seal of a file on the disk."""
    return Seal(path.stat().st_size, _sha256_of_file(path))


def text(manifest: CheckpointManifest) -> str:
    """Return the text of `manifest.json`. Its last entry is the sha256 of the other entries, so that damage
    to the manifest itself is found."""
    fields = {
        "format": _FORMAT,
        "step": manifest.step,
        "time_s": manifest.time_s,
        "files": {name: asdict(seal) for name, seal in manifest.seals.items()},
    }
    return json.dumps({**fields, "sha256": _sha256_of_fields(fields)}, indent=2)


def read(checkpoint: Path) -> CheckpointManifest:
    """Read and check a checkpoint's manifest.

    Raises:
        ValueError: it is missing or damaged. The message is a predicate such as 'is missing', to follow the
            file's name.
        OSError: it cannot be read.
    """
    path = checkpoint / MANIFEST
    # Reading a pipe in its place would block.
    if not path.is_file():
        raise ValueError("is not a file" if path.exists() else "is missing")
    try:
        content = path.read_text()
        fields = json.loads(content)
        sha256 = fields.pop("sha256")
        if sha256 != _sha256_of_fields(fields):
            raise ValueError("sha256 differs")
        if fields["format"] != _FORMAT:
            raise ValueError(f"is of format {fields['format']}, and this nbgpu reads format {_FORMAT}")
        seals = {name: Seal(**seal) for name, seal in fields["files"].items()}
        manifest = CheckpointManifest(int(fields["step"]), float(fields["time_s"]), seals)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError):
        raise ValueError("is not what nbgpu writes") from None
    # Writing the fields again gives the same text, unless the file has something that nbgpu did not write.
    if set(manifest.seals) - {AVERAGE, DISCRIMINATOR} != set(FILES) or text(manifest) != content:
        raise ValueError("is not what nbgpu writes")
    return manifest


def damage(checkpoint: Path, contents: bool = True) -> str:
    """Return the damage of a checkpoint as a phrase, such as 'model.safetensors: sha256 differs'; empty if it
    is intact.

    Args:
        checkpoint: the checkpoint's folder.
        contents: whether to read every byte; False checks only names and sizes.
    """
    try:
        manifest = read(checkpoint)
    except OSError as error:
        return f"{MANIFEST}: cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{MANIFEST}: {error}"
    if checkpoint_name(manifest.step) != checkpoint.name:
        return f"{MANIFEST}: is that of {checkpoint_name(manifest.step)}"
    damages = {
        name: _damage_of_file(checkpoint / name, seal, contents) for name, seal in manifest.seals.items()
    }
    return "; ".join(f"{name}: {what}" for name, what in damages.items() if what)


def newest_whole(run_folder: Path, contents: bool = True) -> Newest:
    """Return the newest intact checkpoint of a run, and the damaged ones that are newer."""
    return first_whole(checkpoints(run_folder), contents)


def first_whole(candidates: Sequence[Path], contents: bool = True) -> Newest:
    """Return the first intact checkpoint among the candidates, and the damage of those before it."""
    damaged: list[tuple[Path, str]] = []
    for checkpoint in candidates:
        what = damage(checkpoint, contents)
        if not what:
            return Newest(checkpoint, damaged)
        damaged.append((checkpoint, what))
    return Newest(None, damaged)


def best(run_folder: Path) -> Best | None:
    """Return the checkpoint with the best validation, intact or not; None where the run has none.

    Raises:
        ValueError: `best.json` is not what nbgpu writes.
    """
    path = run_folder / BEST
    try:
        fields = json.loads(path.read_text())
        score = Score(fields["step"], fields["metric"], fields["value"])
        return Best(Path(os.path.normpath(run_folder / fields["checkpoint"])), score)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not what nbgpu writes") from None


def best_if_any(run_folder: Path) -> Best | None:
    """Return the checkpoint with the best validation; None if the run has none or `best.json` is damaged."""
    try:
        return best(run_folder)
    except ValueError:
        return None


def point_to_best(run_folder: Path, checkpoint: Path, score: Score) -> None:
    """Write `best.json`, whole or not at all. The path in it is relative, so that it stays right when the
    folder with all runs is moved."""
    fields = {"checkpoint": os.path.relpath(checkpoint, run_folder), **asdict(score)}
    write_whole(run_folder / BEST, json.dumps(fields, indent=2) + "\n", outlasts_power_cut=True)


def remove_old(folder: Path, keep: int) -> None:
    """Remove the checkpoints that are older than the newest `keep` ones with files of the right sizes. The
    checkpoint with the best validation stays."""
    kept_best = best(folder)
    num_whole = 0
    for checkpoint in checkpoints(folder):
        if num_whole < keep:
            num_whole += not damage(checkpoint, contents=False)
        elif kept_best is None or checkpoint != kept_best.checkpoint:
            # Renamed first, so that a half-removed checkpoint is never taken for a damaged one.
            shutil.rmtree(checkpoint.rename(checkpoint.with_name(checkpoint.name + UNFINISHED)))


def state(checkpoint: Path) -> dict[str, Any]:
    """Read `state.json` of an intact checkpoint; RunError if it is not what nbgpu writes."""
    try:
        fields = json.loads((checkpoint / STATE).read_bytes())
    except (OSError, ValueError, RecursionError):
        fields = None
    if not _is_state(fields):
        raise RunError(f"{checkpoint / STATE} is not what nbgpu writes")
    return fields


def _is_state(fields: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether the content of a `state.json` has the fields that all of its readers use."""
    return (
        isinstance(fields, dict)
        and type(fields.get("step")) is int
        and fields["step"] >= 0
        and isinstance(fields.get("config", {}), dict)
    )


def _sha256_of_fields(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage_of_file(path: Path, seal: Seal, contents: bool) -> str:
    """Return how a file differs from its seal: missing, another size or, if `contents`, another hash or no
    valid content; empty if it is intact."""
    try:
        if not path.is_file():
            return "is not a file" if path.exists() else "is missing"
        size_bytes = path.stat().st_size
        if size_bytes != seal.size_bytes:
            return f"has {size_bytes} bytes and should have {seal.size_bytes}"
        return _damage_of_contents(path, seal) if contents else ""
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _damage_of_contents(path: Path, seal: Seal) -> str:
    """Return how a file's bytes differ from its seal or from its format; empty if they are intact."""
    if _sha256_of_file(path) != seal.sha256:
        return "sha256 differs"
    # A matching sha256 does not make a file safe: whoever can replace the file can write its sha256, too. So
    # it is parsed, but never unpickled.
    if path.name != STATE:
        try:
            safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            return f"is not a safetensors file ({error})"
        return ""
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    return "" if _is_state(fields) else "is not what nbgpu writes"


def newest_intact(run_folder: Path) -> Path:
    """Return the newest intact checkpoint. Damaged ones that are newer are logged.

    Raises:
        RunError: there is none; the message names those that are damaged.
    """
    newest = newest_whole(run_folder)
    damaged = "; ".join(f"{path.name} is damaged ({what})" for path, what in newest.damaged)
    if newest.checkpoint is None:
        raise RunError(
            f"{run_folder.name} has no intact checkpoint: {damaged}"
            if damaged
            else f"{run_folder.name} has no checkpoint yet: one is written at the end, "
            "and after every `checkpoint_every` steps"
        )
    if damaged:
        _log.warning("%s; the newest intact checkpoint is %s", damaged, newest.checkpoint.name)
    return newest.checkpoint


def best_intact(run_folder: Path, best_metric: str) -> Path:
    """Return the checkpoint with the best validation.

    Args:
        run_folder: the run's folder.
        best_metric: the run's setting; empty if no checkpoint is kept as the best.

    Raises:
        RunError: there is none, or it is damaged.
    """
    try:
        kept_best = best(run_folder)
    except ValueError as error:
        raise RunError(str(error)) from None
    if kept_best is None:
        reason = (
            "none was validated yet"
            if best_metric
            else "it follows no validation value. Set best_metric='loss' before a run"
        )
        raise RunError(f"{run_folder.name} has no best checkpoint: {reason}")
    if what := damage(kept_best.checkpoint):
        raise RunError(
            f"the best checkpoint of {run_folder.name}, {kept_best.checkpoint}, is damaged ({what}). "
            "run.checkpoint() is the newest intact one"
        )
    return kept_best.checkpoint
