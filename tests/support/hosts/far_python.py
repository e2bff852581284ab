"""A Python that stays on a test host and runs what it is sent, as a notebook's kernel runs cells."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol, Self

from hosts.namespaces import Host

_SERVE = """
import asyncio, contextlib, faulthandler, io, json, os, signal, sys, traceback
faulthandler.register(signal.SIGUSR2)
os.chdir(sys.argv[1])
names = {}
answers = sys.stdout

def run(code):
    said = io.StringIO()
    failed = ""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            exec(compile(code, "<sent>", "exec"), names)
        except BaseException as error:
            failed = type(error).__name__
            said.write(str(error))
            names["trace"] = traceback.format_exc()
    print(json.dumps([failed, said.getvalue()]), file=answers, flush=True)

async def serve():
    # What waits for the loop runs between two cells.
    while line := await asyncio.to_thread(sys.stdin.readline):
        run(json.loads(line))

asyncio.new_event_loop().run_until_complete(serve())
"""


class Place(Protocol):
    """Where a program can be started: a test host, or a job on one."""

    name: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program there."""


class FarPython:
    """One Python process on a test host, in this process's folder.

    Args:
        host: where it runs.
        patience_s: how long one answer may take.
    """

    def __init__(self, host: Place, patience_s: float) -> None:
        pipe = subprocess.PIPE
        self._patience_s = patience_s
        command = [sys.executable, "-u", "-c", _SERVE, str(Path.cwd())]
        self.process = host.popen(command, stdin=pipe, stdout=pipe, text=True)
        self._answers: Queue[str] = Queue()
        self.reader = threading.Thread(target=self._read, name=f"answers of {host.name}", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def send(self, code: str) -> None:
        """Have it run code, and return at once."""
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, str]:
        """Wait for the end of the code that was sent. Returns the name of the error that it raised, empty for
        none, and all that it printed, which the error's message ends."""
        try:
            line = self._answers.get(timeout=self._patience_s)
        except Empty:
            # Where all its threads are stands in the report of the test then.
            Host.send_signal(self.process, signal.SIGUSR2)
            time.sleep(1.0)
            raise TimeoutError(f"no answer within {self._patience_s:g} s") from None
        if not line:
            raise EOFError(f"the Python there has ended with {self.process.wait()}")
        failed, said = json.loads(line)
        return failed, said

    def run(self, code: str) -> str:
        """Have it run code, and return what that prints; AssertionError if the code raises."""
        self.send(code)
        failed, said = self.answer()
        assert not failed, f"{failed}: {said}"
        return said

    def value(self, expression: str) -> Any:
        """The value of an expression there, if JSON can say it."""
        return json.loads(self.run(f"import json; print(json.dumps({expression}))"))

    def fails(self, code: str) -> tuple[str, str]:
        """Have it run code that raises; return the name of the error, and all that was printed."""
        self.send(code)
        failed, said = self.answer()
        assert failed, f"nothing was raised: {said}"
        return failed, said

    def press_stop(self) -> None:
        """Interrupt the code that runs, as the stop button does."""
        Host.send_signal(self.process, signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
