"""Find where a run begins: at its first step, or at a checkpoint of an earlier run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbgpu.config import TrainConfig, read_tables
from nbgpu.config.conditions import defaults_beside
from nbgpu.config.settings import marked
from nbgpu.errors import ConfigError, RunError
from nbgpu.protocol.records import Chosen
from nbgpu.run_folder import checkpoint_files, lines, names

AUTO = "auto"
BEST = "best"
"""'RUN_FOLDER/best' selects the checkpoint with the best validation, and not the newest one."""

_CHANGE_NO_RESULT = (
    *("resume", "runs_dir", "run_name", "telemetry", "val_every", "val_every_epochs"),
    *("checkpoint_every", "checkpoint_every_epochs", "keep_checkpoints", "best_metric", "best_mode"),
)
"""Settings that may differ from the checkpoint's in an exact continuation of its run."""


@dataclass(frozen=True)
class Beginning:
    """Where a run begins; the content of `resume.json` in its folder."""

    checkpoint: str = ""
    """The folder of the checkpoint; empty if the run begins with its first step."""
    step: int = 0
    """The number of optimizer steps that are already done."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about how the checkpoint was chosen."""

    def write(self, run_folder: Path) -> None:
        (run_folder / names.RESUMED_FROM).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, run_folder: Path) -> Beginning:
        """Read `resume.json` in a run's folder. Without that file the run begins with its first step."""
        path = run_folder / names.RESUMED_FROM
        try:
            fields = lines.load(path)
            return cls(str(fields["checkpoint"]), int(fields["step"]), tuple(map(str, fields["notes"])))
        except FileNotFoundError:
            return cls()
        except (ValueError, KeyError, TypeError, OverflowError):
            raise RunError(f"{path} is not what nbgpu writes") from None


def find(config: TrainConfig, check_sha256: bool = True) -> Beginning:
    """Find where a run with these settings begins: according to `resume`, with its first step or at the
    newest intact checkpoint.

    Args:
        config: the settings.
        check_sha256: whether to check the sha256 of every file of a checkpoint; False checks only sizes.

    Raises:
        ConfigError: there is no such folder, or its checkpoint does not fit the settings; the message names
            all differences.
        RunError: all candidate checkpoints are damaged; the message names each with its damage.
    """
    if not config.resume:
        return Beginning()
    candidates = _candidates(config.resume, config.runs_dir, config.recipe, config.run_name)
    if not candidates:
        named = f" named {config.run_name!r}" if config.run_name else ""
        text = f"resume='auto' found no checkpoint of {config.title}{named} in {config.runs_dir}"
        return Beginning(notes=(f"{text}: training starts from the beginning",))
    newest = checkpoint_files.first_whole(candidates, check_sha256)
    damaged = [_damaged(path, what) for path, what in newest.damaged]
    if newest.checkpoint is None:
        if config.resume == AUTO:
            return Beginning(notes=tuple(f"{text}; training starts from the beginning" for text in damaged))
        raise RunError("\n".join([*damaged, _way_out(candidates)]))
    about = checkpoint_files.state(newest.checkpoint)
    _refuse_mismatch(newest.checkpoint, about, config)
    place = f"{newest.checkpoint.name} of {_run_folder(newest.checkpoint).name}"
    notes = [f"{text}; going on from {place}" for text in damaged] or [f"going on from {place}"]
    notes += _changed_settings(about, config)
    return Beginning(str(newest.checkpoint), int(about["step"]), tuple(notes))


def run_to_resume(resume: str, runs_dir: str, recipe: str, run_name: str) -> Path | None:
    """Return the folder of the run that these settings resume; None where 'auto' finds none.

    Raises:
        ConfigError: there is no such folder, or it has no checkpoint.
        RunError: the file about the best checkpoint is damaged.
    """
    candidates = _candidates(resume, runs_dir, recipe, run_name)
    return _run_folder(candidates[0]) if candidates else None


def values_in_checkpoint(config: TrainConfig) -> Chosen:
    """Return the checkpoint's values of the settings that are left to the data; none if the run resumes no
    checkpoint.

    Raises:
        ConfigError: there is no such folder, or its checkpoint does not fit the settings.
        RunError: all candidate checkpoints are damaged.
    """
    checkpoint = find(config, check_sha256=False).checkpoint
    saved = checkpoint_files.state(Path(checkpoint)).get("config", {}) if checkpoint else {}
    values = {
        name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name]
        for name in config.left_to_data
        if saved.get(name)
    }
    named = ", ".join(f"{name}={value}" for name, value in values.items())
    return Chosen(values, (f"as in the checkpoint, because left out: {named}",) if values else ())


def _candidates(resume: str, runs_dir: str, recipe: str, run_name: str) -> list[Path]:
    """Return the checkpoints that `resume` refers to, the newest first; empty only for 'auto'."""
    if resume == AUTO:
        folders = run_folders(Path(runs_dir).absolute(), recipe, run_name)
        saved = (checkpoint for folder in folders for checkpoint in checkpoint_files.checkpoints(folder))
        return sorted(saved, key=_time_and_step, reverse=True)
    return _named_checkpoints(Path(resume).absolute())


