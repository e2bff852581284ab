"""What macOS and Windows see of nbgpu: a warning with a way out, and the commands that start no ranks.

No such machine is at hand, so a subprocess takes itself for one: its standard library is that of Linux, and
then sys.platform is another, and the modules that Windows lacks cannot be imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PRETENDING = """\
import sys
# What the standard library and the libraries need of the system that this really is.
import asyncio, ctypes, importlib.metadata, multiprocessing, platform, subprocess, sysconfig, tempfile
import pydantic, rich.console, rich.table, tyro, uuid, webbrowser, yaml
sysconfig.get_config_vars(), platform.uname()
LACKING = {"fcntl", "termios", "resource", "pwd", "grp", "pty", "tty", "psutil"}
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
for name in LACKING:
    sys.modules.pop(name, None)
sys.platform = sys.argv.pop(1)
"""


def _on(system: str, code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PRETENDING + code, system, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=cwd)


def _command(system: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return _on(system, "from nbgpu.cli import main; main()", *arguments, cwd=cwd)


@pytest.mark.parametrize(("system", "named"), [("darwin", "macOS"), ("win32", "Windows")])
def test_the_import_says_what_is_linux_only_and_what_to_do(system: str, named: str, tmp_path: Path) -> None:
    said = _on(system, "import nbgpu; print(nbgpu.__version__, nbgpu.ConfigError.__name__)", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "ConfigError" in said.stdout
    assert f"on Linux only, and this is {named}" in said.stderr
    assert "ssh -L 8888" in said.stderr
    assert "mybinder.org" in said.stderr
    assert ("WSL 2" in said.stderr) == (system == "win32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "use", ["nbgpu.Cluster", "from nbgpu import controls", "nbgpu.load_ipython_extension(None)"]
)
def test_what_needs_ranks_is_refused_with_the_same_words(use: str, tmp_path: Path) -> None:
    said = _on("darwin", f"import nbgpu\n{use}", cwd=tmp_path)
    assert said.stderr.splitlines()[-1].startswith("nbgpu.errors.ClusterError: nbgpu runs its ranks on Linux")
    assert "ImportError" not in said.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_commands_that_start_no_ranks_work_and_others_say_why_not(system: str, tmp_path: Path) -> None:
    for arguments in (
        ["--version"],
        [],
        ["notebooks", "n"],
        ["recipes"],
        ["new", "mine"],
        ["train", "--help"],
    ):
        said = _command(system, *arguments, cwd=tmp_path)
        assert said.returncode == 0, (arguments, said.stderr)
    assert (tmp_path / "n" / "00_first_run.ipynb").is_file()
    assert (tmp_path / "mine.py").is_file()
    for arguments in (["train", "autoencoder"], ["demo"], ["doctor"]):
        said = _command(system, *arguments, cwd=tmp_path)
        assert said.returncode == 1
        assert said.stderr.splitlines()[-1].startswith("nbgpu runs its ranks on Linux only")


def test_on_linux_the_import_says_nothing(tmp_path: Path) -> None:
    said = _on("linux", "import nbgpu", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
