"""`%nbgpu autoreload`: reload edited modules on all ranks before each cell."""

from __future__ import annotations

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import failures
from nbgpu.protocol.calls import Call
from nbgpu.text.ranks import named_ranges, ranks_by


class Reloading:
    """Makes the ranks look for edited modules before each cell, while it is on.

    The call is sent just before the cell and is not waited for, because a rank handles its requests one after
    the other. The messages about reloaded modules follow once the replies are there.
    """

    def __init__(self) -> None:
        self.on = False
        self._asked: list[dict[int, Reply]] = []

    def switch(self, ranks: Ranks, to: str) -> str:
        """Turn reloading 'on' or 'off', and return its state, also where `to` is empty.

        Modules that were imported earlier are watched, too, and are reloaded if they have been edited since.
        """
        loaded: list[str] = []
        if to:
            self.on = to == "on"
            what = Call.RELOAD_EDITED_MODULES if self.on else Call.STOP_RELOADING
            answers = ranks.wait_for(ranks.call(what))
            loaded = _messages(answers) if self.on else []
        state = (
            "autoreload is on: modules that were edited are loaded again before each cell"
            if self.on
            else "autoreload is off"
        )
        return "\n".join([state, *loaded])

    def before_cell(self, ranks: Ranks) -> None:
        """Send the call before a cell. All ranks look for edited modules, also those that do not run the
        cell."""
        if self.on:
            self._asked.append(ranks.call(Call.RELOAD_EDITED_MODULES))

    def take_messages(self) -> list[str]:
        """Return the lines about modules that were reloaded or failed to; each line only once."""
        lines: list[str] = []
        while self._asked and all(answer.ready() for answer in self._asked[0].values()):
            asked = self._asked.pop(0)
            failed = failures(asked)
            lines += [f"rank {f.rank} could not look for edited modules: {f.message}" for f in failed]
            gone = {failure.rank for failure in failed}
            lines += _messages({rank: answer.result() for rank, answer in asked.items() if rank not in gone})
        return lines

    def forget(self) -> None:
        """Drop the calls to ranks that are gone. The ranks that replace them start from a clean state."""
        self._asked.clear()


def _messages(by_rank: dict[int, dict[str, str]]) -> list[str]:
    """Return a line for each module that was reloaded or failed to; it names the ranks if they are not
    all."""
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
