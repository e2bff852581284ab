"""pdb on a rank: `breakpoint()` in a cell, and `%debug` after a cell that failed."""

from __future__ import annotations

import bdb
import pdb
import sys
from typing import Any

from IPython.core import debugger

from nbgpu.engine.ipykernel import kept_failure
from nbgpu.errors import OutOfMemoryError


class _Debugger(debugger.InterruptiblePdb):
    """IPython's debugger, which Stop ends together with the cell."""

    def __init__(self, *args: Any, **options: Any) -> None:
        # Without `nosigint` the command `continue` would make pdb handle SIGINT from then on.
        super().__init__(*args, **options, nosigint=True)
        self._stopped = False

    def cmdloop(self, intro: Any = None) -> Any:
        """Read the person's commands, and record whether Stop ends them: the caller catches the
        KeyboardInterrupt."""
        try:
            return super().cmdloop(intro)  # type: ignore[no-untyped-call]
        except KeyboardInterrupt:
            self._stopped = True
            raise

    def interaction(self, frame: Any, tb_or_exc: Any) -> None:
        """Run the debugger's commands, and end the cell with KeyboardInterrupt if Stop has ended them."""
        # The base class prints an interrupt and would go on with the cell.
        super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
        if self._stopped:
            raise KeyboardInterrupt


def install(shell: Any) -> None:
    """Give the engine's shell this debugger, as ipykernel gives its own to a notebook's kernel.

    From now on a failed cell's functions also keep their variables for `%debug`, until the next cell.
    """
    debugger.Pdb = pdb.Pdb = _Debugger  # type: ignore[misc]
    pdb.set_trace = debugger.set_trace
    # debugpy, which ipykernel imports, installs a hook that does nothing without debugpy's own front end.
    sys.breakpointhook = sys.__breakpointhook__
    shell.InteractiveTB.debugger_cls = _Debugger
    shell.events.register("pre_run_cell", lambda cell: _begin(shell, cell))
    shell.events.register("post_run_cell", lambda result: _keep(shell, result))


def _begin(shell: Any, cell: Any) -> None:
    """Before a cell: release the error of the last cell, unless the cell is `%debug`, which needs the error
    as Python's last one."""
    if not _is_debug(cell):
        kept_failure.forget()
        return
    kept_failure.make_last()
    # What IPython showed last, perhaps the end of an earlier debugger, would come before Python's last error.
    shell.InteractiveTB.tb = None


def _is_debug(cell: Any) -> bool:
    return str(cell.raw_cell).lstrip().startswith("%debug")


def _keep(shell: Any, result: Any) -> None:
    """After a cell: keep its error for `%debug`, unless the cell was `%debug` itself or was left with `q`."""
    if result is None:
        return
    error = result.error_in_exec
    if isinstance(error, bdb.BdbQuit):
        shell._last_traceback = [
            "BdbQuit: the debugger was left with q, and the rest of the cell did not run"
        ]
    if error is None or isinstance(error, bdb.BdbQuit) or _is_debug(result.info):
        return
    # After an out-of-memory error nothing may hold on to the variables of functions.
    if isinstance(error, OutOfMemoryError) or error.__traceback__ is None:
        kept_failure.make_last(error)
    else:
        kept_failure.keep(error)
