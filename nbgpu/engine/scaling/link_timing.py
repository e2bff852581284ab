"""Times the group's collectives, and messages between two ranks, for tensors of many sizes.

Every rank runs the same measurement and returns its own times. The time of the group is that of its slowest
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbgpu.engine.group import group, simulated_link, torch_private, torch_settings
from nbgpu.errors import RunError
from nbgpu.performance.costs import SIZES_BYTES, ranks_of

_SIZES_BYTES = tuple(1024 * 4**power for power in range(9))
"""1 KiB to 64 MiB."""
_SIZES_OF_PAIRS_BYTES = (1024, 1024**2, 16 * 1024**2)
_SMALLEST_AT_ONCE_BYTES = 256 * 1024
"""The smallest size for 'two all_reduce at once': the time of smaller messages is their latency alone."""
_NUM_PASSES = 2
"""The same measurement is repeated, because differences between the passes show how much other work on the
machine disturbs it."""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 25
_MIN_SIZES = 2
"""At least two sizes are timed, because a line is fitted through the times."""
_SAMPLE_S = 0.002
"""The least time of a sample. Messages that take less are sent several times for one sample."""
_MAX_REPEATS = 20
_ALL_PAIRS_UP_TO = 4
"""In a larger group only neighbours in the ring are timed."""
_SHARE_OF_PAIRS = 0.15
_ITEM_BYTES = 4
"""The tensors are float32, as gradients are."""

Send = Callable[[], object]


_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class _Operation:
    """A collective, or a message between two ranks, to be timed for several sizes."""

    name: str
    sizes_bytes: Sequence[int]
    share: float
    """The share of the whole measurement's time for this operation."""
    prepare: Callable[[int], tuple[Send, Tensor | None, int]]
    """Returns for a size in bytes (a function that sends one message; the tensor that receives it, None if
    this rank receives nothing; the value that each of its elements must have after the first message, in
    which all ranks send ones)."""
    ranks: tuple[int, ...] = ()
    """The two ranks of a pair; empty for all ranks."""


@torch_settings.as_at_the_beginning()
def measure(
    budget_s: float, only: Sequence[str] = (), pairs: Sequence[tuple[int, int]] = ()
) -> list[dict[str, Any]]:
    """Time all kinds of messages between the ranks. A collective.

    Args:
        budget_s: about how long it may take in all.
        only: the operations to be timed, which share the time; empty for all.
        pairs: the ranks between which messages go there and back; empty for all pairs in a small group and
            for neighbours in a larger one.

    Returns:
        For each kind a dict: `operation`, `ranks` (the two of a pair; empty for all), `sizes_bytes`,
        `seconds` (by pass, by round and by size, the time of one message on this rank), `num_wrong` (by size,
        the elements with a wrong value), and `why`, the reason if the backend lacks the operation, or ''.
    """
    member = group.membership()
    # Memory for all messages: two tensors of the largest size.
    num_items = _SIZES_BYTES[-1] // _ITEM_BYTES
    buffers = torch.empty(2, num_items, dtype=torch.float32, device=member.device)
    operations = [
        *_collectives(buffers, member.world_size),
        *_there_and_back(buffers, member, pairs or _pairs(member.world_size)),
    ]
    chosen = [operation for operation in operations if not only or operation.name in only]
    shares = sum(operation.share for operation in chosen)
    timings = [_Timing(operation, member, operation.share / shares * budget_s) for operation in chosen]
    # Zeros stay zeros; other numbers, summed up again and again, would leave the range of float32.
    buffers.zero_()
    for _ in range(_NUM_PASSES):
        for timing in timings:
            timing.run_pass()
    return [timing.result for timing in timings]