def _named_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that a path names: a single one, the best one of a run, or all of a run, the
    newest first.

    Raises:
        ConfigError: there is no such folder, or no checkpoint in it.
    """
    if folder.name == BEST and not folder.exists() and folder.parent.is_dir():
        return [_best_checkpoint(folder.parent)]
    if not folder.is_dir():
        raise ConfigError(
            f"resume = {str(folder)!r}: there is no such folder. Give a run's folder or a checkpoint's, "
            "or 'auto' for the newest run's"
        )
    if (folder / checkpoint_files.MANIFEST).exists() or folder.parent.name == "checkpoints":
        return [folder]
    saved = checkpoint_files.checkpoints(folder)
    if not saved:
        raise ConfigError(f"resume = {str(folder)!r}: there is no checkpoint in this folder")
    return saved


def _best_checkpoint(run_folder: Path) -> Path:
    """Return the checkpoint with the best validation of a run.

    Raises:
        ConfigError: the run has none.
        RunError: `best.json` is damaged.
    """
    try:
        best = checkpoint_files.best(run_folder)
    except ValueError as error:
        raise RunError(str(error)) from None
    if best is None:
        raise ConfigError(
            f"resume = {str(run_folder / BEST)!r}: this run has no best checkpoint. One is kept where best_metric is set"
        )
    return best.checkpoint


def run_folders(runs_dir: Path, recipe: str, run_name: str) -> list[Path]:
    """Return the folders of this user's runs of a recipe; if `run_name` is not empty, of the runs with that
    name."""
    folders = []
    for path in runs_dir.glob(f"*/{names.SETTINGS}"):
        # Another user's run is used only if the settings name its folder.
        if path.parent.lstat().st_uid == os.geteuid():
            train = _read_train_table(path)
            if train.get("recipe") == recipe and run_name in ("", train.get("run_name")):
                folders.append(path.parent)
    return folders


def _read_train_table(run_toml: Path) -> Mapping[str, Any]:
    """Read the training settings in a run.toml without validating them; empty if they cannot be read."""
    try:
        return dict(read_tables(run_toml)["train"])
    except (ConfigError, KeyError, TypeError, ValueError):
        # This is not a run's folder, or its creation was cut off, so it has no checkpoint either.
        return {}


def _time_and_step(checkpoint: Path) -> tuple[float, int]:
    """Return (the time at which a checkpoint was written in seconds since the epoch, its step) as a sort key.
    A damaged checkpoint has the time of its folder, and one that its run has just removed has 0."""
    step = int(checkpoint.name.removeprefix("step-"))
    try:
        return checkpoint_files.read(checkpoint).time_s, step
    except (OSError, ValueError):
        return checkpoint.stat().st_mtime if checkpoint.exists() else 0.0, step


def _run_folder(checkpoint: Path) -> Path:
    return checkpoint.parents[1]


def _damaged(checkpoint: Path, what: str) -> str:
    return f"checkpoint {checkpoint.name} of {_run_folder(checkpoint).name} is damaged ({what})"


def _way_out(candidates: list[Path]) -> str:
    """Return advice where all candidates are damaged: an intact checkpoint of the same run, or else what to
    do without one."""
    run_folder = _run_folder(candidates[0])
    whole = checkpoint_files.newest_whole(run_folder).checkpoint
    if whole is not None:
        return f"The newest whole one of this run: resume={str(whole)!r}"
    return "There is no intact one in this run. Resume from another, or leave resume out"


def _refuse_mismatch(checkpoint: Path, about: dict[str, Any], config: TrainConfig) -> None:
    """Raise ConfigError if a checkpoint cannot be continued with the settings: another model, another
    division of the same data, or no steps left to do.

    Args:
        checkpoint: the checkpoint's folder.
        about: the content of its `state.json`.
        config: the settings.
    """
    then, now = about.get("config", {}), config.model_dump(mode="json")
    # Settings that are left to the data take the checkpoint's values.
    fixed = [n for n in ("recipe", *marked(type(config), "shapes_the_model")) if n not in config.left_to_data]
    wrong = [
        f"{name} is {then.get(name)!r} there, and {now[name]!r} in the settings"
        for name in fixed
        if then.get(name) != now[name]
    ]
    if then.get("data") == now["data"]:
        # In versions without the setting split_seed, `seed` decided which samples are held out.
        then = ({"split_seed": then["seed"]} if "seed" in then else {}) | then
        wrong += [
            f"{name} is {then[name]!r} there, and {now[name]!r} in the settings: samples that would be held out now were "
            "trained on there"
            for name in marked(type(config), "divides_the_data")
            if name in then and then[name] != now[name]
        ]
    if config.epochs is None and about["step"] >= config.steps:
        wrong.append(
            f"all {about['step']} steps are done there, and steps is {config.steps}: give more, or leave resume out"
        )
    if wrong:
        raise ConfigError("\n".join([f"resume: {checkpoint} does not fit:", *wrong]))


def _changed_settings(about: dict[str, Any], config: TrainConfig) -> list[str]:
    """Return one note with the settings that differ from the checkpoint's and influence the result, because
    the run is then not an exact continuation; an empty list if there are none."""
    saved = about.get("config", {})
    # A setting that an older version did not have counts as its default. JSON has lists in place of tuples.
    defaults = defaults_beside(type(config), saved).items()
    then = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults} | saved
    now = config.model_dump(mode="json")
    changed = [
        f"{name} was {then.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if name not in (*_CHANGE_NO_RESULT, *config.left_to_data) and then.get(name) != value
    ]
    return [f"goes on with other settings: {'; '.join(changed)}"] if changed else []
