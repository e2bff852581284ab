"""The notebook's side of `%pull` and `%push`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.errors import CellInterrupted
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.calls import Call
from nbgpu.serialization import shared_memory
from nbgpu.serialization.parcels import Packing, from_bytes, from_descriptor, unpack

_WHERE_TO_DEFINE = (
    "Run the cell that defines it as a plain cell too, so that the notebook has it, or pull what it is made of, such as "
    "its vars()"
)


def pull(ranks: Ranks, chosen: Iterable[int], names: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Copy variables of the chosen ranks, by rank and name, into this process's own memory.

    Raises:
        RankError: a rank has no variable of a name, or its value cannot travel.
        CellInterrupted: the user pressed Stop; the ranks were interrupted, too.
        TransferError: a value cannot be rebuilt here.
    """
    with ExitStack() as open_:
        # The memory belongs to this process, so that a rank keeps none of it, whatever happens to either of
        # them.
        descriptors = {rank: open_.enter_context(shared_memory.created()) for rank in chosen}

        def send() -> dict[int, Reply]:
            sent: dict[int, Reply] = {}
            for rank, descriptor in descriptors.items():
                address = shared_memory.address(descriptor)
                sent |= ranks.call(Call.SEND_VALUES, names, address, ranks=[rank])
            return sent

        parcels = answers(ranks, send)
        return {
            rank: unpack(
                parcel,
                from_descriptor(descriptors[rank]) if carried is None else from_bytes(carried),
                vars(sys.modules["__main__"]),
                _WHERE_TO_DEFINE,
            )
            | dict(zip(names_of_code, code, strict=True))
            for rank, (parcel, carried, names_of_code, *code) in parcels.items()
        }


def push(ranks: Ranks, chosen: Sequence[int], values: Mapping[str, Any]) -> None:
    """Give the chosen ranks variables of these names, with copies of the values. Code goes through
    definitions.py.

    The values are written once, and each rank copies a page of the memory when it first changes it.

    Raises:
        TransferError: some values cannot travel; nothing was sent.
        RankError: a rank cannot rebuild a value.
    """
    packing = Packing(values)
    left = chosen
    if not packing.is_small:
        with shared_memory.created() as descriptor:
            packing.write(descriptor)
            address = shared_memory.address(descriptor)
            came = answers(
                ranks, lambda: ranks.call(Call.RECEIVE_VALUES, packing.parcel, address, ranks=chosen)
            )
            left = [rank for rank, has_come in came.items() if not has_come]
    if left:
        carried = memoryview(packing.to_bytes())
        answers(ranks, lambda: ranks.call(Call.RECEIVE_VALUES, packing.parcel, carried, ranks=left))


@uninterrupted()
def answers(ranks: Ranks, send: Callable[[], Mapping[int, Reply]]) -> dict[int, Any]:
    """Send something to ranks and return their answers, by rank.

    A Stop while it is being sent waits until all ranks have it. Those that were sent it first would otherwise
    go on with nobody to interrupt them.
    """
    sent = send()
    try:
        return ranks.wait_for(sent)
    except KeyboardInterrupt:
        ranks.interrupt(rank for rank, result in sent.items() if not result.ready())
        raise CellInterrupted(list(ranks.gone()), len(ranks)) from None
