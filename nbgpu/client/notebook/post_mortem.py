"""`%debug`: inspect the variables of the functions in which a cell failed, on the rank that failed first."""

from __future__ import annotations

import sys

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from nbgpu.client.cells.cell import DistributedCell
from nbgpu.client.cluster.cluster import Cluster, current
from nbgpu.client.engines.calls import reference
from nbgpu.errors import CellInterrupted, ClusterError, RankError
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.calls import Call

COMMAND = "%debug"
"""The command that runs on the rank. There it opens pdb, whose `input()` asks in the notebook."""


def open_debugger(cluster: Cluster, rank: int | None = None) -> None:
    """Open pdb where a rank failed, until the user leaves it, while the other ranks wait.

    Args:
        cluster: the cluster whose last cell failed.
        rank: the rank to debug; None for the one that failed first.

    Raises:
        ClusterError: there is no failure to debug.
    """
    kept = cluster.apply(reference(Call.KEPT_FAILURE))
    failed = {r: failure for r, failure in kept.items() if failure is not None and rank in (None, r)}
    if not failed:
        raise ClusterError(
            f"{'no rank' if rank is None else f'rank {rank}'} has a failure to look at. It is kept until the next cell "
            "runs there, but not where memory ran out or the process ended"
        )
    first = min(failed, key=lambda r: failed[r][0])
    print(f"rank {first} failed with {failed[first][1]}; q leaves the debugger")  # noqa: T201 - the magic's output
    with uninterrupted():  # a cell that was sent is waited for, whenever a Stop comes
        DistributedCell(cluster.parts.cells, COMMAND, [first], None).show_blocking()


@magics_class
class DebugMagics(Magics):
    """IPython's own `%debug`, replaced by `open_debugger` for failures on ranks."""

    shell: InteractiveShell

    @line_cell_magic
    def debug(self, line: str = "", cell: str | None = None) -> None:
        """Open the debugger where the last error came from: on a rank where that was a distributed cell's."""
        of_ranks = isinstance(getattr(sys, "last_value", None), RankError | CellInterrupted)
        if of_ranks and not line.strip() and cell is None:
            open_debugger(current())
        else:
            self.shell.magics_manager.registry["ExecutionMagics"].debug(line, cell)
