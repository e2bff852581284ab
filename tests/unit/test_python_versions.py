"""Every Python that pyproject.toml names compiles nbgpu and runs what needs no package.

`make test-python PYTHON=python3.13` runs the unit tests that need no torch as well.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from conftest import REPOSITORY
from packaging.specifiers import SpecifierSet

from nbgpu.version import VERSION

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
NAMED = [
    f"python{match[1]}"
    for line in PROJECT["classifiers"]
    if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
]
FOUND = {name: runpy.run_path(str(REPOSITORY / ".ci" / "other_python.py"))["found"](name) for name in NAMED}


def test_the_oldest_named_python_is_the_oldest_allowed() -> None:
    assert f">={NAMED[0].removeprefix('python')}" == PROJECT["requires-python"]
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    assert settings["ruff"]["target-version"] == NAMED[0].replace("python", "py").replace(".", "")
    assert settings["mypy"]["python_version"] == NAMED[0].removeprefix("python")


def test_the_pinned_versions_go_with_the_first_release_of_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2, and pip finds no set of versions there if one of them needs 3.11.5."""
    pinned = {
        line.partition("==")[0].lower() for line in (REPOSITORY / "constraints.txt").read_text().split()
    }
    needed = {
        each.name: each.metadata["Requires-Python"]
        for each in distributions()
        if each.name.lower() in pinned and each.metadata["Requires-Python"]
    }
    assert len(needed) > 100
    first = f"{NAMED[0].removeprefix('python')}.0"
    assert {name: python for name, python in needed.items() if first not in SpecifierSet(python)} == {}


def _run(name: str, *arguments: str | Path, folder: Path) -> str:
    python = FOUND[name]
    if python is None:
        pytest.skip(f"there is no {name} here that runs")
    # What is compiled stays out of the checkout; a warning of the compiler is an error.
    command = [python, "-P", "-X", f"pycache_prefix={folder / 'compiled'}", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_every_module_is_compiled_without_a_warning(name: str, tmp_path: Path) -> None:
    for folder in ("nbgpu", "tests", "docs"):
        _run(name, "-m", "compileall", "-q", REPOSITORY / folder, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_needs_no_package_runs(name: str, tmp_path: Path) -> None:
    """That of the standard library alone: no other package is installed beside this interpreter."""
    assert _run(name, "-m", "nbgpu.cli", "--version", folder=tmp_path) == f"nbgpu {VERSION}\n"
    assert "nbgpu train RECIPE" in _run(name, "-m", "nbgpu.cli", folder=tmp_path)
    _run(name, "-m", "nbgpu.cli", "notebooks", "lessons", folder=tmp_path)
    assert (tmp_path / "lessons" / "00_first_run.ipynb").is_file()
    code = "import nbgpu, nbgpu.protocol, nbgpu.planning; print(len(nbgpu.__all__), nbgpu.ConfigError)"
    assert "ConfigError" in _run(name, "-c", code, folder=tmp_path)
