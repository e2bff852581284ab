"""Executing a notebook from a terminal: what is said, what is left, and that the page needs no network."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import REPOSITORY, chromium
from nbformat import v4

PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20"><circle cx="10" cy="10" r="9"/></svg>'
)
CELLS = [
    v4.new_markdown_cell("# A title\n\nWith $x^2$ and *words*."),
    v4.new_code_cell("\ncounted = 21\nprint(counted * 2)"),
    v4.new_code_cell(""),
    v4.new_code_cell("from IPython.display import SVG\nSVG(" + repr(PICTURE) + ")"),
    v4.new_code_cell(
        "from pathlib import Path\nPath('runs').mkdir()\nPath('runs/report.html').write_text('a')\n"
        "import atexit, os; atexit.register(os.write, 2, b'last words\\n');"
    ),
]


def _notebook(folder: Path, *more: str) -> Path:
    path = folder / "tried.ipynb"
    nbformat.write(v4.new_notebook(cells=[*CELLS, *(v4.new_code_cell(source) for source in more)]), path)
    return path


def _command(notebook: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", "nbgpu.client.demo", str(notebook), str(folder)]


def _execute(notebook: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(notebook, folder), capture_output=True, text=True, timeout=360, check=False, cwd=REPOSITORY
    )


def test_a_kernel_that_does_not_start_is_told_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ipykernel_launcher.py").write_text("raise SystemExit('the disk is full')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = _execute(_notebook(tmp_path), tmp_path / "out")
    assert done.returncode == 1
    assert "the disk is full\nRuntimeError: Kernel died before replying" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with an executed notebook, and what was printed meanwhile."""
    folder = tmp_path_factory.mktemp("demo")
    done = _execute(_notebook(folder), folder / "out")
    assert done.returncode == 0, done.stderr
    # What a kernel says as it ends well is not passed on.
    assert done.stderr == ""
    assert "last words" not in done.stdout
    return folder / "out", done.stdout


def test_every_cell_has_a_line_with_its_number_and_first_words(executed: tuple[Path, str]) -> None:
    lines = executed[1].splitlines()
    assert [line.partition(" s  ")[2] for line in lines[:3]] == [
        "cell 1/3  counted = 21",
        "cell 2/3  from IPython.display import SVG",
        "cell 3/3  from pathlib import Path",
    ]


def test_it_says_where_everything_is(executed: tuple[Path, str]) -> None:
    folder, said = executed
    for name in ("tried.ipynb", "tried.html", "runs/report.html"):
        assert str(folder / name) in said
        assert (folder / name).is_file()


def test_the_notebook_has_its_outputs(executed: tuple[Path, str]) -> None:
    content = nbformat.read(executed[0] / "tried.ipynb", as_version=4)
    assert content.cells[1].outputs[0].text == "42\n"
    assert "image/svg+xml" in content.cells[3].outputs[0].data


@pytest.mark.browser
def test_the_page_opens_with_no_network(executed: tuple[Path, str]) -> None:
    from playwright.sync_api import sync_playwright

    page_url = (executed[0] / "tried.html").as_uri()
    asked: list[str] = []
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(page_url, wait_until="networkidle")
        assert page.locator("h1").inner_text().startswith("A title")
        assert page.get_by_text("42", exact=True).is_visible()
        assert page.locator("img").evaluate("image => image.naturalWidth") == 20
        browser.close()
    assert [url for url in asked if not url.startswith(("data:", page_url))] == []
    assert problems == []


def test_a_failing_cell_ends_it_with_its_traceback(tmp_path: Path) -> None:
    path = _notebook(tmp_path, "1 / 0", "print('never')")
    saved = nbformat.read(path, as_version=4)
    saved.cells[-1].outputs = [v4.new_output("stream", text="of another day")]
    nbformat.write(saved, path)
    done = _execute(path, tmp_path / "out")
    assert done.returncode == 1
    assert "cell 4/5  1 / 0  raised" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "cell 5/5" not in done.stdout
    content = nbformat.read(tmp_path / "out" / "tried.ipynb", as_version=4)
    assert content.cells[1].outputs[0].text == "42\n", "what ran before is kept to look at"
    assert content.cells[-1].outputs == [], "what did not run has no outputs"


def test_a_dying_kernel_ends_it_too(tmp_path: Path) -> None:
    source = "import os; os.write(2, b'last words\\n'); os._exit(1)"
    done = _execute(_notebook(tmp_path, source), tmp_path / "out")
    assert done.returncode == 1
    assert "last words\nDeadKernelError" in done.stdout
    assert done.stderr == ""


def test_ctrl_c_ends_it_and_its_kernel(tmp_path: Path) -> None:
    source = "import os; print(os.getpid(), file=open('pid', 'w', encoding='utf8'))\nimport time; time.sleep(600)"
    with subprocess.Popen(
        _command(_notebook(tmp_path, source), tmp_path / "out"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    ) as process:
        deadline_s = time.monotonic() + 300
        pid = tmp_path / "out" / "pid"
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=360)
    assert process.returncode == 130, errors
    assert "Traceback" not in said + errors
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_a_missing_notebook_is_named(tmp_path: Path) -> None:
    done = _execute(tmp_path / "missing.ipynb", tmp_path / "out")
    assert done.returncode == 2
    assert f"there is no notebook {tmp_path / 'missing.ipynb'}" in done.stderr


def test_a_terminal_shows_the_cell_that_runs_now(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = _command(_notebook(tmp_path, "import time; time.sleep(1.2)"), tmp_path / "out")
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=REPOSITORY, env=environment) as process:
        os.close(theirs)
        shown = b""
        # Linux gives an input/output error, not an end of file, when the other side is closed.
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    running, _, finished = shown.decode().partition("cell 4/4  import time; time.sleep(1.2)\r\n")
    assert "cell 4/4" in running
    assert "0:00:01" in running, "the seconds go on while the cell does"
    assert "report" in finished
