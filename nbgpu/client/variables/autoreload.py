"""`%nbgpu autoreload`: reload edited modules on all ranks before each cell."""

from __future__ import annotations

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import failures
from nbgpu.protocol.calls import Call
from nbgpu.text.ranks import named_ranges, ranks_by


class Reloading:
    """Has the ranks reload edited modules before each cell, while it is on.

    The call is sent just before the cell and not waited for, because a rank handles its requests in order.
    The messages about reloaded modules are shown when the replies are there.
    """

    def __init__(self) -> None:
        self.on = False
        self._pending: list[dict[int, Reply]] = []
        """The replies to the calls before the latest cells, by rank."""

    def switch(self, ranks: Ranks, to: str) -> str:
        """Turn reloading 'on' or 'off', or leave it if `to` is empty; return its state as a message.

        Modules that were imported earlier are reloaded as well if they have been edited since.
        """
        reloaded: list[str] = []
        if to:
            self.on = to == "on"
            answers = ranks.wait_for(
                ranks.call(Call.RELOAD_EDITED_MODULES if self.on else Call.STOP_RELOADING)
            )
            reloaded = _messages(answers) if self.on else []
        if not self.on:
            return "autoreload is off"
        state = "autoreload is on: modules that were edited are loaded again before each cell"
        return "\n".join([state, *reloaded])

    def before_cell(self, ranks: Ranks) -> None:
        """Send the call before a cell. All ranks reload edited modules, even those that do not run the
        cell."""
        if self.on:
            self._pending.append(ranks.call(Call.RELOAD_EDITED_MODULES))

    def take_messages(self) -> list[str]:
        """Return the lines about modules that were reloaded, or could not be, since the last call."""
        lines: list[str] = []
        while self._pending and all(reply.ready() for reply in self._pending[0].values()):
            replies = self._pending.pop(0)
            failed = {failure.rank: failure.message for failure in failures(replies)}
            lines += [f"rank {rank} could not look for edited modules: {e}" for rank, e in failed.items()]
            lines += _messages({rank: r.result() for rank, r in replies.items() if rank not in failed})
        return lines

    def forget(self) -> None:
        """Drop the calls to ranks that have ended. Their replacements import edited modules anyway."""
        self._pending.clear()


def _messages(by_rank: dict[int, dict[str, str]]) -> list[str]:
    """Return a line for each module that was reloaded, or could not be. It names the ranks if they are not
    all.

    Args:
        by_rank: for each rank the reason for the failure by module, empty if the module was reloaded.
    """
    outcomes = ranks_by((outcome, rank) for rank, of_rank in by_rank.items() for outcome in of_rank.items())
    lines = []
    for (module, failure), ranks in outcomes.items():
        where = "" if len(ranks) == len(by_rank) else f" on {named_ranges(ranks)}"
        lines.append(
            f"{module} could not be loaded again{where}, and stays as it was: {failure}"
            if failure
            else f"{module} was edited, and loaded again{where}"
        )
    return lines
