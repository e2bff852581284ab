"""The notebooks as files: form, and outputs that are those of their cells and of no one machine."""

from __future__ import annotations

import getpass
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "docs"))
from execute_notebooks import MARK, kept, sources_of

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
MAX_BYTES = 2_500_000
HEAD = 2
"""The cells before the first heading: the badges, and the one that installs nbgpu on Colab and Kaggle."""
FIGURE = "application/vnd.plotly.v1+json"


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells[HEAD:] if cell.cell_type == "code"]


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in code_cells(notebook):
        yield from cell.outputs


def test_they_are_numbered_without_holes() -> None:
    assert [path.name.partition("_")[0] for path in NOTEBOOKS] == [f"{n:02d}" for n in range(len(NOTEBOOKS))]
    assert NOTEBOOKS[0].name == "00_first_run.ipynb"


def test_it_begins_with_what_one_learns_and_how_long_it_takes(notebook: Any) -> None:
    nbformat.validate(notebook)
    first = notebook.cells[HEAD]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    _, learned = first.source.split("\n\n**You will learn**\n\n- ")
    assert re.search(r"\n\n\*\*Time:\*\* \d+ minutes? (to run )?on two CPU cores", learned)


def test_it_can_be_opened_on_colab_and_kaggle(path: Path, notebook: Any) -> None:
    links, install = notebook.cells[:HEAD]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    source = project["urls"]["Source"].removeprefix("https://")
    there = f"blob/main/notebooks/{path.name}"
    colab = f"https://colab.research.google.com/{source.replace('github.com', 'github')}/{there}"
    kaggle = f"https://kaggle.com/kernels/welcome?src=https://{source}/{there}"
    assert re.findall(r"\]\((https[^)]*)\)", links.source) == [colab, kaggle]
    assert "skip-execution" in install.metadata.tags
    assert re.findall(r'%pip install -q "([^"]*)"', install.source) == [f"nbgpu[samples] @ git+https://{source}"]
    # All notebooks have the same one.
    assert install.source == nbformat.read(NOTEBOOKS[0], as_version=4).cells[1].source


@pytest.mark.parametrize(
    ("is_there", "where", "installs"),
    [(False, "colab", 1), (False, "kaggle", 1), (False, "", 0), (True, "colab", 0), (True, "kaggle", 0)],
)
def test_only_there_and_only_where_it_is_missing_nbgpu_is_installed(
    is_there: bool, where: str, installs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = nbformat.read(NOTEBOOKS[0], as_version=4).cells[1]
    commands: list[str] = []
    code = re.sub(r"^( *)%pip (.*)$", r"\1commands.append('''\2''')", cell.source, flags=re.M)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_there else None)
    if where == "colab":
        monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    if where == "kaggle":
        monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    exec(code, {"commands": commands})
    assert len(commands) == installs


def test_it_ends_with_what_to_try_next(notebook: Any) -> None:
    last = notebook.cells[-1]
    assert last.cell_type == "markdown"
    assert last.source.startswith("## Try next\n\n- ")
    assert last.source.count("\n- ") >= 2


def test_a_cell_has_at_most_ten_lines(notebook: Any) -> None:
    assert not [cell.source for cell in code_cells(notebook) if len(cell.source.splitlines()) > 10]


def test_a_notebook_runs_on_any_python_kernel(notebook: Any) -> None:
    assert notebook.metadata.kernelspec.name == "python3"


def test_the_outputs_are_those_of_the_present_cells(path: Path, notebook: Any) -> None:
    said = f"run: make notebooks ONLY={path.name[:2]}"
    assert notebook.metadata.get(MARK, {}).get("outputs_of") == sources_of(notebook), said
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), said
    failed = [cell for cell in cells if any(o.output_type == "error" for o in cell.outputs)]
    assert all("raises-exception" in cell.metadata.get("tags", ()) for cell in failed)


def test_the_outputs_are_those_of_no_one_machine_and_minute(path: Path, notebook: Any) -> None:
    assert "widgets" not in notebook.metadata
    assert not [cell for cell in notebook.cells if "execution" in cell.metadata]
    shown = [
        {name: value for name, value in output.get("data", {}).items() if name != "image/png"} or output
        for output in outputs(notebook)
    ]
    # Pictures within HTML are base64, in which any letters can come.
    text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", json.dumps(shown))
    assert "widget-view" not in text
    assert not re.findall(r"(?<![\w.:/])/(?:tmp|home|root|work|Users|var|opt)/[\w./-]+", text)
    assert not re.findall(r"\b\w*Warning: .*", text)
    user = getpass.getuser()
    assert not re.findall(rf"(?:@|user |home/){re.escape(user)}\b", text)
    assert not re.findall(r"\b20\d{6}-\d{6}-", text.replace("20260101-", ""))


