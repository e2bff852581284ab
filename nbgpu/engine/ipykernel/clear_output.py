"""`clear_output` on a rank: removes this rank's displays, and leaves those of the other ranks in the same
cell.

A page can only clear a cell as a whole. So displays after the first `clear_output` of a cell get an id, by
which a later message empties or replaces them.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4


def clear_only_own_displays(shell: Any) -> None:
    """Make `clear_output` on this rank clear only the rank's own displays."""
    displays = _Displays(shell.display_pub)
    shell.display_pub.publish = displays.publish
    shell.display_pub.clear_output = displays.clear
    shell.events.register("pre_run_cell", lambda _: displays.begin())


class _Displays:
    """The displays of one cell.

    Args:
        publisher: the shell's display publisher, whose own methods send the messages.
    """

    def __init__(self, publisher: Any) -> None:
        self._publish = publisher.publish
        self.begin()

    def begin(self) -> None:
        """Forget the displays of the last cell."""
        self._clears = False
        self._shown: list[str] = []
        """The ids of the displays that can be cleared, the oldest first."""
        self._stale: list[str] = []
        """The ids of the displays that the next one replaces."""
        self._in_place_of: dict[str, str] = {}
        """For each display that replaced an older one, the older one's id."""

    def publish(
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **more: Any
    ) -> None:
        """Publish a display, in the place of one that was cleared if there is one, else as a new one.

        Args:
            data, metadata: the display's content, by MIME type, as in IPython's `DisplayPublisher.publish`.
            transient: holds the 'display_id', if the caller has given one.
            update: whether the message replaces the display with this id.
            more: other arguments of the publisher.
        """
        transient = dict(transient or {})
        own_id = transient.get("display_id")
        if update:
            # In the page the display has the id of the older one whose place it has taken.
            transient["display_id"] = self._in_place_of.get(own_id, own_id)
        elif self._clears:
            place = next(iter(self._stale), None)
            own_id = own_id or uuid4().hex
            transient["display_id"] = place or own_id
            update = place is not None
            # One display takes the place of the oldest that was cleared; the others become empty.
            self._empty(self._stale[1:])
            self._stale = []
            self._shown.append(transient["display_id"])
            self._in_place_of[own_id] = transient["display_id"]
        self._publish(data, metadata, transient=transient, update=update, **more)

    def clear(self, wait: bool = False) -> None:
        """Clear this rank's displays in the running cell.

        Args:
            wait: whether they stay until the next display, which replaces them, so that the page does not
                flicker.
        """
        self._clears = True
        self._stale += [shown for shown in self._shown if shown not in self._stale]
        self._shown = []
        if not wait:
            # The emptied displays stay stale, so that the next display takes the place of one of them.
            self._empty(self._stale)

    def _empty(self, displays: list[str]) -> None:
        """Update displays to show nothing: Jupyter has no message that removes a single display."""
        for display_id in displays:
            self._publish({}, transient={"display_id": display_id}, update=True)
