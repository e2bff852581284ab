"""The kernel of a rank: everything in which it differs from an engine's kernel of ipyparallel.

Messages that a kernel publishes for its pages are left out, because each one takes time in four processes:
the controller forwards it and the notebook's kernel parses it, while the person waits for an empty cell.
ipyparallel's client waits for 'idle' and ignores the others; for a distributed cell the reply itself gives
the number of outputs to wait for.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ipyparallel.engine.kernel import IPythonParallelKernel

from nbgpu.engine.group import collective_timeout, straggler
from nbgpu.engine.ipykernel import (
    awaiting,
    forked,
    input_requests,
    interrupts,
    remains,
    stacks,
    streams,
    tracebacks,
)
from nbgpu.protocol.records import CellOptions, CellOutputs
from nbgpu.protocol.short_cuts import are_plain, flush_only_what_was_written

_timeline: Callable[[], AbstractContextManager[None]] = nullcontext


class RankKernel(IPythonParallelKernel):  # type: ignore[misc]
    """Answers the requests to a rank: cells, and calls from the client.

    The overrides stand in the order in which ipykernel calls them. The shell keeps its class, by whose name
    libraries recognise a notebook; what a rank's shell does differently is installed in it
    (`engine/process/installers.py`).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._outputs = None if are_plain() else OutputCounter(self.session)
        """None if the short cuts of cells are switched off (`protocol/short_cuts.py`)."""

    def _publish_status(self, status: str, channel: str, *rest: Any, **options: Any) -> None:
        """Publish a kernel's status, except for 'busy', which nobody needs, and for 'idle' after a reply that
        gives the number of outputs: with this number the client knows when the last one has arrived."""
        is_needless = self._outputs is not None and (
            status == "busy" or (channel == "shell" and self._outputs.is_counting(self.get_parent("shell")))
        )
        if not is_needless:
            super()._publish_status(status, channel, *rest, **options)

    def pre_handler_hook(self) -> None:
        """Restore the rank's signal handlers before each request; ipykernel sets its own handler of SIGINT
        here."""
        interrupts.restore_handler()
        stacks.restore_signal()
        straggler.begin()

    def init_metadata(self, parent: Any) -> Any:
        """Begin the metadata of a reply, and the count of its outputs."""
        if self._outputs is not None:
            self._outputs.begin(parent)
        return super().init_metadata(parent)

    def _publish_execute_input(self, *args: Any, **options: Any) -> None:
        """Do not publish the cell's code, which the notebook has."""
        if self._outputs is None:
            super()._publish_execute_input(*args, **options)

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        *rest: Any,
        **options: Any,
    ) -> dict[str, Any]:
        """Run a cell and return the content of the reply.

        ipykernel's own `do_execute` takes as long as an empty cell: it transforms the cell's syntax to find
        out whether the cell has to be awaited, and once more to run it, and it looks up parameters that never
        change.
        """
        pid = os.getpid()
        with with_options(self.get_parent("shell")["metadata"], self.shell):
            result = await awaiting.run(self.shell, code, silent, store_history)
            if result is None and self._outputs is None:
                plain: dict[str, Any] = await super().do_execute(
                    code, silent, store_history, user_expressions, *rest, **options
                )
                return plain
            if result is None:
                result = self.shell.run_cell(code, store_history=store_history, silent=silent)
            # The cell has called `os.fork`, and this is the child.
            if os.getpid() != pid:
                forked.end_child(result.error_before_exec or result.error_in_exec)
            return _reply(self, result, user_expressions)

    def raw_input(self, prompt: object = "") -> str:
        """Ask the person in the notebook, which ipyparallel cannot do."""
        return input_requests.ask(self.shell, prompt)

    def getpass(self, prompt: object = "Password: ", stream: object = None, **_: object) -> str:
        """Ask the person in the notebook for a text that is hidden as it is typed."""
        return input_requests.ask(self.shell, prompt, is_password=True)

    def finish_metadata(self, parent: Any, metadata: Any, reply_content: Any) -> Any:
        """Complete the metadata of a reply: the number of outputs, and the state that must be repaired before
        the next request."""
        # Text that waits is an output to be counted.
        streams.flush_all()
        metadata = super().finish_metadata(parent, metadata, reply_content)
        if self._outputs is not None:
            self._outputs.complete(metadata)
        remains.complete(metadata)
        return metadata

    def _abort_queues(self, *_: Any) -> None:
        """Do not drop the requests that follow a failed cell.

        ipykernel drops the requests that arrive shortly after an error. The client sends the call that forms
        the group again, and the next cell, as soon as it has the reply.
        """

    def post_handler_hook(self) -> None:
        """Clean up after an interrupt. The handler of SIGINT stays, which ipykernel would replace here."""
        interrupts.finish_request()


