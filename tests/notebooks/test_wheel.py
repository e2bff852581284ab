"""The wheel alone, in an environment that has nothing of this checkout, does what the first page promises.

The environment is this one's, file by file as hard links, from which pip removes nbgpu and into which it
installs the wheel: that is what pip would make of an empty one, without fetching a gigabyte again.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY, chromium

from nbgpu.version import VERSION

pytest.importorskip("build", reason="the extra `release` is not installed here")
if sys.prefix == sys.base_prefix:
    pytest.skip("this Python is in no virtual environment that could be copied", allow_module_level=True)

pytestmark = [pytest.mark.long, pytest.mark.release, pytest.mark.timeout(900)]

FIRST = "00_first_run.ipynb"
START_TIMEOUT_S = 120.0


def _environment() -> dict[str, str]:
    """The environment without what would let this checkout or its own environment show through."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return kept | {"SOURCE_DATE_EPOCH": "1700000000"}


def _run(*command: str | Path, cwd: Path, timeout_s: float = 120) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "-o", folder, REPOSITORY, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of an environment with the wheel in it, and this checkout nowhere."""
    folder = tmp_path_factory.mktemp("installed")
    environment, outer = folder / "environment", Path(sys.prefix)
    try:
        # Hard links need one file system for both; elsewhere it is a copy.
        if subprocess.run(["cp", "-al", outer, environment], capture_output=True, check=False).returncode:
            shutil.rmtree(environment, ignore_errors=True)
            _run("cp", "-a", outer, environment, cwd=folder, timeout_s=600)
        for script in [environment / "pyvenv.cfg", *(environment / "bin").iterdir()]:
            text = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
            if str(outer).encode() in text:
                mode = script.stat().st_mode
                # Written to in place, it would change the environment that the tests run in.
                script.unlink()
                script.write_bytes(text.replace(str(outer).encode(), str(environment).encode()))
                script.chmod(mode)
        python = environment / "bin" / "python"
        _run(python, "-m", "pip", "uninstall", "--yes", "--quiet", "nbgpu", cwd=folder)
        # pip leaves an empty folder, which Python would take for a namespace.
        for left_over in (environment / "lib").glob("python*/site-packages/nbgpu"):
            left_over.rmdir()
        assert not _finds_nbgpu(python, folder)
        # With no index, so that pip itself says whether the environment has all that the wheel asks for.
        _run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel, cwd=folder)
        yield python
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def _finds_nbgpu(python: Path, folder: Path) -> bool:
    code = "from importlib.util import find_spec; print(find_spec('nbgpu'))"
    return _run(python, "-c", code, cwd=folder) != "None\n"


def _command(python: Path) -> Path:
    return python.with_name("nbgpu")


def test_the_wheel_has_the_package_and_the_notebooks_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"nbgpu-{VERSION}.dist-info/"
    # Beside the package there may only be what is installed for JupyterLab and its server.
    data = f"nbgpu-{VERSION}.data/data/"
    beside = {n for n in names if not n.startswith(("nbgpu/", info, f"{data}share/", f"{data}etc/"))}
    assert beside == set()
    assert f"{info}licenses/LICENSE" in names
    committed = {p.name for p in (REPOSITORY / "notebooks").glob("*.ipynb")}
    assert {
        Path(n).name for n in names if n.startswith("nbgpu/notebooks/") and n.endswith(".ipynb")
    } == committed
    assert {n for n in names if "__pycache__" in n or ".ipynb_checkpoints" in n} == set()
    for path in (REPOSITORY / "nbgpu").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            name = str(path.relative_to(REPOSITORY))
            # JupyterLab looks for extensions in a folder of its own.
            in_jupyter = f"{data}share/jupyter/labextensions/nbgpu/"
            assert name.replace("nbgpu/labextension/", in_jupyter) in names


def test_the_sdist_has_all_that_is_tracked_and_builds_the_same_wheel(
    dist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(dist / f"nbgpu-{VERSION}.tar.gz") as archive:
        names = {Path(*Path(m.name).parts[1:]).as_posix() for m in archive.getmembers() if not m.isdir()}
    if (REPOSITORY / ".git").exists():
        listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
        tracked = {line for line in listed.splitlines() if (REPOSITORY / line).is_file()}
        assert names == tracked | {"PKG-INFO"}
    # `wheel` was built from the sdist, and this one from the checkout.
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", tmp_path, REPOSITORY, cwd=tmp_path)
    (from_checkout,) = tmp_path.glob("*.whl")
    assert from_checkout.read_bytes() == wheel.read_bytes()


def test_a_package_index_can_show_both(dist: Path, wheel: Path) -> None:
    _run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)
    _run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=dist)
    with zipfile.ZipFile(wheel) as archive:
        about = archive.read(f"nbgpu-{VERSION}.dist-info/METADATA").decode()
    # The README's links are those of a checkout; an index shows it elsewhere.
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", about) == []
    assert f"](https://github.com/nbgpu/nbgpu/blob/v{VERSION}/docs/start.md)" in about


def test_nbgpu_comes_from_the_wheel_and_the_checkout_is_on_no_path(python: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys, nbgpu; from importlib.metadata import distribution as of; "
        "print(json.dumps([nbgpu.__file__, sys.path, of('nbgpu').read_text('direct_url.json')]))"
    )
    file, paths, origin = json.loads(_run(python, "-c", code, cwd=tmp_path))
    assert Path(file).is_relative_to(python.parents[1])
    assert [p for p in paths if Path(p or tmp_path).is_relative_to(REPOSITORY)] == []
    assert json.loads(origin)["url"].endswith(".whl")
    assert _run(python, "-m", "pip", "check", cwd=tmp_path) == "No broken requirements found.\n"


def test_the_command_says_its_version_and_copies_the_notebooks(python: Path, tmp_path: Path) -> None:
    assert _run(_command(python), "--version", cwd=tmp_path) == f"nbgpu {VERSION}\n"
    said = _run(_command(python), "notebooks", "lessons", cwd=tmp_path)
    assert f"Begin with lessons/{FIRST}" in said
    originals = {path.name: path.read_bytes() for path in (REPOSITORY / "notebooks").glob("*.ipynb")}
    assert {path.name: path.read_bytes() for path in (tmp_path / "lessons").iterdir()} == originals


def test_lab_opens_the_first_notebook_in_jupyterlab(python: Path, tmp_path: Path) -> None:
    """In the browser of this test, which notes where it is sent, and then, where there is a real one, in that."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/sent\n')
    browser.chmod(0o755)
    with (tmp_path / "lab.log").open("wb") as log:
        lab = subprocess.Popen(
            [_command(python), "lab", "--ServerApp.port=0", "--ServerApp.ip=127.0.0.1"],
            cwd=tmp_path,
            env=_environment()
            | {"HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "BROWSER": str(browser)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        shown = _address(lab, tmp_path)
        assert f"/lab/tree/{FIRST}?" in shown or f"/lab/tree/notebooks/{FIRST}?" in shown
        base, _, rest = shown.partition("/lab/tree/")
        with urllib.request.urlopen(f"{base}/api/contents/{rest}", timeout=180) as answer:
            served = json.load(answer)["content"]
        original = json.loads((REPOSITORY / "notebooks" / FIRST).read_text())
        assert len(served["cells"]) == len(original["cells"])
        assert (tmp_path / "notebooks" / FIRST).is_file(), "a copy of the person's own"
        if chromium():
            texts = [cell["source"] for cell in original["cells"] if cell["cell_type"] == "markdown"]
            title = next(text for text in texts if text[0].startswith("# "))
            _see(shown, "".join(title).splitlines()[0].lstrip("# "))
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        try:
            lab.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(lab.pid, signal.SIGKILL)
            lab.wait()


def _address(lab: subprocess.Popen[bytes], folder: Path) -> str:
    """The address that JupyterLab sends a browser to: it opens a page on the disk that leads there."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    sent = folder / "sent"
    while time.monotonic() < deadline_s and lab.poll() is None:
        if sent.exists() and (page := sent.read_text().strip()):
            with urllib.request.urlopen(page, timeout=10) as answer:
                (found,) = re.findall(r'href="(http://[^"]+)"', answer.read().decode())
            return html.unescape(found)
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab opened no page:\n{(folder / 'lab.log').read_text()[-3000:]}")


def _see(url: str, title: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.get_by_role("heading", name=title).wait_for(timeout=120_000)
        browser.close()
