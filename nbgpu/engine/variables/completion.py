"""The names of this rank's variables for the notebook: which there are, completion (Tab) and inspection
(Shift-Tab)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nbgpu.engine.ipykernel import shell

_log = logging.getLogger("nbgpu.engine")


def complete(code: str, cursor: int) -> Mapping[str, Any] | None:
    """Return the content of Jupyter's complete_reply for code of the notebook; None if IPython fails."""
    kernel = shell.current().kernel
    return _answer(lambda: kernel.do_complete(code, cursor))


def inspect(
    code: str, cursor: int, detail_level: int, omit_sections: Collection[str]
) -> Mapping[str, Any] | None:
    """Return the content of Jupyter's inspect_reply for code of the notebook; None if IPython fails."""
    kernel = shell.current().kernel
    return _answer(lambda: kernel.do_inspect(code, cursor, detail_level, set(omit_sections)))


def there(names: Sequence[str]) -> dict[str, bool]:
    """Return whether the value is a module, by name, for those of these names that are variables of this
    rank."""
    variables = shell.current().user_ns
    return {name: isinstance(variables[name], ModuleType) for name in names if name in variables}


def _answer(request: Callable[[], Any]) -> Mapping[str, Any] | None:
    """Return IPython's reply to a request, during which the variables of this very call are hidden; None if
    IPython raises."""
    try:
        with _without_the_names_of_this_call():
            reply: Mapping[str, Any] = request()
    except Exception:  # noqa: BLE001 - it is logged
        # An error raised to ipyparallel would become the one that %debug and sys.last_value show.
        _log.exception("a name could not be looked up")
        return None
    return reply


@contextmanager
def _without_the_names_of_this_call() -> Iterator[None]:
    """Remove the function and the arguments of this call from the person's namespace, in which ipyparallel
    keeps them, while the block runs."""
    message_id = shell.current().kernel.get_parent("shell")["header"]["msg_id"]
    # ipyparallel 9 and 8 name them differently.
    prefixes = tuple(f"_{message_id.replace('-', instead)}_" for instead in ("_", ""))
    variables = shell.current().user_ns
    hidden = {name: variables.pop(name) for name in list(variables) if name.startswith(prefixes)}
    try:
        yield
    finally:
        variables.update(hidden)
