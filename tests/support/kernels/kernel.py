"""A real IPython kernel, driven as a notebook drives it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

# jupyter_client makes one event loop for the life of the process; made here, it is no single test's leftover.
ensure_event_loop()

_WIDGET = "application/vnd.jupyter.widget-view+json"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Done:
    """What a cell left behind."""

    status: str = "ok"
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    value: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    """What displays were changed to, in order."""
    written: str = ""
    """Both streams, as their messages came."""
    prompts: list[str] = field(default_factory=list)
    """What was asked for with input()."""
    took_s: float = 0.0

    def said(self, *ranks: int) -> list[list[str]]:
        """The lines on stdout that each of these ranks has said; one that several said carries all their
        numbers."""
        labelled = [re.fullmatch(r"\[([\d,-]+)\] ?(.*)", line) for line in self.stdout.splitlines()]
        assert all(labelled), self.stdout
        return [[m[2] for m in labelled if m and rank in _numbers(m[1])] for rank in ranks]


def _numbers(ranks: str) -> set[int]:
    """The ranks of a label such as 0-2,5."""
    runs = [part.partition("-") for part in ranks.split(",")]
    return {rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1)}


class Kernel:
    """Runs cells one after the other."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def run(
        self,
        code: str,
        meanwhile: Callable[[], None] | None = None,
        timeout_s: float = 240,
        answers: Sequence[str | Callable[[], None]] = (),
        allow_stdin: bool | None = None,
        once_shown: str = "",
    ) -> Done:
        """Runs one cell; `meanwhile` is called once, after its first line of output or first display that is
        no widget and in whose text the pattern `once_shown` is found.

        `answers` are typed in, one for each question; one that can be called is called in place of an answer.
        Without `allow_stdin` the kernel takes it that nobody looks, as with nbclient; where it is None,
        `answers` decide.
        """
        started_s = time.monotonic()
        done = Done()
        message_id = self.client.execute(
            code, store_history=True, allow_stdin=bool(answers) if allow_stdin is None else allow_stdin
        )
        to_type = list(answers)
        while True:
            left_s = timeout_s - (time.monotonic() - started_s)
            assert left_s > 0, f"the cell did not end within {timeout_s} s: {code}"
            # jupyter_client 7 has no msg_ready that can be called here.
            with suppress(Empty):
                done.prompts.append(self.client.get_stdin_msg(timeout=0)["content"]["prompt"])
                answer = to_type.pop(0) if to_type else (lambda: None)
                answer() if callable(answer) else self.client.input(answer)
            try:
                message = self.client.get_iopub_msg(timeout=min(left_s, 0.1 if answers else 1))
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    text = _ANSI.sub("", content["text"])
                    setattr(done, content["name"], getattr(done, content["name"]) + text)
                    done.written += text
                case "execute_result":
                    done.value = content["data"]["text/plain"]
                case "display_data":
                    done.displays.append(content["data"])
                case "update_display_data":
                    done.updates.append(content["data"])
                case "error":
                    done.error = _ANSI.sub("", "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    break
            if meanwhile is not None and _shows(message, once_shown):
                meanwhile()
                meanwhile = None
        while (reply := self.client.get_shell_msg(timeout=180))["parent_header"].get("msg_id") != message_id:
            pass
        done.status = reply["content"]["status"]
        if done.status == "aborted":
            rest_after_error()
            left_s = timeout_s - (time.monotonic() - started_s)
            return self.run(code, meanwhile, left_s, answers, allow_stdin, once_shown)
        done.took_s = time.monotonic() - started_s
        return done


def _shows(message: Mapping[str, Any], pattern: str) -> bool:
    """Whether a message is output of a cell, and no widget, with this pattern in its text."""
    if message["msg_type"] not in ("stream", "display_data", "update_display_data"):
        return False
    content = message["content"]
    data = content.get("data", {})
    return _WIDGET not in data and bool(re.search(pattern, content.get("text", data.get("text/plain", ""))))


def rest_after_error() -> None:
    """For a moment kernels of older versions of ipykernel drop what comes after a plain error, too."""
    time.sleep(0.2)


@contextmanager
def kernel(
    command: Sequence[str] = (), environment: Mapping[str, str | None] | None = None, **connection: Any
) -> Iterator[Kernel]:
    """Starts a kernel and ends it with all that it started.

    Args:
        command: starts it, where it is not this Python's own; "{connection_file}" stands for that file.
        environment: what it has beside this process's own; a variable that is None is left out.
        connection: how the kernel is reached where it is not by TCP on loopback, as a KernelManager takes
            it.
    """
    variables = {**os.environ, **(environment or {})}
    present = {name: value for name, value in variables.items() if value is not None}
    try:
        manager, client = _started(command, present, connection)
    except RuntimeError as error:
        # Another process can take a port between its choice and the kernel's start. Nothing of nbgpu runs
        # in the kernel by then.
        print(f"a kernel is started once more: {error}")
        manager, client = _started(command, present, connection)
    try:
        yield Kernel(manager, client)
    finally:
        _end(manager, client)


def _started(
    command: Sequence[str], variables: dict[str, str], connection: Mapping[str, Any]
) -> tuple[KernelManager, BlockingKernelClient]:
    """A kernel that answers; RuntimeError if it ends or does not within two minutes."""
    manager = KernelManager(kernel_name="python3", **connection)
    if command:
        assert manager.kernel_spec is not None
        manager.kernel_spec.argv = list(command)
    manager.start_kernel(env=variables)
    client = manager.client()
    # Without the heartbeat, which connects anew after each second in which a busy machine did not answer it.
    client.start_channels(hb=False)
    try:
        client.wait_for_ready(timeout=120)
    except RuntimeError:
        _end(manager, client)
        raise
    return manager, client


def _end(manager: KernelManager, client: BlockingKernelClient) -> None:
    client.stop_channels()
    manager.shutdown_kernel(now=False)
    manager.context.destroy(linger=0)
