"""A real JupyterLab and a real Chromium, both ended by their own process ids."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from conftest import REPOSITORY
from playwright.sync_api import ConsoleMessage, Page, expect, sync_playwright

ARTIFACTS = REPOSITORY / "tests" / "_artifacts"

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_TIMEOUT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Lab:
    """A running JupyterLab whose files are in `root`."""

    def __init__(self, root: Path, url: str, token: str) -> None:
        self.root = root
        self.url = url
        self.token = token

    def write_notebook(self, name: str, cells: Sequence[str]) -> Path:
        # Without a kernel's name JupyterLab asks for one in a dialog.
        kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernelspec})
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        path = self.root / name
        nbformat.write(notebook, path)
        return path

    def shut_kernels_down(self) -> None:
        """Ends every kernel; each cluster ends with its own."""
        for session in self._ask("GET", "/api/sessions"):
            self._ask("DELETE", f"/api/sessions/{session['id']}")

    def num_kernels(self) -> int:
        return len(self._ask("GET", "/api/kernels"))

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(
            self.url + path, method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def page_url(self, path: str) -> str:
        return f"{self.url}/{path}?token={self.token}"


@contextmanager
def jupyter_lab(folder: Path, config: str = "") -> Iterator[Lab]:
    """Starts JupyterLab with settings and files of its own under `folder`; ends it and its kernels.

    Args:
        folder: where all that it writes goes.
        config: Python that the server runs as it starts, as the content of a configuration file.
    """
    root = folder / "notebooks"
    root.mkdir()
    port, token = free_port(), secrets.token_hex(16)
    places = {
        name: str(folder / name.lower())
        for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    for place in places.values():
        Path(place).mkdir(mode=0o700)
    _leave_pages_to_the_test(folder / "settings")
    (folder / "jupyter_config_dir" / "jupyter_server_config.py").write_text(config)
    # As in an installation, but of the working tree, whatever is installed.
    (folder / "labextensions").mkdir()
    (folder / "labextensions" / "nbgpu").symlink_to(REPOSITORY / "nbgpu" / "labextension")
    environment = {
        **os.environ,
        **places,
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
    }
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"),
        *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"),
        *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"),
        "--ServerApp.jpserver_extensions={'nbgpu.server': True}",
        f"--LabApp.extra_labextensions_path={folder / 'labextensions'}",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--KernelManager.shutdown_wait_time=3",
    ]
    with (folder / "lab.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=root, start_new_session=True
        )
    lab = Lab(root, f"http://127.0.0.1:{port}", token)
    try:
        _wait_until_up(lab, process, folder / "lab.log")
        yield lab
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _leave_pages_to_the_test(settings: Path) -> None:
    """JupyterLab asks once whether it may fetch news, in a box that covers a corner of the page; and a save
    that meets the automatic one asks which of the two is to stay, and waits for an answer."""
    chosen = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "docmanager-extension/plugin": {"autosave": False},
    }
    for name, values in chosen.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))


def _wait_until_up(lab: Lab, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError) as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}") from error
            time.sleep(0.1)


@contextmanager
def browser_page(chromium: str, folder: Path) -> Iterator[Page]:
    """One page of a Chromium with a fresh profile in `folder`."""
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(folder / "chromium"),
            executable_path=chromium,
            headless=True,
            args=CHROMIUM_ARGS,
            viewport={"width": 1280, "height": 1000},
        )
        try:
            page = context.pages[0]
            page.set_default_timeout(240_000)
            # Playwright's own 5 s are short where something else runs on the machine.
            expect.set_options(timeout=120_000)
            yield page
        finally:
            context.close()


def complaints_of(page: Page) -> list[str]:
    """The complaints of nbgpu's own scripts in a page: a list that grows while the page is open."""
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        # JupyterLab has errors of its own in the console; ours name the panel or its widget library. That a
        # plugin took long to load is said on a busy machine.
        is_ours = re.search("nbgpu|anywidget|plotly", message.text, re.IGNORECASE)
        if message.type in ("error", "warning") and is_ours and "ms to activate" not in message.text:
            complaints.append(message.text)

    page.on("console", hear)
    # The panel's script comes from a blob, JupyterLab's own from files.
    page.on("pageerror", lambda e: complaints.append(f"{e}") if "blob:" in (e.stack or "") else None)
    return complaints


