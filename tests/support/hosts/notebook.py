"""A process on a test host that stands for a notebook's kernel: it runs cells in one namespace."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hosts.namespaces import Host

_KERNEL = """
import asyncio, contextlib, io, json, os, sys

os.chdir(sys.argv[1])
names, answers = {}, sys.stdout


def run(cell):
    output, failed = io.StringIO(), ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(compile(cell, "<cell>", "exec"), names)
        except BaseException as error:
            failed = f"{type(error).__name__}: {error}"
    print(json.dumps([output.getvalue(), failed]), file=answers, flush=True)


async def main():
    # As in a notebook, what waits for the loop runs between two cells.
    while line := await asyncio.to_thread(sys.stdin.readline):
        run(json.loads(line))


asyncio.new_event_loop().run_until_complete(main())
"""


class CellFailed(Exception):
    """What a cell raised, as '<type>: <text>'."""


class Notebook:
    """Runs cells on a host.

    Args:
        host: where.
        process: that reads the cells.
    """

    def __init__(self, host: Host, process: subprocess.Popen[str]) -> None:
        self.host = host
        self.process = process

    def begin(self, cell: str) -> None:
        """Send a cell, and return at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()

    def finish(self) -> str:
        """Wait for the cell that was sent and return what it has printed.

        Raises:
            CellFailed: it has raised.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise CellFailed(f"the notebook ended with {self.process.wait()}")
        output, failed = json.loads(line)
        if failed:
            raise CellFailed(f"{failed}\n{output}")
        return str(output)

    def run(self, cell: str) -> str:
        """Run a cell to its end and return what it prints."""
        self.begin(cell)
        return self.finish()

    def value(self, expression: str) -> Any:
        """The value of an expression that JSON can say."""
        return json.loads(self.run(f"import json; print(json.dumps({expression}))"))

    def interrupt(self) -> None:
        """Do what the notebook's Stop button does."""
        self.host.send_signal(self.process, signal.SIGINT)


@contextmanager
def open_notebook(host: Host, environment: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """Start a notebook on a host, in this process's folder. It is killed at the end of the block."""
    command = [sys.executable, "-c", _KERNEL, str(Path.cwd())]
    pipe = subprocess.PIPE
    process = host.popen(command, stdin=pipe, stdout=pipe, text=True, environment=environment)
    try:
        yield Notebook(host, process)
    finally:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout):
            assert end is not None
            end.close()
