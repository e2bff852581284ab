"""References to functions of the engines. They are strings, because the client never imports these modules:
they import torch."""

from __future__ import annotations

from typing import Any


def reference(function: str) -> Any:
    """Return `module:function` as an object that ipyparallel looks up on the engine."""
    module, _, name = function.partition(":")
    return expression(f"__import__('importlib').import_module({module!r}).{name}")


def expression(source: str) -> Any:
    """Return an expression as an object that ipyparallel evaluates on the engine."""
    # Import it here, so that the fork server can be launched before ipyparallel is imported, which takes a
    # quarter of a second.
    from ipyparallel import Reference

    return Reference(source)
