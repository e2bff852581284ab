"""Environments with the versions that Google Colab has, of which nothing may be upgraded there.

    python tests/support/colab.py REPORT

refuses a report of `pip install --dry-run --report REPORT` that changes one of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PINS = Path(__file__).resolve().parents[1] / "colab-constraints.txt"

_OF_JUPYTER = (
    *("anywidget", "ipykernel", "ipyparallel", "ipython", "ipywidgets", "jupyter-client", "jupyter-core"),
    *("jupyter-server", "jupyter-server-terminals", "jupyterlab-widgets", "matplotlib-inline", "nbclassic"),
    *("nbclient", "nbconvert", "nbformat", "nest-asyncio", "notebook", "prompt-toolkit", "psutil", "pyzmq"),
    *("rich", "tornado", "traitlets", "widgetsnbextension"),
)
"""The pinned packages that an overlay has of its own: those on which notebook and ranks run."""
_ONLY_OF_OLD_VERSIONS = ("backcall", "entrypoints", "ipython-genutils", "pickleshare", "setuptools")
"""What these versions need, and newer ones do not."""


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """The version of each pinned package, by its normalised name."""
    lines = [line for line in PINS.read_text().splitlines() if "==" in line]
    return {_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def changed(report: Mapping[str, object]) -> list[str]:
    """What an installation would change of the pinned packages, a line for each."""
    would = [item["metadata"] for item in report["install"]]  # type: ignore[index, attr-defined]
    return [
        f"{item['name']} {pins()[_name(item['name'])]} would become {item['version']}"
        for item in would
        if _name(item["name"]) in pins()
    ]


def overlay(folder: Path) -> Path:
    """Make an environment that has Colab's Jupyter and, for all else, the packages of this Python; return its
    interpreter. It takes a fraction of the time and the disk of one that has all of it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "_outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wanted = [f"{name}=={pins()[name]}" for name in _OF_JUPYTER]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--disable-pip-version-check",
            "--quiet",
        ]
        + ["--no-deps", "--ignore-installed", *wanted, *_ONLY_OF_OLD_VERSIONS],
        check=True,
    )
    return python


if __name__ == "__main__":
    if lines := changed(json.loads(Path(sys.argv[1]).read_text())):
        sys.exit("pip would change what Colab has:\n" + "\n".join(lines))
