"""Answers Tab and Shift-Tab for the notebook: with this rank's names, in this kernel's own words."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbgpu.engine.ipykernel import shell

_log = logging.getLogger("nbgpu.engine")


def complete(code: str, cursor: int) -> Mapping[str, Any] | None:
    """What a kernel replies to a complete_request; None where IPython fails at it."""
    kernel = shell.current().kernel
    return _answer(lambda: kernel.do_complete(code, cursor))


def inspect(
    code: str, cursor: int, detail_level: int, omit_sections: Collection[str]
) -> Mapping[str, Any] | None:
    """What a kernel replies to an inspect_request; None where IPython fails at it."""
    kernel = shell.current().kernel
    return _answer(lambda: kernel.do_inspect(code, cursor, detail_level, set(omit_sections)))


def _answer(ask: Any) -> Mapping[str, Any] | None:
    try:
        with _without_the_names_of_this_call():
            reply: Mapping[str, Any] = ask()
    except Exception:  # noqa: BLE001 - it is logged
        # Raised to ipyparallel, it would become the error that %debug and sys.last_value tell of.
        _log.exception("a name could not be looked up")
        return None
    return reply


@contextmanager
def _without_the_names_of_this_call() -> Iterator[None]:
    """ipyparallel holds a call's function and arguments in the person's namespace while it runs."""
    message_id = shell.current().kernel.get_parent("shell")["header"]["msg_id"]
    prefix = f"_{message_id.replace('-', '_')}_"
    variables = shell.current().user_ns
    hidden = {name: variables.pop(name) for name in list(variables) if name.startswith(prefix)}
    try:
        yield
    finally:
        variables.update(hidden)