def screenshot(page: Page, name: str) -> None:
    """Keep a picture of the page for a person to look at, as tests/_artifacts/NAME.png."""
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png")


class Notebook:
    """A notebook that is open in a page of JupyterLab."""

    def __init__(self, page: Page, lab: Lab, name: str) -> None:
        self.page = page
        self.lab = lab
        self.name = name

    def open(self) -> None:
        self.page.goto(f"{self.lab.page_url(f'lab/tree/{self.name}')}&reset")
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        self.page.locator(".jp-NotebookPanel").wait_for()
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell?.currentWidget?.context?.sessionContext?.session?.kernel"
            "?.connectionStatus === 'connected'"
            " && jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.status !== 'unknown'"
        )

    def run_cell(self, index: int) -> None:
        """Asks for a cell to be run and returns at once."""
        self.page.evaluate(
            """index => {
                const notebook = jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = index;
                notebook.deselectAll();
                void jupyterapp.commands.execute('notebook:run-cell');
            }""",
            index,
        )

    def wait_until_idle(self, timeout_s: float = 240) -> None:
        """Waits until no cell is running or waiting to run."""
        self.page.wait_for_function(
            "() => ![...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')]"
            ".some(p => p.textContent.includes('*'))"
            " && jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.status === 'idle'",
            timeout=timeout_s * 1000,
        )

    def save(self) -> Any:
        """Saves, and returns the notebook as it is on disk."""
        # The page does not wait for it: a question of JupyterLab's would hold the test up without a limit.
        self.page.evaluate("() => void jupyterapp.commands.execute('docmanager:save')")
        self.page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
        return nbformat.read(self.lab.root / self.name, as_version=4)

    def set_theme(self, name: str) -> None:
        self.page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)
        # JupyterLab lays its splash over the page for as long as the style sheet is on its way.
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")

    def in_kernel(self, code: str) -> str:
        """Runs code in the kernel with no cell, and returns what it printed."""
        printed: str = self.page.evaluate(
            """async code => {
                const kernel = jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
                let printed = '';
                const future = kernel.requestExecute({ code, store_history: false });
                future.onIOPub = m => { printed += m.content.text ?? m.content.traceback?.join('\\n') ?? ''; };
                await future.done;
                return printed;
            }""",
            code,
        )
        return printed


class Notebook7(Notebook):
    """A notebook that is open in Notebook 7, which has the parts of JupyterLab."""

    def open(self) -> None:
        self.page.goto(self.lab.page_url(f"notebooks/{self.name}"))
        self.wait_for_kernel()


class ClassicNotebook(Notebook):
    """A notebook that is open in nbclassic, the front end of Notebook 6."""

    def open(self) -> None:
        self.page.goto(self.lab.page_url(f"nbclassic/notebooks/{self.name}"))
        self.wait_for_kernel()

    def wait_for_kernel(self) -> None:
        self.page.wait_for_function(
            "() => window.Jupyter?.notebook?._fully_loaded && Jupyter.notebook.kernel?.is_connected()"
        )

    def run_cell(self, index: int) -> None:
        self.page.evaluate("index => Jupyter.notebook.execute_cells([index])", index)

    def wait_until_idle(self, timeout_s: float = 240) -> None:
        self.page.wait_for_function(
            "() => !Jupyter.notebook.kernel_busy"
            " && !Jupyter.notebook.get_cells().some(cell => cell.element.hasClass('running'))",
            timeout=timeout_s * 1000,
        )

    def save(self) -> Any:
        self.page.evaluate("() => Jupyter.notebook.save_notebook()")
        return nbformat.read(self.lab.root / self.name, as_version=4)
