"""What binder/ names is installed into an empty environment, and the first notebook runs with that alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]

BINDER = REPOSITORY / "binder"
INDEX_OPTION = "--extra-index-url "


def _clean_environment() -> dict[str, str]:
    """The environment without what would let this checkout or its own environment show through."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def _run(command: list[str | Path], cwd: Path, timeout_s: float) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=_clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def _answers(python: Path, index: str) -> bool:
    """Whether a package index has torch for us: this index alone, whatever else pip is configured with."""
    environment = {name: value for name, value in _clean_environment().items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    command = [python, "-m", "pip", "index", "versions", "torch", "--index-url", index, "--retries=0", "--timeout=10"]
    asked = subprocess.run(command, env=environment, capture_output=True, timeout=360, check=False)
    return asked.returncode == 0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of an environment that has what binder/requirements.txt names and nothing else."""
    version = (BINDER / "runtime.txt").read_text().strip().removeprefix("python-")
    if version != f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"binder/runtime.txt asks for Python {version}, and this one is {sys.version.split()[0]}")
    folder = tmp_path_factory.mktemp("binder")
    environment = folder / "environment"
    try:
        _run([sys.executable, "-m", "venv", environment], folder, 300)
        python = environment / "bin" / "python"
        requirements = _requirements(python, folder)
        # In the repository's root, as repo2docker does: the requirements name '.' and mean nbgpu.
        # Compiled is then what is imported, and not the ten times as much that is installed.
        _run([python, "-m", "pip", "install", "--no-compile", "-r", requirements], REPOSITORY, 1200)
        yield python
    finally:
        # Gigabytes, which pytest would keep for three more runs.
        shutil.rmtree(environment, ignore_errors=True)


@pytest.fixture(scope="module")
def installed(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The version of each package in that environment."""
    listed = json.loads(
        _run([python, "-m", "pip", "list", "--format=json"], tmp_path_factory.mktemp("list"), 60)
    )
    return {package["name"].lower().replace("_", "-"): package["version"] for package in listed}


def _requirements(python: Path, folder: Path) -> Path:
    """binder/requirements.txt itself; where torch's index cannot be reached, a copy without that one line.

    The pin then takes torch from wherever this machine's pip has it, and the tests below fail all the same if
    that is a CUDA build.
    """
    original = BINDER / "requirements.txt"
    lines = original.read_text().splitlines()
    (index,) = [line.removeprefix(INDEX_OPTION) for line in lines if line.startswith(INDEX_OPTION)]
    if _answers(python, index):
        return original
    print(f"{index} cannot be reached from here: torch comes from what pip is configured with")
    (folder / "binder").mkdir()
    shutil.copy(REPOSITORY / "constraints.txt", folder)
    copy = folder / "binder" / "requirements.txt"
    copy.write_text("\n".join(line for line in lines if not line.startswith(INDEX_OPTION)) + "\n")
    return copy


def test_no_gpu_package_is_installed(python: Path, installed: dict[str, str], tmp_path: Path) -> None:
    names = set(installed)
    assert {"nbgpu", "torch", "jupyterlab", "nilearn"} <= names
    for_gpus = {name for name in names if name.startswith(("nvidia-", "cuda", "cupy", "triton"))}
    # NVML's bindings are plain Python: they find no driver and say so.
    assert for_gpus <= {"nvidia-ml-py"}
    assert _run([python, "-c", "import torch; print(torch.version.cuda)"], tmp_path, 120) == "None\n"


def test_every_pin_is_kept(installed: dict[str, str]) -> None:
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    unpinned = set(installed) - set(pins) - {"nbgpu", "pip", "setuptools"}
    assert not unpinned, "constraints.txt names all that is installed"
    other = {
        name for name, version in installed.items() if name in pins and version.split("+")[0] != pins[name]
    }
    assert not other


def test_nbgpu_demo_runs_to_its_end(python: Path, tmp_path: Path) -> None:
    """Here pip has built the wheel and installed it with all that it asks for, and there is no checkout."""
    said = _run([python.with_name("nbgpu"), "demo"], tmp_path, 900)
    assert "raised" not in said
    assert f"report    {tmp_path}" in said
    executed = json.loads((tmp_path / "demo" / "00_first_run.ipynb").read_text())
    assert all(cell["execution_count"] for cell in executed["cells"] if cell["cell_type"] == "code")
    code = "import json, sys, nbgpu; print(json.dumps([nbgpu.__file__, *sys.path]))"
    paths = json.loads(_run([python, "-c", code], tmp_path, 60))
    assert [path for path in paths if path and Path(path).is_relative_to(REPOSITORY)] == []
