"""docs/extending.md, followed word for word in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"`(?P<file>[\w./]+)`(?:, (?P<side>above|below) `(?P<line>[^`]+)`)?:\n\n```\w+\n(?P<text>.*?)```",
    re.DOTALL,
)
Run = Callable[..., str]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, to which all that the page shows was added."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(REPOSITORY / "nbgpu", folder / "nbgpu", ignore=shutil.ignore_patterns("__pycache__"))
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    for block in _BLOCK.finditer(page):
        path, text = folder / block["file"], block["text"]
        if block["side"] is None:
            assert not path.exists(), f"{path} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            before, line, after = path.read_text().partition(f"{block['line']}\n")
            assert line, f"{path} has no line {block['line']}"
            path.write_text(
                before + text + line + after if block["side"] == "above" else before + line + text + after
            )
    launchers = folder / "nbgpu/config/launchers.py"
    launchers.write_text(
        launchers.read_text().replace("HostsSettings)\n", "HostsSettings, SubprocessSettings)\n")
    )
    return folder


@pytest.fixture
def run(copy: Path, tmp_path: Path) -> Run:
    """Runs Python with the copy, and returns what it printed."""

    def run(*arguments: str, folders: tuple[Path, ...] = (copy,), timeout_s: float = 120) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_a_launcher_is_three_files(run: Run, copy: Path) -> None:
    test = copy / "tests/unit/client/launchers/test_subprocess_launcher.py"
    assert "1 passed" in run(
        "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, str(test)
    )
    code = "from nbgpu.config import ClusterConfig; print(ClusterConfig.model_fields['launcher'].description)"
    assert "'subprocess' in processes of this host" in run("-c", code)


def test_a_recipe_is_a_folder(run: Run) -> None:
    assert re.search(
        r"--slope NUMBER +the slope to find", run("-m", "nbgpu.cli", "train", "line", "--help-all")
    )


def test_another_package_brings_a_recipe(run: Run, copy: Path, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    project = tomllib.loads(re.search(r"```toml\n(\[project.*?)```", page, re.DOTALL)[1])  # type: ignore[index]
    ((group, recipes),) = project["project"]["entry-points"].items()
    package, _, folder = recipes["line"].rpartition(".")
    site = tmp_path / "site"
    shutil.copytree(copy / "nbgpu/recipes/line", site / package / folder)
    (site / package / "__init__.py").touch()
    config = site / package / folder / "config.py"
    config.write_text(config.read_text().replace("nbgpu.recipes.line", recipes["line"]))
    # What pip leaves of a package.
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nline = {recipes['line']}\n")
    folders = (REPOSITORY, site)
    assert re.search(r"line +│ demo +│ a steep line", run("-m", "nbgpu.cli", "recipes", folders=folders))
    config.write_text("import missing_module\n")
    code = (
        "import nbgpu.config\ntry: nbgpu.config.train_config('line')\nexcept Exception as error: print(error)"
    )
    assert "importing my_package.line.config fails with ModuleNotFoundError" in run(
        "-c", code, folders=folders
    )


def test_a_setting_is_one_field(run: Run) -> None:
    code = (
        "from nbgpu.config import ClusterConfig, flags, settings_of, train_config\n"
        "import runpy\n"
        "from nbgpu.config.settings import control_fields\n"
        f"markdown_table = runpy.run_path({str(REPOSITORY / 'docs' / 'generate.py')!r})['markdown_table']\n"
        "model = settings_of('autoencoder')\n"
        "print(flags.parse([model], ['--patience', '3'], prog='nbgpu')['patience'])\n"
        "print('patience' in [name for _, name, _ in control_fields(model)], '`patience`' in markdown_table(model))\n"
        "try: train_config('autoencoder', patience=-1)\n"
        "except Exception as error: print(error)\n"
    )
    number, derived, refusal = run("-c", code).splitlines()[:3]
    assert (number, derived) == ("3", "True True")
    assert "patience" in refusal


def test_a_chart_is_one_line(run: Run) -> None:
    code = (
        "from nbgpu.ui.run.charts import charts\n"
        "from nbgpu.ui.run.history import History, Series\n"
        "from nbgpu.ui.run.system_charts import LINES\n"
        "history = History()\n"
        "history.series[0, 'compute_s'] = Series([1.0], [1], [0.25])\n"
        "(chart,) = charts(history)\n"
        "print(chart.title, chart.curves[0].y)\n"
        "print(LINES[0]['id'])\n"
    )
    assert run("-c", code).splitlines() == ["Compute time (ms) [250.0]", "compute"]


@pytest.mark.long
def test_the_recipe_trains_on_the_launchers_hosts(run: Run) -> None:
    code = (
        "import nbgpu\n"
        "settings = dict(launcher='subprocess', nodes=1, gpus_per_node=2, gpus='none', interface='lo')\n"
        "with nbgpu.Cluster(**settings, start_timeout_s=300) as cluster:\n"
        "    run = cluster.train('line', preset='demo', lr=0.2, steps=200)\n"
        "    run.wait(400)\n"
        "    print(run.status, round(run.result()['slope']))\n"
    )
    assert run("-c", code, timeout_s=600).splitlines()[-1] == "finished 5"