def test_it_is_small_enough_to_be_kept(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES


def test_every_axis_of_a_figure_has_a_name(notebook: Any) -> None:
    for output in outputs(notebook):
        figure = output.get("data", {}).get(FIGURE)
        if not figure:
            continue
        for trace in figure["data"]:
            for axis in ("xaxis", "yaxis"):
                name = f"{axis}{trace.get(axis, axis[0])[1:]}"
                title = figure["layout"].get(name, {}).get("title", {})
                assert title.get("text"), f"{name} of {figure['layout'].get('title')}"


def test_no_legend_covers_the_name_of_an_axis(notebook: Any) -> None:
    for output in outputs(notebook):
        layout = output.get("data", {}).get(FIGURE, {}).get("layout", {})
        legend = layout.get("legend", {})
        if legend.get("y", 1) <= 0:
            # Plotly can place one that is measured from the plot before it knows how high the plot becomes.
            assert (legend["y"], legend.get("yref"), legend.get("yanchor")) == (0, "container", "bottom")
            # Three lines of a legend, and the numbers and the name of the axis.
            assert layout["margin"]["b"] >= 110


def test_nothing_is_lost_in_a_notebook_that_is_not_trusted(notebook: Any) -> None:
    """JupyterLab removes these elements from the outputs of a notebook that somebody else ran."""
    for output in outputs(notebook):
        page = output.get("data", {}).get("text/html", "")
        assert not re.findall("<(?:svg|script|iframe|button|canvas)", page)


def test_another_machine_leaves_the_same_outputs(tmp_path: Path) -> None:
    stamp = "20260704-235959-waves-beef"
    folder = tmp_path / "notebook-x"
    cell = nbformat.v4.new_code_cell("1", metadata={"execution": {"started": "now"}}, execution_count=1)
    stream = [
        nbformat.v4.new_output("stream", text=f"{folder}/runs/{stamp} "),
        nbformat.v4.new_output("stream", text=f"{stamp} in {folder}\n"),
        nbformat.v4.new_output("stream", name="stderr", text="a.py:3: UserWarning: that\n  this()\n"),
    ]
    link = f'<b><a href="{folder}/nbgpu_runs/{stamp}/report.html" target="_blank">report</a></b>'
    stream.append(nbformat.v4.new_output("display_data", data={"text/html": link}))
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "image/svg+xml": "<svg/>"}
    cell.outputs = [*stream, nbformat.v4.new_output("display_data", data=widget)]
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": {"name": "python3", "display_name": "Python"}})
    kept(notebook, folder)
    said, page, drawn = cell.outputs
    assert page.data == {"text/html": "<b>report</b>"}
    assert said.text == "runs/20260101-000001-waves-0001 20260101-000001-waves-0001 in .\n"
    assert drawn.data == {"image/svg+xml": "<svg/>"}
    assert not cell.metadata


def test_the_first_training_wins() -> None:
    (gain_db,) = _said("00_first_run", r"gain of the autoencoder over it: ([+-][\d.]+) dB")
    assert gain_db > 0.5


def test_the_sine_reaches_both_ends() -> None:
    for apart in _said("02_your_own_recipe", r"at the ends ([\d.]+) and ([\d.]+)"):
        assert apart < 0.15


def _said(name: str, pattern: str) -> list[float]:
    notebook = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
    printed = "".join(output.get("text", "") for output in outputs(notebook))
    found = re.search(pattern, printed)
    assert found, printed
    return [float(each) for each in found.groups()]


def test_a_change_is_shown_as_text_for_review(tmp_path: Path) -> None:
    """As `git diff` shows it with the driver that the Makefile sets up."""
    (driver,) = re.findall(r"^NOTEBOOK_AS_TEXT := \$\(RUN\) (.*)$", (REPOSITORY / "Makefile").read_text(), re.M)
    (tmp_path / ".gitattributes").write_text((REPOSITORY / ".gitattributes").read_text())
    output = nbformat.v4.new_output(
        "display_data", data={"text/plain": "a curve", "image/png": "iVBORw0KGgo=", "text/html": "<b>a</b>"}
    )
    cell = nbformat.v4.new_code_cell("first = 1", outputs=[output])
    notebook = nbformat.v4.new_notebook(cells=[cell])

    def git(*arguments: str) -> str:
        command = ["git", "-c", f"diff.notebook.textconv={sys.executable} {driver}", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    nbformat.write(notebook, tmp_path / "a.ipynb")
    git("init", "-q")
    git("add", "-A")
    cell.source = "second = 2"
    output.data["text/plain"] = "another curve"
    nbformat.write(notebook, tmp_path / "a.ipynb")
    shown = git("diff")
    assert "-first = 1\n+second = 2\n" in shown
    assert "-    a curve\n+    another curve\n" in shown
    assert "iVBOR" not in shown
    assert "outputs" not in shown


@pytest.mark.parametrize("page", ["index.md", "teaching.md"])
def test_the_docs_say_the_same_time(page: str) -> None:
    rows = re.findall(r"^\| \[.*?\]\(\.\./notebooks/(\w+)\.ipynb\) \|.*\| (\d+) min \|$", _page(page), re.M)
    assert len(rows) == (len(NOTEBOOKS) if page == "index.md" else 7)
    for name, minutes in rows:
        notebook = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
        assert f"**Time:** {minutes} minute" in notebook.cells[HEAD].source, name


def _page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()
