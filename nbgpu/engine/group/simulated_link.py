"""Simulates a slower link between the ranks than they have, without root and without another machine.

`install` wraps the methods of ProcessGroup through which `torch.distributed` begins every collective, FSDP2
and SyncBatchNorm among its callers, and what DDP does in C++ (`simulated_ddp`). The real collective runs as
always, and its result is held back (`simulated_queue`). Nothing is wrapped in a cluster without a simulated
link or slow rank.

Functional collectives, which DTensor redistributes with, are begun in C++ and not held back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil, log2
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import torch
import torch.distributed as dist

from nbgpu.engine.group import simulated_ddp, straggler, torch_private
from nbgpu.engine.group.simulated_queue import Arrivals, Line, Queue, SequenceCounter, hold_message
from nbgpu.machine.links import Link

COLLECTIVES: dict[str, tuple[Operation, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    torch_private.ALL_GATHER: ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    torch_private.REDUCE_SCATTER: ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", -1),
}
"""By method of ProcessGroup: the kind of collective, and the position of the argument with the tensors whose
bytes count; -1 for none. No version of torch has all of these methods."""
_MESSAGES = {"send": "out", "recv": "in", "recv_anysource": "in"}
"""By method of ProcessGroup: the direction of the message."""
_NUM_ARGUMENTS_WITH_PEER = 3
"""The number of arguments where one of them is the other rank: tensors, rank and tag."""
_OPERATIONS_ON_PARTS = {"gather", "scatter"}
"""For these the tensors whose bytes count are one rank's part of the whole."""

_NO_LINK = Link("none", 0.0, float("inf"), "a rank that is only slow")
_link = _NO_LINK
_is_installed = False


Operation = Literal[
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send",
]


def seconds(operation: Operation, num_bytes: float, world_size: int, link: Link) -> float:
    """Return the time from the moment when the last rank has come until every rank has its result.

    The formulas are those of nccl-tests' busbw and of NCCL's two algorithms: a ring, in which each link
    carries the fewest bytes, and a tree, which has the fewest steps. As NCCL does, the faster one counts.

    Args:
        operation: the kind of collective.
        num_bytes: the size of the whole: the tensor itself, or the parts of all ranks together where each
            rank has or gets a part of its own.
        world_size: the number of ranks in the group.
        link: the link from each rank to the next. Both directions carry data at the same time.
    """
    if world_size == 1:
        return 0.0
    neighbours = world_size - 1
    depth = ceil(log2(world_size))
    """The steps from the root of a binary tree to its furthest rank."""
    whole_s = num_bytes / link.bytes_per_s
    shares_s = whole_s * neighbours / world_size
    match operation:
        case "all_reduce":
            return min(
                2 * neighbours * link.latency_s + 2 * shares_s, 2 * depth * link.latency_s + 2 * whole_s
            )
        case "broadcast" | "reduce":
            # Through a tree or a ring in small pieces that follow each other closely.
            return depth * link.latency_s + whole_s
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return neighbours * link.latency_s + shares_s
        case "gather" | "scatter":
            # The root's link carries the parts of all others.
            return link.latency_s + shares_s
        case "barrier":
            return 2 * depth * link.latency_s
        case "send":
            return link.seconds(num_bytes)


class _Generation:
    """The simulated link of one generation of the group."""

    def __init__(self, folder: Path, number: int) -> None:
        self.line = Line()
        self._folder = folder
        self._number = number
        self._queues: dict[str, Queue] = {}
        self._messages: dict[str, SequenceCounter] = {}
        self._paths: list[Path] = []
        self._lock = threading.Lock()

    def group_queue(self, group: Any) -> Queue:
        """Return the queue of a process group, which is made when the group begins its first collective."""
        # The size is part of the name: a person may end the group and make one of another size with the same
        # name.
        name = f"{group.group_name}-of-{group.size()}"
        with self._lock:
            if name not in self._queues:
                self._queues[name] = Queue(self.line, self._arrivals(name, group.rank(), group.size()))
            return self._queues[name]

    def messages(self, group: Any, sender: int, receiver: int, tag: int) -> SequenceCounter:
        """Return the counter of the messages from one rank of a group to another with this tag. Both ranks
        number these messages alike, because gloo delivers messages of one tag in order."""
        name = f"{group.group_name}-{sender}-{receiver}-{tag}"
        with self._lock:
            if name not in self._messages:
                is_receiver = group.rank() == receiver
                self._messages[name] = SequenceCounter(self._arrivals(name, int(is_receiver), 2))
            return self._messages[name]

    def _arrivals(self, name: str, rank: int, world_size: int) -> Arrivals:
        path = self._folder / f"link-{self._number}-{quote(name, safe='')}"
        self._paths.append(path)
        return Arrivals(path, rank, world_size)

    def end(self) -> None:
        """Give up all results that are held back."""
        self.line.given_up.set()
        for queue in list(self._queues.values()):
            queue.close()
        for path in list(self._paths):
            path.unlink(missing_ok=True)


_current: _Generation | None = None
"""The generation in which a link is simulated at present; None for none."""
_exempt = threading.local()


