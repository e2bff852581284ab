"""`clear_output` on a rank: what it displayed goes, and what others displayed in the same cell stays.

A page can only clear a cell as a whole. So displays after the first `clear_output` of a cell get an id, by which they are
emptied, or replaced by the next one.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4


def clear_only_own_displays(shell: Any) -> None:
    """From now on, on this rank."""
    own = _Displays(shell.display_pub)
    shell.display_pub.publish = own.publish
    shell.display_pub.clear_output = own.clear
    shell.events.register("pre_run_cell", lambda _: own.begin())


class _Displays:
    """What one cell displays.

    Args:
        publisher: the shell's, whose own method is called.
    """

    def __init__(self, publisher: Any) -> None:
        self._publish = publisher.publish
        self.begin()

    def begin(self) -> None:
        self._clears = False
        self._shown: list[str] = []
        """The ids of displays that can be cleared, the oldest first."""
        self._stale: list[str] = []
        """Of displays that are to go when the next one comes."""
        self._in_place_of: dict[str, str] = {}
        """For the ids of displays that were put in an older one's place, that one's."""

    def publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **more: Any
    ) -> None:
        """As the publisher's own."""
        transient = dict(transient or {})
        own_id = transient.get("display_id")
        if update:
            transient["display_id"] = self._in_place_of.get(own_id, own_id)
        elif self._clears:
            place = next(iter(self._stale), None)
            own_id = own_id or uuid4().hex
            transient["display_id"] = place or own_id
            update = place is not None
            self._empty(self._stale[1:])
            self._stale = []
            self._shown.append(transient["display_id"])
            self._in_place_of[own_id] = transient["display_id"]
        self._publish(data, metadata, transient=transient, update=update, **more)

    def clear(self, wait: bool = False) -> None:
        """As the publisher's own, for this rank's displays."""
        self._clears = True
        self._stale += [shown for shown in self._shown if shown not in self._stale]
        self._shown = []
        if not wait:
            self._empty(self._stale)
            # The places stay, and can be used again.

    def _empty(self, displays: list[str]) -> None:
        for display_id in displays:
            self._publish({}, transient={"display_id": display_id}, update=True)
