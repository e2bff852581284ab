"""Distributed cells that wait behind one another, and without a page: nbclient, nbconvert, a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import launching
import nbformat
import pytest
from kernel import Kernel, kernel, rest_after_error
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import v4

START = f"%load_ext nbgpu\n%nbgpu start {launching.flags()}"
FAILS_ON_RANK_1 = "%%distributed\nif rank == 1:\n    raise ValueError('on purpose')\ndist.barrier()"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(START).status == "ok"
        yield started
        assert started.run("%nbgpu stop").stdout == "stopped\n"


def _run_all(notebook: Kernel, cells: list[str]) -> list[str]:
    """Sends all cells at once, as "Run All" does; the status of each."""
    message_ids = [notebook.client.execute(cell, allow_stdin=False) for cell in cells]
    status_by_id = {}
    while len(status_by_id) < len(message_ids):
        reply = notebook.client.get_shell_msg(timeout=180)
        status_by_id[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
    statuses = [status_by_id[message_id] for message_id in message_ids]
    if "error" in statuses:
        rest_after_error()
    return statuses


def test_cells_that_wait_run_in_their_order(notebook: Kernel) -> None:
    notebook.run("seen = []\n%distributed seen = []")
    slow = "%%distributed\nimport time\ntime.sleep(0.5)\nseen.append('slow')"
    cells = [slow, "seen.append('plain')", "%distributed seen.append('line')", slow.replace("0.5", "0")]
    cells += ["%%distributed --ranks 1\nseen.append('one')", "%%distributed --into seen_by_rank\nseen"]
    assert _run_all(notebook, cells) == ["ok"] * 6
    assert notebook.run("seen").value == "['plain']"
    expected = ["slow", "line", "slow"]
    assert notebook.run("seen_by_rank").value == str({0: expected, 1: [*expected, "one"]})


def test_a_failed_cell_stops_those_behind_it(notebook: Kernel) -> None:
    notebook.run("seen = 0\n%distributed seen = 0")
    cells = ["%distributed seen += 1", FAILS_ON_RANK_1, "%%distributed\nseen += 10", "seen += 10"]
    assert _run_all(notebook, cells) == ["ok", "error", "aborted", "aborted"]
    done = notebook.run("%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(seen, int(total))")
    assert done.stdout == "[0-1] (1, 2)\n"
    assert notebook.run("seen").value == "0"


def test_a_cell_for_some_ranks_leaves_the_others_alone(notebook: Kernel) -> None:
    notebook.run("%distributed touched = False")
    notebook.run("%%distributed --ranks 1\ntouched = True")
    assert notebook.run("%distributed touched").stdout == "[0] False\n[1] True\n"
    failed = notebook.run("%%distributed --ranks 0\n1 / 0")
    assert "on rank 0:" in failed.error
    assert failed.stderr == ""
    late = notebook.run("%%distributed --ranks 1 --timeout 1\nimport time\ntime.sleep(60)", timeout_s=30)
    assert "rank(s) 1 did not finish within 1 s" in late.error
    assert notebook.run("%distributed touched").stdout == "[0] False\n[1] True\n"


def test_a_timeout_ends_a_collective_that_would_never_end(notebook: Kernel) -> None:
    code = "%%distributed --timeout 1\nif rank == 0:\n    dist.barrier()"
    assert "rank(s) 0 did not finish within 1 s" in notebook.run(code, timeout_s=30).error
    code = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"
    assert notebook.run(code).stdout == "[0-1] 2\n"


def test_a_console_waits_for_the_end_of_the_cell(notebook: Kernel) -> None:
    def is_complete(code: str) -> str:
        notebook.client.is_complete(code)
        status: str = notebook.client.get_shell_msg(timeout=20)["content"]["status"]
        return status

    assert is_complete("%%distributed") == "incomplete"
    assert is_complete("%%distributed\nprint(rank)") == "incomplete"
    assert is_complete("%%distributed\nprint(rank)\n\n") == "complete"


def _of_cells(*sources: str) -> Any:
    return v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])


@pytest.mark.long
def test_nbclient_stops_at_a_failed_cell(tmp_path: Path) -> None:
    content = _of_cells(START, "%distributed rank", FAILS_ON_RANK_1, "%distributed 'never'")
    with pytest.raises(CellExecutionError, match="on purpose"):
        NotebookClient(content, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [o.output_type for o in content.cells[1].outputs] == ["stream"]
    assert content.cells[2].outputs[-1].ename == "RankError"
    assert content.cells[3].outputs == []


@pytest.mark.long
def test_nbconvert_executes_and_keeps_plain_text(tmp_path: Path) -> None:
    tells = "%%distributed\nfor i in range(30):\n    print('line', i, 'of', rank)"
    long = "%%distributed\nimport time\nprint('begun')\ntime.sleep(3)\nprint('done')"
    nbformat.write(_of_cells(START, tells, long, "%nbgpu stop"), tmp_path / "tried.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "tried.ipynb"]
    done = subprocess.run(
        [*command, "--output=executed"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    assert "widgets" not in content.metadata
    outputs = [output for cell in content.cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream"}
    texts = ["".join(output.text for output in cell.outputs) for cell in content.cells]
    assert texts[1].count("line 29 of") == 2
    assert [line.split()[-1] for line in texts[2].splitlines()] == ["begun", "done"]


class Terminal:
    """An IPython without a kernel, as a person at a terminal has it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, wanted: str, timeout_s: float = 60) -> str:
        """What is shown up to these words, without colours."""
        shown = ""
        end_s = time.monotonic() + timeout_s
        while not re.search(wanted, shown):
            assert time.monotonic() < end_s, f"{wanted!r} is not in {shown!r}"
            if select([self._descriptor], [], [], 0.2)[0]:
                shown += re.sub(r"\x1b\[[0-9;]*m", "", os.read(self._descriptor, 65536).decode())
        return shown

    def run(self, code: str) -> str:
        # A cell magic ends with an empty line; IPython's plain prompt asks for two.
        self.type(code + ("\n\n\n" if code.startswith("%%") else "\n"))
        return self.until(r"\nIn \[\d+\]: ")


