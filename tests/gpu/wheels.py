"""Collects what nbgpu needs on a machine with a GPU, PyTorch and no network: `make gpu-wheels`.

    python tests/gpu/wheels.py FOLDER

Such a machine has what comes with PyTorch and the usual scientific packages (`THERE`). All else that nbgpu
and its GPU tests import is downloaded as wheels for Python 3.12 on Linux x86-64, in the versions of
constraints.txt. Run it where the packages are installed, because the list follows from their metadata.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
_MANYLINUX = ("2_39", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")
_TARGET = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}

THERE = frozenset(
    [
        "torch",
        "triton",
        "numpy",
        "scipy",
        "pandas",
        "matplotlib",
        "pillow",
        "einops",
        "contourpy",
        "cycler",
        "fonttools",
        "kiwisolver",
        "pyparsing",
        "python-dateutil",
        "six",
        "scikit-learn",
        "joblib",
        "threadpoolctl",
        "narwhals",
        "lxml",
        "requests",
        "urllib3",
        "idna",
        "certifi",
        "charset-normalizer",
        "packaging",
        "psutil",
        "nvidia-ml-py",
        "safetensors",
        "rich",
        "pygments",
        "markdown-it-py",
        "mdurl",
        "pyyaml",
        "jinja2",
        "markupsafe",
        "typing-extensions",
        "attrs",
        "filelock",
        "fsspec",
        "networkx",
        "sympy",
        "mpmath",
        "setuptools",
        "tensorboard",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "execnet",
        "pluggy",
        "iniconfig",
        "torchmetrics",
        "lightning-utilities",
        "accelerate",
        "pytorch-lightning",
        "tqdm",
    ]
)
"""What a machine with PyTorch and the usual scientific packages has."""
FOR_TESTS = ("nilearn", "gdstk", "torchsurv")
"""What tests and recipes want beside nbgpu's own needs, and is small."""


def wanted() -> list[str]:
    """The packages to bring, sorted: all that nbgpu needs, and what these need in turn."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    left = [*map(Requirement, project["dependencies"]), *map(Requirement, FOR_TESTS)]
    found: set[str] = set()
    while left:
        needed = left.pop()
        name = canonicalize_name(needed.name)
        if name in found | THERE:
            continue
        found.add(name)
        left += _needs_of(name, needed.extras)
    return sorted(found)


def _needs_of(name: str, extras: set[str]) -> Iterator[Requirement]:
    for line in metadata.requires(name) or []:
        needed = Requirement(line)
        if needed.marker is None or any(
            needed.marker.evaluate({**_TARGET, "extra": extra}) for extra in ["", *extras]
        ):
            yield needed


def pins(names: list[str]) -> list[str]:
    """The versions of constraints.txt, as pip takes them.

    Raises:
        SystemExit: some packages have none; the message names all of them.
    """
    text = (REPOSITORY / "constraints.txt").read_text()
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    versions = dict(line.split("==") for line in lines if "==" in line)
    by_name = {str(canonicalize_name(name)): version for name, version in versions.items()}
    lacking = [name for name in names if name not in by_name]
    if lacking:
        raise SystemExit(f"constraints.txt does not pin {', '.join(lacking)}")
    return [f"{name}=={by_name[name]}" for name in names]


def download(folder: Path) -> None:
    """Download the wheels into a folder, and say how many there are and how large they are together."""
    wheels = pins(wanted())
    folder.mkdir(exist_ok=True)
    for older in folder.glob("*.whl"):
        older.unlink()
    platforms = [f"manylinux_{version}_x86_64" for version in _MANYLINUX] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
        "-d",
        str(folder),
    ]
    command += [part for platform in platforms for part in ("--platform", platform)]
    subprocess.run([*command, *wheels], check=True)
    sizes = [wheel.stat().st_size for wheel in folder.glob("*.whl")]
    print(f"{len(sizes)} wheels of {len(wheels)} in {folder}, {sum(sizes) / 2**20:.0f} MiB")
    if len(sizes) != len(wheels):
        raise SystemExit("some wheels are missing")


if __name__ == "__main__":
    download(Path(sys.argv[1]))
