"""This rank's IPython shell, which runs the cells and holds the person's variables."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython


def current() -> Any:
    """The shell; its kernel is `current().kernel`."""
    shell = get_ipython()
    assert shell is not None, "an engine has an IPython shell"
    return shell
