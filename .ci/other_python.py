"""Runs what needs no PyTorch under another Python: every module is compiled with warnings as errors, and the
unit tests that need no torch run, in an environment .venv-NAME without torch and MONAI.

    make test-python PYTHON=python3.13

PyTorch has a wheel of its own for each version of Python, of 200 MB to 3 GB. With an image of that Python,
`.ci/run fast` runs the other tests as well (.github/workflows/ci.yml).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"torch", "monai"}
TOOLS = {
    *("pytest", "pytest-timeout", "pytest-xdist", "pexpect", "gdstk", "tensorboard", "mypy"),
    *("kubernetes-validate", "kubeflow-trainer-api"),
}


def requirements() -> list[str]:
    """What nbgpu needs but for torch and what needs torch, and what its tests are run with."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    tools = {line for line in extras if Requirement(line).name in TOOLS}
    return [line for line in project["dependencies"] if Requirement(line).name not in LEFT_OUT] + sorted(
        tools
    )


def found(name: str) -> Path | None:
    """An interpreter by its name, such as python3.13, that runs: on the path, or among pyenv's versions."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    on_path = shutil.which(name)
    for path in [
        *([Path(on_path)] if on_path else []),
        *sorted(of_pyenv.glob(f"*/bin/{name}"), reverse=True),
    ]:
        # pyenv has a stand-in on the path for each version, which ends with 127 where that one is not chosen.
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def main() -> int:
    """Make the environment where it is missing, compile, and run the tests; returns pytest's exit code."""
    name, *chosen = sys.argv[1:] or ["python3"]
    interpreter = found(name)
    if interpreter is None:
        sys.stderr.write(
            f"there is no {name} here that runs. Name another one: make test-python PYTHON=python3.12\n"
        )
        return 1
    environment = ROOT / f".venv-{Path(name).name}"
    python = environment / "bin" / "python"
    ready, needed = environment / ".ready", "\n".join(requirements())
    if not ready.exists() or ready.read_text() != needed:
        shutil.rmtree(environment, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", environment], check=True)
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
        ]
        subprocess.run([*pip, *needed.splitlines()], check=True)
        subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)
        ready.write_text(needed)
    subprocess.run(
        [python, "-W", "error", "-m", "compileall", "-q", "-f", "nbgpu", "tests"], cwd=ROOT, check=True
    )
    return subprocess.run(
        [python, "-m", "pytest", "-m", "not long", *(chosen or ["tests/unit"])], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
