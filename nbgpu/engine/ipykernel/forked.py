"""The end of a process that a cell has forked."""

from __future__ import annotations

import os
import sys


def end_child(error: BaseException | None) -> None:
    """End this process, which a cell has forked, as Python ends a script. It does not return.

    In a kernel of IPython such a child would go on as a second kernel, and `os.waitpid` would never return.

    Args:
        error: the error that ends the cell in the child, which is shown already; None for none.
    """
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            sys.stderr.write(f"{error.code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)
