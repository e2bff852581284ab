"""How an engine runs a cell, and what it replies."""

from __future__ import annotations

from typing import Any

from nbgpu.engine.group import collective_timeout
from nbgpu.engine.ipykernel import awaiting
from nbgpu.protocol.plain_cells import are_plain


def answer_cells(kernel: Any) -> None:
    """Make the engine reply to cells as ipykernel does, but faster, and also to cells with an `await` of
    their own.

    ipykernel's `do_execute` takes as long as an empty cell itself: it transforms the cell's syntax to find
    out whether the cell has to be awaited, and once more to run it, and it looks up parameters that never
    change. IPython then asks again whether the cell has to be awaited.
    """
    shell = kernel.shell
    by_ipykernel = kernel.do_execute
    should_run_async = shell.should_run_async
    if not are_plain():
        shell.should_run_async = lambda raw_cell, **options: (
            awaiting.may_await(options.get("transformed_cell") or raw_cell)
            and should_run_async(raw_cell, **options)
        )

    async def do_execute(
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        *rest: Any,
        **options: Any,
    ) -> dict[str, Any]:
        if (result := await awaiting.run(shell, code, silent, store_history)) is None:
            if are_plain():
                plain: dict[str, Any] = await by_ipykernel(
                    code, silent, store_history, user_expressions, *rest, **options
                )
                return plain
            result = shell.run_cell(code, store_history=store_history, silent=silent)
        if result.success and (too_long := collective_timeout.take()) is not None:
            # The cell has not waited for its collective, or has caught the error. Its group is gone.
            shell.showtraceback((type(too_long), too_long, None))
            result.error_in_exec = too_long
        # In ipykernel 7.3 and later this says that the value of the last expression could not be shown.
        failed_in_showing = getattr(shell, "_last_traceback_during_displayhook", False)
        answer: dict[str, Any] = {"user_expressions": {}, "payload": []}
        if result.success and not failed_in_showing:
            answer["status"] = "ok"
            if user_expressions:
                answer["user_expressions"] = shell.user_expressions(user_expressions)
        else:
            before = result.error_before_exec
            error = before if before is not None else result.error_in_exec
            answer["status"] = "error"
            answer["ename"], answer["evalue"] = type(error).__name__, str(error)
            # A handler of `set_custom_exc` may have shown the error in its own way, or not at all.
            answer["traceback"] = shell._last_traceback or [f"{answer['ename']}: {answer['evalue']}"]
            answer["engine_info"] = kernel.get_engine_info(method="execute")
        answer["execution_count"] = shell.execution_count - 1
        # `?` and `%load` ask the page for something here, which cannot be done for an engine.
        shell.payload_manager.clear_payload()
        return answer

    kernel.do_execute = do_execute


def keep_requests_after_errors(kernel: Any) -> None:
    """Answer the requests that follow a failed cell instead of dropping them.

    ipykernel drops what arrives before it has come to rest after an error. The client sends the call that
    forms the group again, and the next cell, as soon as it has the answer. The name is private, and the same
    from 6.29 to 7.4.
    """
    kernel._abort_queues = lambda *_: None
