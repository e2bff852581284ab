"""The groups that a person has made, which are made again under their names once the default group is formed
again.

Meshes, DTensors and torch's functional collectives keep the name of a group, so that they go on with the new
one. Whoever keeps the group itself is given the new one (`variables/references.py`).
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
"""By the name of a group: the arguments that torch made it with."""


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
    """Make each of the person's groups again that every one of its ranks still had. A collective over the
    default group.

    Args:
        before: the person's groups of this rank when the default group ended.
        generation: the number of this forming of the default group.
        connect_timeout: the time for the members to connect, also where a group's own timeout is shorter.

    Returns:
        The group that has ended and its successor, for each that was made again. They are the same object
        where the default group was formed again in place.
    """
    _arguments.clear()
    living_now = torch_private.living_groups()
    # Exchange which groups each rank has, and what the others need to form them again in place.
    mine = {group.key: group for group in before}
    theirs = exchange.gather(
        {
            key: (own.ranks, torch_private.reconfigure_handle(own.group) if own.group in living_now else "")
            for key, own in mine.items()
        }
    )
    ranks_of = {key: ranks for keys in theirs for key, (ranks, _) in keys.items()}
    made: dict[str, Any] = {}
    problems = []
    # In one order on all ranks, because a rank waits for the other members of one group at a time.
    for key, ranks in sorted(ranks_of.items()):
        if key in mine and all(key in theirs[rank] for rank in ranks):
            handles = [theirs[rank][key][1] for rank in ranks]
            try:
                made[key] = _make_again(mine[key], handles, generation, connect_timeout)
            except Exception:  # noqa: BLE001 - the default group is there all the same; this one is named as ended
                problems.append(key)
    # A group that one member could not make is ended on all.
    failed = {key for keys in exchange.gather(problems) for key in keys}
    ended = [made.pop(key) for key in failed & made.keys()]
    ended += [own.group for key, own in mine.items() if key not in made]
    for group in ended:
        if group in torch_private.living_groups():
            dist.destroy_process_group(group)
    return [(mine[key].group, group) for key, group in made.items()]


def _make_again(own: OwnGroup, handles: Sequence[str], generation: int, connect_timeout: timedelta) -> Any:
    """Form a group again in place if all members have sent a handle for that, else make a new group with the
    same arguments; return it."""
    if all(handles):
        with sockets.noted_as_groups():
            torch_private.reconfigure(own.group, generation, handles, connect_timeout)
        note(own.arguments)
        return own.group
    timeout = own.arguments["timeout"]
    can_change = torch_private.can_change_timeout()
    # The group's own timeout may be too short for connecting, so it is set afterwards where torch allows
    # that.
    waits = max(timeout, connect_timeout) if can_change else timeout
    group = torch_private.make_group({**own.arguments, "timeout": waits})
    if can_change:
        torch_private.change_timeout(collective_timeout.gloo_timeout(timeout.total_seconds()), group)
    collective_timeout.allow(own.arguments["group_name"], timeout.total_seconds())
    note(own.arguments)
    return group
