"""Who is at the other end of a group's connections to other hosts.

gloo accepts the first process that connects and names the expected number as the rank that it waits for. On
its own host a rank sees whose that process is; of another host it knows an address and a port. So every rank
says in the store, to which nobody comes without the cluster's keys, which connections are its own, and a
connection of which the other end is nobody's is a stranger's.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain

import torch.distributed as dist

from nbgpu.engine.group import sockets

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The addresses and ports of a connection: this process's, and the other's."""


def refuse_strangers(
    store: dist.Store,  # type: ignore[name-defined]
    group: str,
    rank: int,
    ranks: Sequence[int],
    patience: timedelta,
) -> None:
    """Raise if a connection of the newest group to another host does not end at one of its ranks.

    Every rank of a group that spans several hosts calls this before the first tensor is sent.

    Args:
        store: the store in which the ranks of the generation meet.
        group: the name of the group, which no other group of the generation has.
        rank: this rank.
        ranks: all ranks of the group.
        patience: the time for the other ranks to say which connections are theirs.

    Raises:
        ConnectionError: there is such a connection, or a rank does not say which are its own.
    """
    to_other_hosts = _ends_at_other_hosts()
    if not to_other_hosts:
        return
    keys = {member: f"nbgpu/ends/{group}/{member}" for member in ranks}
    store.set(keys[rank], json.dumps(to_other_hosts))
    try:
        store.wait(list(keys.values()), patience)
    except dist.DistStoreError as error:
        raise ConnectionError(
            f"a rank of another host has not said which connections are its own: {error}. No tensor was sent"
        ) from None
    answers = chain.from_iterable(map(json.loads, store.multi_get(list(keys.values()))))
    claimed = {(tuple(here), tuple(there)) for here, there in answers}
    strangers = [there for here, there in to_other_hosts if (there, here) not in claimed]
    if strangers:
        named = ", ".join(sorted({f"{address}:{port}" for address, port in strangers}))
        raise ConnectionError(
            f"what is at {named} is in a rank's place in the process group and is none of the cluster's ranks; no tensor was "
            "sent to it. It is a process of somebody else, or addresses are translated (NAT) between the hosts, over "
            "which a group cannot be formed"
        )


def _ends_at_other_hosts() -> list[Ends]:
    """The connections of the newest group whose other end has another address than this one."""
    to_other_hosts = []
    for here, there in sockets.ends_of_newest():
        ends = (_plain(here), here[1]), (_plain(there), there[1])
        if ends[0][0] != ends[1][0]:
            to_other_hosts.append(ends)
    return to_other_hosts


def _plain(address: tuple[str, int]) -> str:
    """An address without its scope, and an IPv4 one as such where a socket of IPv6 has it."""
    parsed = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)
