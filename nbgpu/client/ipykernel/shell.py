"""The IPython shell that this process has, if it is a notebook's kernel or IPython in a terminal."""

from __future__ import annotations

import sys
from typing import Any


def current() -> Any | None:
    """Return the shell, or None in a script; a script is not made to import IPython."""
    getipython = sys.modules.get("IPython.core.getipython")
    return None if getipython is None else getipython.get_ipython()