@contextmanager
def _terminal() -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--no-term-title"]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # Ctrl-C is for whom the terminal controls.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env=os.environ | {"TERM": "dumb", "COLUMNS": "120"},
    )
    os.close(theirs)
    try:
        terminal = Terminal(ours)
        terminal.until(r"In \[1\]: ")
        yield terminal
        terminal.type("exit\n")
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.long
def test_a_terminal_without_a_kernel(tmp_path: Path) -> None:
    collective = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(kept, int(total))"
    with _terminal() as terminal:
        terminal.run("%load_ext nbgpu")
        assert "2 CPU ranks, gloo" in terminal.run("%nbgpu start --gpus none --ranks 2")
        told = terminal.run("%%distributed\nkept = 7\nprint('from', rank)")
        assert "[0] from 0" in told
        assert "[1] from 1" in told

        terminal.type("%%distributed\nprint('waits', rank)\nif rank == 0:\n    dist.barrier()\n\n\n")
        terminal.until(r"\[0\] waits")
        terminal.type("\x03")
        assert "the ranks keep their variables" in terminal.until(r"\nIn \[\d+\]: ")
        assert "[0-1] (7, 2)" in terminal.run(collective)

        assert "ValueError: on purpose" in terminal.run(FAILS_ON_RANK_1)
        assert "[0-1] (7, 2)" in terminal.run(collective)

        terminal.type("%%distributed --ranks 1\nname = input('who? ')\n\n\n")
        terminal.until(r"rank 1: who\? ")
        terminal.type("me\n")
        terminal.until(r"\nIn \[\d+\]: ")
        assert "[1] 'me'" in terminal.run("%%distributed --ranks 1\nname")
        below_a_comment = r"get_ipython().run_cell('# one\n%%distributed\nprint(10 + rank)').success"
        assert "[1] 11" in terminal.run(below_a_comment)
        assert "stopped" in terminal.run("%nbgpu stop")
