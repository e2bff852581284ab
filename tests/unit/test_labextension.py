"""The built JupyterLab extension is whole, and the wheel puts it where Jupyter looks."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nbgpu.text.palette import RANK_COLORS
from nbgpu.version import VERSION

REPOSITORY = Path(__file__).resolve().parents[2]
BUILT = REPOSITORY / "nbgpu" / "labextension"
SOURCES = REPOSITORY / "widgets" / "labextension"


def test_what_jupyterlab_loads_is_there() -> None:
    described = json.loads((BUILT / "package.json").read_text())
    assert described["name"] == "nbgpu"
    assert described["version"] == VERSION
    assert (BUILT / described["jupyterlab"]["_build"]["load"]).is_file()
    assert json.loads((SOURCES / "package.json").read_text())["version"] == VERSION
    entries = [path.name for path in (BUILT / "static").glob("remoteEntry.*")]
    assert len(entries) == 1, "a stale build"


def test_it_names_no_folder_of_the_machine_that_built_it() -> None:
    for path in BUILT.rglob("*.js"):
        assert not re.search(r"/(home|work|tmp|root)/", path.read_text()), path


def test_the_wheel_puts_everything_in_its_place() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    placed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    assert placed == {
        "nbgpu/labextension": "share/jupyter/labextensions/nbgpu",
        "widgets/labextension/install.json": "share/jupyter/labextensions/nbgpu/install.json",
        "widgets/labextension/server.json": "etc/jupyter/jupyter_server_config.d/nbgpu.json",
    }
    assert all((REPOSITORY / source).exists() for source in placed)


def test_the_server_finds_what_is_enabled() -> None:
    enabled = json.loads((SOURCES / "server.json").read_text())
    ((name, is_enabled),) = enabled["ServerApp"]["jpserver_extensions"].items()
    assert is_enabled is True
    module = importlib.import_module(name)
    assert module._jupyter_server_extension_points() == [{"module": name}]
    (path,) = module._jupyter_labextension_paths()
    assert (Path(module.__file__).parent / path["src"]).resolve() == BUILT


def test_the_ranks_have_the_same_colours_in_the_page() -> None:
    palette = (SOURCES / "src" / "palette.ts").read_text()
    assert re.findall(r'"(#[0-9a-f]{6})"', palette) == list(RANK_COLORS)
    cells = (SOURCES / "style" / "cells.css").read_text()
    assert re.findall(r"(#[0-9a-f]{6})", cells) == list(RANK_COLORS[:2])


@pytest.mark.slow
def test_jupyterlab_takes_it_for_compatible() -> None:
    """A dependency on one exact version would be shown to users of any other JupyterLab as outdated."""
    listed = subprocess.run(
        [sys.executable, "-m", "jupyter", "labextension", "list"], capture_output=True, text=True, check=True
    ).stderr
    (line,) = [line for line in listed.splitlines() if line.split()[:1] == ["nbgpu"] and " v" in line]
    assert "enabled" in line
    assert "OK" in line
