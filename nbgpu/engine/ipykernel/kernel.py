"""The kernel of a rank: everything in which it differs from an engine's kernel of ipyparallel."""

from __future__ import annotations

import os
from typing import Any

from ipyparallel.engine.kernel import IPythonParallelKernel

from nbgpu.engine.group import collective_timeout, straggler
from nbgpu.engine.ipykernel import (
    awaiting,
    cell_options,
    forked,
    input_requests,
    interrupts,
    publishing,
    remains,
    stacks,
    streams,
)
from nbgpu.protocol.short_cuts import are_plain


class RankKernel(IPythonParallelKernel):  # type: ignore[misc]
    """Answers the requests to a rank: cells, and calls from the client.

    The overrides stand in the order in which ipykernel calls them. The shell keeps its class, by whose name
    libraries recognise a notebook; what a rank's shell does differently is installed in it
    (`engine/process/installers.py`).
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._outputs = None if are_plain() else publishing.OutputCounter(self.session)
        """None where cells take no short cuts."""

    def _publish_status(self, status: str, channel: str, *rest: Any, **options: Any) -> None:
        """Leave out 'busy', and 'idle' after a reply that says how many outputs there are."""
        is_needless = self._outputs is not None and (
            status == "busy" or (channel == "shell" and self._outputs.is_counting(self.get_parent("shell")))
        )
        if not is_needless:
            super()._publish_status(status, channel, *rest, **options)

    def pre_handler_hook(self) -> None:
        """Restore the signal handlers that the rank needs, in place of ipykernel's handler of SIGINT."""
        interrupts.take_back()
        stacks.take_signal_back()
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
        """Run a cell and return the answer.

        ipykernel's `do_execute` takes as long as an empty cell itself: it transforms the cell's syntax to
        find out whether the cell has to be awaited, and once more to run it, and it looks up parameters that
        never change.
        """
        pid = os.getpid()
        with cell_options.applied(self.get_parent("shell")["metadata"], self.shell):
            result = await awaiting.run(self.shell, code, silent, store_history)
            if result is None and self._outputs is None:
                plain: dict[str, Any] = await super().do_execute(
                    code, silent, store_history, user_expressions, *rest, **options
                )
                return plain
            if result is None:
                result = self.shell.run_cell(code, store_history=store_history, silent=silent)
            if os.getpid() != pid:
                forked.end_child(result.error_before_exec or result.error_in_exec)
            return _reply(self, result, user_expressions)

    def raw_input(self, prompt: object = "") -> str:
        """Ask the person in the notebook, which ipyparallel cannot do."""
        return input_requests.ask(self.shell, prompt)

    def getpass(self, prompt: object = "Password: ", stream: object = None, **_: object) -> str:
        """Ask the person in the notebook for what is not shown as it is typed."""
        return input_requests.ask(self.shell, prompt, is_password=True)

    def finish_metadata(self, parent: Any, metadata: Any, reply_content: Any) -> Any:
        """Complete the metadata of a reply: the number of outputs, and what is to be repaired."""
        # Text that waits is an output to be counted.
        streams.send_what_waits()
        metadata = super().finish_metadata(parent, metadata, reply_content)
        if self._outputs is not None:
            self._outputs.complete(metadata)
        remains.complete(metadata)
        return metadata

    def _abort_queues(self, *_: Any) -> None:
        """Answer the requests that follow a failed cell, and do not drop them.

        ipykernel drops what arrives before it has come to rest after an error. The client sends the call that
        forms the group again, and the next cell, as soon as it has the answer.
        """

    def post_handler_hook(self) -> None:
        """Tidy up after an interrupt, and leave the handler of SIGINT."""
        interrupts.tidy_up()


def _reply(kernel: Any, result: Any, user_expressions: dict[str, str] | None) -> dict[str, Any]:
    """Return the content of the reply to a cell, as ipykernel does.

    Args:
        kernel: the rank's.
        result: IPython's, of the cell.
        user_expressions: what the request asks to be evaluated after a cell that succeeded.
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