def install(link: Link | None, slow_factor: float) -> None:
    """Simulate a link, and make this rank slow, in every group that is formed from now on.

    Args:
        link: the link; None for the one that is there.
        slow_factor: how many times as long this rank works; 1 for a rank like the others.
    """
    global _link, _is_installed
    if link is None and slow_factor == 1:
        return
    _link = link or _NO_LINK
    _is_installed = True
    straggler.install(slow_factor)
    for name, (operation, argument) in COLLECTIVES.items():
        with suppress(AttributeError):
            _wrap(name, functools.partial(_holding, operation=operation, argument=argument))
    for name, direction in _MESSAGES.items():
        _wrap(name, functools.partial(_holding_message, direction=direction))
    torch_private.wrap_broadcast_coalesced(_holding_broadcast)
    simulated_ddp.give_every_ddp_a_hook()


def begin(folder: Path, number: int) -> None:
    """Begin to simulate in a generation of the group that was just formed.

    Args:
        folder: where the ranks of this host meet; only the user can enter it.
        number: the generation's.
    """
    global _current
    if _is_installed:
        straggler.free(is_freed=False)
        straggler.begin()
        _current = _Generation(folder, number)


def end() -> None:
    """End the simulation in this generation: the results that are held back become errors.

    Call on any thread, before the connections are cut.
    """
    global _current
    ended, _current = _current, None
    straggler.free(is_freed=True)
    if ended is not None:
        ended.end()


def is_installed() -> bool:
    """Return whether a link is simulated, or this rank is slow."""
    return _is_installed


def is_exempt() -> bool:
    """Return whether this thread's collectives are nbgpu's own, which are not held back."""
    return bool(getattr(_exempt, "is_on", False))


def in_words() -> str:
    """Return 'simulated link 10GbE', or an empty text where no link is simulated."""
    return "" if _link is _NO_LINK else f"simulated link {_link.name}"


@contextmanager
def not_simulated() -> Iterator[None]:
    """Do not hold back collectives that begin in the block, because they are nbgpu's own and no part of a
    person's step.

    The work of a slow rank before the end of the block, such as loading its data, is not made longer either.
    """
    before = is_exempt()
    _exempt.is_on = True
    try:
        yield
    finally:
        _exempt.is_on = before
        # A slow rank's work counts from here on.
        straggler.begin()


def _where_simulated(method: Callable[..., Any], hold: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replaces a method of torch. Where a link is simulated, a slow rank first sleeps,
    and then `hold` is called with the generation and the arguments; elsewhere the method itself is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # Read once: another thread may end the generation.
        now = None if is_exempt() else _current
        if now is None:
            return method(*args, **kwargs)
        straggler.catch_up()
        return hold(now, *args, **kwargs)

    return call


def _wrap(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = getattr(dist.ProcessGroup, name)
    setattr(dist.ProcessGroup, name, functools.wraps(method)(wrap(method)))


def _holding(collective: Callable[..., Any], operation: Operation, argument: int) -> Callable[..., Any]:
    """Wrap a method of ProcessGroup that begins a collective, so that its result is held back.

    Args:
        collective: the method.
        operation: the kind of collective.
        argument: the position of the tensors whose bytes count; -1 for none.
    """

    def begin_and_hold(now: _Generation, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin the real collective, and return a Work object that completes when the slower link would be
        done."""
        queue = now.group_queue(group)
        # Before the real collective begins: once it has ended, every rank can read when the others began it.
        number = queue.arrive()
        real = collective(group, *args, **kwargs)
        num_bytes = 0 if argument < 0 else num_bytes_of(args[argument])
        if operation in _OPERATIONS_ON_PARTS:
            num_bytes *= group.size()
        return queue.put(real, number, seconds(operation, num_bytes, group.size(), _link))

    return _where_simulated(collective, begin_and_hold)


def _holding_message(message: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """Wrap a method of ProcessGroup that sends or receives, so that its result is held back.

    Args:
        message: the method.
        direction: 'out' for a send, 'in' for a receive.
    """

    def begin_and_hold(now: _Generation, group: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin the real message, and return a Work object that completes when the slower link would be
        done."""
        arrivals, number = None, 0
        # A receive from any rank does not name the sender, whose arrival then cannot be read.
        if len(args) == _NUM_ARGUMENTS_WITH_PEER:
            _, peer, tag = args
            sender, receiver = (group.rank(), peer) if direction == "out" else (peer, group.rank())
            messages = now.messages(group, sender, receiver, tag)
            arrivals, number = messages.arrivals, messages.arrive()
        real = message(group, *args, **kwargs)
        lasts_s = seconds("send", num_bytes_of(args[0]), 2, _link)
        return hold_message(real, now.line, arrivals, number, lasts_s, direction)

    return _where_simulated(message, begin_and_hold)


def _holding_broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function with which DDP broadcasts its buffers in each forward pass, and the parameters in its
    constructor, so that its result is held back. The function returns when the broadcast has ended."""

    def broadcast_and_hold(now: _Generation, group: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Broadcast, and wait until the slower link would be done."""
        queue = now.group_queue(group)
        number = queue.arrive()
        broadcast(group, tensors, *args, **kwargs)
        lasts_s = seconds("broadcast", num_bytes_of(tensors), group.size(), _link)
        queue.put(None, number, lasts_s).wait()

    return _where_simulated(broadcast, broadcast_and_hold)


def num_bytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in lists and lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(num_bytes_of, tensors))