def _reply(kernel: Any, result: Any, user_expressions: dict[str, str] | None) -> dict[str, Any]:
    """Return the content of the reply to a cell, in the form of Jupyter's 'execute_reply'.

    Args:
        kernel: the rank's.
        result: IPython's ExecutionResult of the cell.
        user_expressions: expressions to evaluate after a cell that succeeded, by name.
    """
    shell = kernel.shell
    if result.success and (too_long := collective_timeout.take_error()) is not None:
        # The cell has not waited for its collective, or has caught the error. Its group is gone.
        shell.showtraceback((type(too_long), too_long, None))
        result.error_in_exec = too_long
    # In ipykernel 7.3 and later this says that the value of the last expression could not be shown.
    failed_in_showing = getattr(shell, "_last_traceback_during_displayhook", False)
    content: dict[str, Any] = {"user_expressions": {}, "payload": []}
    if result.success and not failed_in_showing:
        content["status"] = "ok"
        if user_expressions:
            content["user_expressions"] = shell.user_expressions(user_expressions)
    else:
        before = result.error_before_exec
        error = before if before is not None else result.error_in_exec
        content["status"] = "error"
        content["ename"], content["evalue"] = type(error).__name__, str(error)
        # A handler of `set_custom_exc` may have shown the error in its own way, or not at all.
        content["traceback"] = shell._last_traceback or [f"{content['ename']}: {content['evalue']}"]
        content["engine_info"] = kernel.get_engine_info(method="execute")
    content["execution_count"] = shell.execution_count - 1
    # `?` and `%load` ask the page for something here, which cannot be done for an engine.
    shell.payload_manager.clear_payload()
    return content


def prepare_shell(shell: Any, timeline: Callable[[], AbstractContextManager[None]]) -> None:
    """Keep what `with_options` needs to time a cell, and switch off the shell's history database.

    Args:
        shell: the rank's.
        timeline: returns a context in which the times of the rank's work are recorded. It is entered for the
            cells whose option `timeline` is set.
    """
    global _timeline
    _timeline = timeline
    # A cell has its number in the notebook, which comes again after a restart of the notebook's kernel. The
    # database accepts each number only once, and is of no use, because it is gone with the engine.
    shell.history_manager.enabled = False


@contextmanager
def with_options(metadata: Mapping[str, Any], shell: Any) -> Iterator[None]:
    """Give a cell the notebook's execution count, and the options that the metadata of its request hold."""
    options = CellOptions(**metadata.get(CellOptions.METADATA, {}))
    tracebacks.full = options.full
    input_requests.are_answered = options.are_answered
    if options.number:
        _set_execution_count(shell, options.number)
    try:
        with _timeline() if options.timeline else nullcontext():
            yield
    finally:
        input_requests.are_answered = False


def _set_execution_count(shell: Any, number: int) -> None:
    """Set the shell's execution count, and fill the history up to it, because `In[n]` is looked up by
    position."""
    shell.execution_count = number
    history = shell.history_manager
    for typed in (history.input_hist_parsed, history.input_hist_raw):
        typed += [""] * (number - len(typed))
    # A notebook whose kernel was restarted counts from 1 again.
    history.output_hist.pop(number, None)


def publish_less(shell: Any) -> None:
    """Leave out needless flushes of the streams, and log lines of the kernel that are no warnings."""
    # ipykernel flushes both streams twice in each request, and waits for its publishing thread each time.
    for stream in (sys.stdout, sys.stderr):
        flush_only_what_was_written(stream)
    # ipykernel makes five log lines for each request and writes one; that took a twelfth of the time of an
    # empty cell.
    log = shell.kernel.log
    getattr(log, "logger", log).setLevel(logging.WARNING)


class OutputCounter:
    """Counts the outputs of a distributed cell, for the metadata of its reply.

    Args:
        session: the kernel's, which sends the outputs.
    """

    def __init__(self, session: Any) -> None:
        self._cell: str | None = None
        self._num = 0
        self._lock = threading.Lock()  # text is published on a thread of its own
        self._send, session.send = session.send, self._send_and_count

    def begin(self, request: Any) -> None:
        """Begin to count the outputs of a request. The outputs of requests other than distributed cells are
        not counted."""
        with self._lock:
            self._cell = request["header"]["msg_id"] if CellOptions.METADATA in request["metadata"] else None
            self._num = 0

    def is_counting(self, request: Any) -> bool:
        """Return whether the reply to this request has the number of outputs."""
        return self._cell is not None and self._cell == request["header"]["msg_id"]

    def complete(self, metadata: dict[str, Any]) -> None:
        """Put the number of outputs into the metadata of the reply."""
        if self._cell is not None:
            metadata[CellOutputs.NUM] = self._num
            metadata.pop("started", None)  # a date, which ipyparallel's client takes long to parse

    def _send_and_count(self, *args: Any, **options: Any) -> Any:
        """Send a message on the session, and count it if it is an output of the running cell."""
        sent = self._send(*args, **options)
        if (
            sent is not None
            and sent["msg_type"] in CellOutputs.KINDS
            and sent["parent_header"].get("msg_id") == self._cell
        ):
            with self._lock:
                self._num += 1
        return sent
