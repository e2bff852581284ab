"""Make the process groups of a person's cells again, under their names, once the default group is formed
again.

Meshes, DTensors and torch's functional collectives refer to a group by its name, so they go on with the new
one. In variables and attributes that hold the group itself, `variables/references.py` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nbgpu.engine.group import collective_timeout, exchange, sockets, torch_private, torch_settings

_FAKE = "fake"
_arguments: dict[str, Mapping[str, Any]] = {}
"""The arguments with which torch made a group, by the group's name."""


@dataclass(frozen=True)
class OwnGroup:
    """A process group that a person has made and that has this rank as a member."""

    group: Any
    arguments: Mapping[str, Any]

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks of the group's members."""
        return list(self.arguments["global_ranks_in_group"])

    @property
    def key(self) -> str:
        """Return the group's name and ranks as one string, which is the same on all its members."""
        return f"{self.arguments['group_name']} {self.ranks}"


def note(arguments: Mapping[str, Any]) -> None:
    """Note the arguments with which torch makes a group."""
    if arguments["global_ranks_in_group"]:
        _arguments[arguments["group_name"]] = arguments


def living() -> list[OwnGroup]:
    """Return the person's groups of this rank that have not ended."""
    groups = []
    for group in torch_private.living_groups():
        arguments = _arguments.get(group.group_name)
        if arguments is not None and arguments["backend"] != _FAKE:
            groups.append(OwnGroup(group, arguments))
    return groups


@torch_settings.as_at_the_beginning()
def make_again(before: list[OwnGroup], generation: int, connect_timeout: timedelta) -> list[tuple[Any, Any]]:
    """Make those of the person's groups again that all of their ranks still had. A collective over the
    default group.

    Args:
        before: the person's groups of this rank when the default group ended.
        generation: the number of this forming of the default group.
        connect_timeout: the time for the members to connect, also where a group's own timeout is shorter.

    Returns:
        (the group that has ended, its successor) for each group that was made again. Both are the same object
        where the default group was formed again in place.
    """
    _arguments.clear()
    living_now = torch_private.living_groups()
    # Exchange which groups each rank has, and the handles with which they are formed again in place.
    mine = {group.key: group for group in before}
    handles_here = {
        key: torch_private.reconfigure_handle(former.group) if former.group in living_now else ""
        for key, former in mine.items()
    }
    handles_by_rank = exchange.gather(handles_here)
    made: dict[str, Any] = {}
    problems = []
    # In the same order on all ranks: to make a group waits for its other members, one group at a time.
    for key, former in sorted(mine.items()):
        if all(key in handles_by_rank[rank] for rank in former.ranks):
            handles = [handles_by_rank[rank][key] for rank in former.ranks]
            try:
                made[key] = _make_again(former, handles, generation, connect_timeout)
            except Exception:  # noqa: BLE001 - the default group is there all the same; this one is named as ended
                problems.append(key)
    # A group that one member could not make is ended on all.
    failed = {key for keys in exchange.gather(problems) for key in keys}
    ended = [made.pop(key) for key in failed & made.keys()]
    ended += [former.group for key, former in mine.items() if key not in made]
    for group in ended:
        if group in torch_private.living_groups():
            dist.destroy_process_group(group)
    return [(mine[key].group, group) for key, group in made.items()]


def _make_again(former: OwnGroup, handles: Sequence[str], generation: int, connect_timeout: timedelta) -> Any:
    """Form a group again in place if all members have sent a handle for that, else make a new group with the
    same arguments; return the group."""
    if all(handles):
        with sockets.noted_as_groups():
            torch_private.reconfigure(former.group, generation, handles, connect_timeout)
        note(former.arguments)
        return former.group
    timeout = former.arguments["timeout"]
    can_change = torch_private.can_change_timeout()
    # The group's own timeout may be too short for connecting, so it is set afterwards where torch allows
    # that.
    first_timeout = max(timeout, connect_timeout) if can_change else timeout
    group = torch_private.make_group({**former.arguments, "timeout": first_timeout})
    if can_change:
        torch_private.change_timeout(collective_timeout.gloo_timeout(timeout.total_seconds()), group)
    collective_timeout.allow(former.arguments["group_name"], timeout.total_seconds())
    note(former.arguments)
    return group
