"""Processes that nbgpu starts run the nbgpu that starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbgpu


def test_a_checkout_in_the_working_folder_starts_its_own_code_and_no_installed_one(tmp_path: Path) -> None:
    package = tmp_path / "nbgpu"
    shutil.copytree(
        Path(nbgpu.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "static")
    )
    (package / "where.py").write_text("import nbgpu, sys\nprint(nbgpu.__file__, sys.argv[1:])\n")
    # Beside it stands a file with the name of a module of the standard library.
    (tmp_path / "random.py").write_text("raise RuntimeError('the person has a file of this name')\n")
    code = (
        "from nbgpu.machine import interpreter; import subprocess\n"
        "subprocess.run([*interpreter.command('nbgpu.where', 'a'), 'b'], check=True)"
    )
    # What the person puts there comes first, also before the working folder.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{package / '__init__.py'} ['a', 'b']\n", done.stderr
