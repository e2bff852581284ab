"""Files that are not what they should be: each is passed over, or told in a sentence, and none is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rows import row
from safetensors.numpy import save

from nbgpu import manifest, resume, runs
from nbgpu.client import data_check, registry
from nbgpu.config import read_toml, train_config
from nbgpu.errors import ConfigError, DataError, NbgpuError, RunError
from nbgpu.recipes.lithography.recipe import pairs_of
from nbgpu.ui.stored import StoredRun

DEEP = "[" * 20_000


def _nbgpu(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbgpu.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def _make(kind: str, path: Path) -> None:
    match kind:
        case "a folder":
            path.mkdir()
        case "a link to itself":
            path.symlink_to(path.name)
        case "a pipe":
            os.mkfifo(path)
        case "of a wrong form":
            path.write_text('{"version": 99, "id": "ab"}')
        case "nested too deeply":
            path.write_text(DEEP)


@row("An entry of the registry is {kind}", "`nbgpu ps` names it, a start passes over it", bound_s=None)
@pytest.mark.parametrize(
    "kind", ["a folder", "a link to itself", "a pipe", "of a wrong form", "nested too deeply"]
)
def test_an_odd_entry_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))
    path = registry.folder() / "ab.json"
    _make(kind, path)
    done = _nbgpu("ps", cwd=tmp_path)
    assert done.stdout == f"no clusters\n{path} is no entry of a cluster, and is passed over: remove it\n"
    assert done.stderr == ""
    registry.require_free(())


def test_an_odd_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))
    (registry.folder() / "lock").mkdir()
    with pytest.raises(NbgpuError, match=r"lock cannot be used as a lock .*: remove it"):
        registry.entries()


@row("`run.toml` holds {what}", "a sentence names the file and the value", bound_s=None)
@pytest.mark.parametrize(
    ("what", "text", "told"),
    [
        ("a number as [cluster]", "cluster = 3", "cluster must be a table"),
        ("a list as [train]", "train = [1]", "train must be a table"),
        ("a number as recipe", "[train]\nrecipe = 3", "recipe = 3 is not a recipe's name"),
        ("a setting cls", "[train]\ncls = 3", "cls is not a setting"),
        ("a table as lr", "[train]\nlr = {a = 1}", "lr = .* is not valid"),
        ("a list as ranks", "[cluster]\nranks = [1]", r"ranks = \[1\] is not valid"),
        pytest.param("20,000 brackets", f"a = {DEEP}", "too many brackets", id="20,000 brackets"),
    ],
)
def test_settings_of_wrong_types(tmp_path: Path, what: str, text: str, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        read_toml(path)
    assert str(path) in str(error.value)


@row("A pipe stands where {what} should", "it is refused, and nobody waits for it", bound_s=None)
@pytest.mark.parametrize("what", ["--config", "--data", "the recipe"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, what: str) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    arguments = ["pipe.py"] if what == "the recipe" else ["microstructure", what, "pipe.py"]
    done = _nbgpu("train", *arguments, "--gpus", "none", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(("ConfigError: ", "DataError: "))
    assert "pipe" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_data_that_are_a_device() -> None:
    with pytest.raises(DataError, match=r"/dev/zero.* neither a file nor a folder"):
        data_check.require(train_config("microstructure", data="/dev/zero"))


@row("`nbgpu new {name!r}`", "the name is refused in a sentence", bound_s=None)
@pytest.mark.parametrize("name", ["", ".", "/", ".."])
def test_a_recipe_with_no_name(tmp_path: Path, name: str) -> None:
    done = _nbgpu("new", name, cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot be the name of a recipe" in done.stderr
    assert "Traceback" not in done.stderr


def _checkpoint(run_folder: Path, state: object) -> Path:
    folder = run_folder / "checkpoints" / manifest.checkpoint_name(2)
    folder.mkdir(parents=True)
    contents = {
        manifest.MODEL: save({"weight": np.zeros(1)}),
        manifest.OPTIMIZER: save({"weight": np.zeros(1)}),
        manifest.STATE: json.dumps(state).encode(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    seals = {name: manifest.sealed(content) for name, content in contents.items()}
    (folder / manifest.MANIFEST).write_text(manifest.text(manifest.Manifest(2, 0.0, seals)))
    return folder


@row(
    "A checkpoint's `state.json` was made by hand, with its sha256: {state}",
    "the checkpoint is refused as damaged, in a sentence",
    bound_s=None,
)
@pytest.mark.parametrize("state", [{}, [], {"step": "2"}, {"step": -1}, {"step": 2, "config": 3}])
def test_a_forged_state(tmp_path: Path, state: object) -> None:
    folder = _checkpoint(tmp_path, state)
    assert manifest.damage(folder) == "state.json: is not what nbgpu writes"
    config = train_config("autoencoder", data="phantoms", resume=str(folder))
    for contents in (True, False):
        with pytest.raises(RunError, match=r"state\.json.* is not what nbgpu writes"):
            resume.find(config, contents=contents)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"devices": [{"x": 1}]}', DEEP, "no JSON"])
def test_other_forged_files_of_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text("")
    for name in ("run_info.json", "resume.json", "rank0.outcome.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=r"run_info\.json"):
        StoredRun(tmp_path)
    with pytest.raises(RunError, match=r"resume\.json"):
        resume.Beginning.read(tmp_path)
    with pytest.raises(RunError, match=r"rank0\.outcome\.json"):
        runs.outcome(tmp_path, 0)


@pytest.mark.timeout(60)
def test_pipes_among_layouts_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gds")
    (tmp_path / "masks").mkdir()
    os.mkfifo(tmp_path / "masks" / "b.png")
    named = train_config("lithography", data=f"{tmp_path / 'a.gds'},{tmp_path / 'c.gds'}", pixel_nm=25)
    with pytest.raises(DataError, match=r"a\.gds: there is no such file or folder\n.*c\.gds: there is no"):
        pairs_of(named)
    with pytest.raises(DataError, match="has no"):
        pairs_of(train_config("lithography", data=str(tmp_path), pixel_nm=25))