def _collectives(buffers: Tensor, world_size: int) -> Iterator[_Operation]:
    """Yield the collectives to time, each with the tensors that it sends and the values that must arrive.

    Args:
        buffers: (2, items), the memory for the messages.
        world_size: the number of ranks.
    """

    def all_reduce(num_bytes: int) -> tuple[Send, Tensor, int]:
        tensor = buffers[0, : num_bytes // _ITEM_BYTES].fill_(1)
        return lambda: dist.all_reduce(tensor), tensor, world_size

    def two_at_once(num_bytes: int) -> tuple[Send, Tensor, int]:
        """Prepare two all_reduce that travel at the same time, as DDP's buckets do."""
        first, second = buffers[:, : num_bytes // _ITEM_BYTES].fill_(1)

        def send() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]:
                assert work is not None, "async_op=True returns the work"
                work.wait()

        return send, second, world_size

    def all_gather(num_bytes: int) -> tuple[Send, Tensor, int]:
        num_items = num_bytes // _ITEM_BYTES // world_size
        whole, part = buffers[:, : num_items * world_size].fill_(1)
        return lambda: dist.all_gather_into_tensor(whole, part[:num_items]), whole, 1

    def reduce_scatter(num_bytes: int) -> tuple[Send, Tensor, int]:
        num_items = num_bytes // _ITEM_BYTES // world_size
        whole, part = buffers[:, : num_items * world_size].fill_(1)
        return lambda: dist.reduce_scatter_tensor(part[:num_items], whole), part[:num_items], world_size

    # In a smaller tensor some ranks would have no element.
    sizes = [size for size in _SIZES_BYTES if size >= _ITEM_BYTES * world_size]
    large = [size for size in sizes if size >= _SMALLEST_AT_ONCE_BYTES]
    yield _Operation("all_reduce", sizes, 0.4, all_reduce)
    yield _Operation("two all_reduce at once", large, 0.15, two_at_once)
    yield _Operation("all_gather", sizes, 0.15, all_gather)
    yield _Operation("reduce_scatter", sizes, 0.15, reduce_scatter)


def _pairs(world_size: int) -> Sequence[tuple[int, int]]:
    """Return the pairs of ranks to time: all of a small group, neighbours in a ring of a larger one."""
    if world_size <= _ALL_PAIRS_UP_TO:
        return list(combinations(range(world_size), 2))
    return [*((rank, rank + 1) for rank in range(world_size - 1)), (0, world_size - 1)]


def _there_and_back(
    buffers: Tensor, member: group.Membership, pairs: Sequence[tuple[int, int]]
) -> Iterator[_Operation]:
    """Yield for each pair of ranks a message that goes to the second rank and comes back. Other ranks do
    nothing."""

    def prepare(pair: tuple[int, int], num_bytes: int) -> tuple[Send, Tensor | None, int]:
        """Return this rank's part in a message there and back: the first rank of the pair begins, the second
        one answers."""
        tensor = buffers[0, : num_bytes // _ITEM_BYTES].fill_(1)

        def begin() -> None:
            dist.send(tensor, pair[1])
            dist.recv(tensor, pair[1])

        def answer() -> None:
            dist.recv(tensor, pair[0])
            dist.send(tensor, pair[0])

        if member.rank not in pair:
            return lambda: None, None, 1
        return begin if member.rank == pair[0] else answer, tensor, 1

    for pair in pairs:
        share = _SHARE_OF_PAIRS / len(pairs)
        yield _Operation("there and back", _SIZES_OF_PAIRS_BYTES, share, partial(prepare, pair), pair)


class _Timing:
    """The measurement of one operation. The constructor sends a few messages to find out which sizes, and how
    many messages per sample, fit into the time.

    Args:
        operation: the operation.
        member: this rank's place in the group.
        budget_s: about how long all passes together may take.
    """

    def __init__(self, operation: _Operation, member: group.Membership, budget_s: float) -> None:
        self._device = member.device
        self._pass_s = budget_s / _NUM_PASSES
        self._sends: list[tuple[Send, int]] = []
        """For each size (the function that sends a message, the number of messages in a sample)."""
        self.result: dict[str, Any] = {
            "operation": operation.name,
            "ranks": operation.ranks,
            "sizes_bytes": [],
            "seconds": [],
            "num_wrong": [],
            "why": "",
        }
        round_s = 0.0
        sizes_bytes = operation.sizes_bytes
        for num_bytes, next_bytes in zip_longest(sizes_bytes, sizes_bytes[1:], fillvalue=0):
            send, received, expected = operation.prepare(num_bytes)
            try:
                send()
            except (RuntimeError, NotImplementedError) as error:
                if self._sends or isinstance(error, dist.DistError):
                    raise
                # A backend that lacks an operation says so on all ranks, before anything is sent.
                self.result["why"] = str(error).splitlines()[0]
                return
            num_wrong = 0 if received is None else int((received != expected).sum())
            # A second message is timed, because the first one sets up connections.
            message_s = self._slowest_s(self._timed(send, 1))
            num_repeats = max(1, min(_MAX_REPEATS, int(_SAMPLE_S / max(message_s, 1e-6))))
            round_s += message_s * num_repeats
            self._sends.append((send, num_repeats))
            self.result["sizes_bytes"].append(num_bytes)
            self.result["num_wrong"].append(num_wrong)
            # A message of the next size takes at most as many times longer as it is larger. All ranks decide
            # with the same times.
            next_message_s = message_s * next_bytes / num_bytes
            next_is_too_long = _MIN_ROUNDS * (round_s + next_message_s) > self._pass_s
            if next_is_too_long and len(self._sends) >= _MIN_SIZES:
                break

    def run_pass(self) -> None:
        """Time all sizes in turns, so that other work on the machine disturbs all of them alike."""
        if self.result["why"]:
            return
        begun_s = time.perf_counter()
        rounds: list[list[float]] = []
        while len(rounds) < _MAX_ROUNDS:
            rounds.append([self._timed(send, count) / count for send, count in self._sends])
            round_s = (time.perf_counter() - begun_s) / len(rounds)
            # All ranks decide with the same time.
            if self._slowest_s(round_s) * (len(rounds) + 1) > self._pass_s and len(rounds) >= _MIN_ROUNDS:
                break
        self.result["seconds"].append(rounds)

    def _timed(self, send: Send, num_repeats: int) -> float:
        """Send messages, which all ranks begin at the same time; return the seconds until all have come."""
        with simulated_link.not_simulated():
            dist.barrier()
        self._synchronize()
        begun_s = time.perf_counter()
        for _ in range(num_repeats):
            send()
        self._synchronize()
        return time.perf_counter() - begun_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _slowest_s(self, seconds: float) -> float:
        """Return the largest of the ranks' times, the same on every rank, so that all make the same
        decisions. A collective."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        with simulated_link.not_simulated():
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


def nccl_seconds(gpu: str, ranks_per_node: int, has_nvlink: bool) -> dict[str, dict[int, list[float]]]:
    """Return the times of NCCL's collectives by torch's own model, which needs no GPU.

    Args:
        gpu: 'V100', 'A100', 'H100' or 'B200'. Each has the InfiniBand that torch knows with it.
        ranks_per_node: GPUs on each node.
        has_nvlink: whether NVLink joins the GPUs of a node, else PCIe.

    Returns:
        Seconds by operation and number of ranks, for the sizes of `nbgpu.performance.costs`.

    Raises:
        RunError: this version of torch has no such model.
    """
    model = torch_private.nccl_model(gpu, ranks_per_node, has_nvlink)
    if model is None:
        raise RunError(f"torch {torch.__version__} has no model of NCCL's times by GPU: torch 2.13 has")
    return {
        operation: {
            ranks: [model(operation, num_bytes, ranks) for num_bytes in SIZES_BYTES]
            for ranks in ranks_of(ranks_per_node)
        }
        for operation in _OPERATIONS
    }
