"""The times and numbers of a training step, at the cost of a few clock readings and without a wait.

On a CPU the parts of a step are timed on the main thread. On a GPU they are timed on the device, by events in
its stream, which are read one step late, when the device has passed all of them.

The backward pass computes gradients and exchanges them at the same time. Its time ends when the rank has
computed its last gradient. From then until the last gradients of all ranks have arrived the rank only waits:
this time is the exposed part of the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from nbgpu.engine.logs import timeline
from nbgpu.engine.logs.profiler import Profiler
from nbgpu.engine.model.moments import Anchors, Moment
from nbgpu.engine.model.transfers import Transfer, Transfers, for_statistics

Part = timeline.Part | Literal["beside"]
"""The parts that the trainer marks. 'beside' is the discriminator's forward and backward pass, which comes
after the model's."""

_COLUMNS: dict[Part, str] = {
    "forward": "forward_s",
    "backward": "backward_s",
    "beside": "backward_s",
    "optimizer": "optimizer_s",
}
"""The column of each part that is measured; the other parts are the rest of the step."""
_STATISTICS = {"forward_s": "forward_statistics_s", "backward_s": "backward_statistics_s"}
"""The columns of the waits for BatchNorm's statistics within these parts."""


class StepClock:
    """Records the moments at which the parts of one step begin, for the step's record and for the profiler.

    Args:
        profiler: marks the same parts in its trace.
        anchors: connect the device's clock with the host's; None if the step is not recorded.
        transfers: records when gradients travel; None where they do not, or not separately from the
            computation (fsdp).
    """

    def __init__(self, profiler: Profiler, anchors: Anchors | None, transfers: Transfers | None) -> None:
        self._profiler = profiler
        self._device: torch.device | None = None
        self._marks: list[tuple[Part, Moment]] = []
        self._transfers: Transfers | None = None
        self._sent: list[Transfer] = []
        self._for_statistics: timeline.Intervals = []
        if anchors is not None:
            self._device = anchors.device
            self._anchor = anchors.note()
            self._transfers = transfers
            self._sent = [] if transfers is None else transfers.begin()
            self._for_statistics = for_statistics.begin()

    def enter(self, part: Part) -> None:
        """End the current part of the step and begin another."""
        if part != "beside":
            self._profiler.enter(part)
        if self._device is not None:
            self._marks.append((part, Moment(self._device)))

    def end(self) -> None:
        """End the last part of the step."""
        self.enter("other")
        for_statistics.end()
        if self._transfers is not None:
            self._transfers.end()

    def seconds(self) -> dict[str, float]:
        """Return the parts of the step; the device has passed its end.

        Returns:
            `forward_s`, `backward_s` and `optimizer_s`, with `exchange_s`, `hidden_s` and `exposed_s` where
            gradients travelled, `forward_statistics_s` and `backward_statistics_s` where the rank waited
            within these for BatchNorm's statistics, and two moments of the host's monotonic clock:
            `begun_at_s`, and `ready_at_s`, at which the rank had its last gradient. Empty if the step is not
            recorded.
        """
        if not self._marks:
            return {}
        marks, sent = self._moments()
        return step_parts(
            marks, [(ready_s, arrived_s) for ready_s, arrived_s, _ in sent], self._for_statistics
        )

    def detail(self) -> dict[str, Any]:
        """Return every moment of the step, for an event of the kind TIMELINE; the device has passed its
        end."""
        marks, sent = self._moments()
        return {"marks": marks, "sent": sent}

    def _moments(self) -> tuple[list[tuple[Part, float]], list[tuple[float, float, int]]]:
        """Return the marks and the transfers with their times in seconds of the host's monotonic clock; the
        device has passed all of them."""
        marks = [(part, moment.at_s(self._anchor)) for part, moment in self._marks]
        sent = [
            (t.ready.at_s(self._anchor), t.arrived.at_s(self._anchor), t.num_bytes)
            for t in self._sent
            if t.arrived is not None
        ]
        return marks, sent


def is_detailed(step: int) -> bool:
    """Return whether every moment of a step is recorded: for the three steps that begin at 1, 3, 10, 30, 100
    and so on, so that the records of a long run stay small. Steps 1 and 2 are left out."""
    first = 10 ** (len(str(step)) - 1)
    # The first steps allocate memory and choose kernels, and so are not typical.
    return step > 2 and any(begin <= step < begin + 3 for begin in (first, 3 * first))


def step_parts(
    marks: Sequence[tuple[Part, float]],
    sent: Sequence[timeline.Interval],
    waits: Sequence[timeline.Interval] = (),
) -> dict[str, float]:
    """Return the seconds of each part of a step, as `forward_s`, `exposed_s` and the other columns that
    `StepClock.seconds` lists.

    Args:
        marks: the parts in order with the times at which they begin, in seconds; the last one is the end.
        sent: for each transfer the times at which it was ready and at which it had arrived.
        waits: when the rank waited for BatchNorm's statistics.
    """
    seconds = dict.fromkeys(_COLUMNS.values(), 0.0)
    exposed: timeline.Intervals = []
    ready_at_s = None
    for (part, begin_s), (_, end_s) in pairwise(marks):
        column = _COLUMNS.get(part)
        if column is None:
            continue
        # The transfers that began in this part; DDP sends buckets during the backward pass.
        began_here = [(ready, arrived) for ready, arrived in sent if begin_s <= ready < end_s]
        waited_s = sum(end - begin for begin, end in waits if begin_s <= begin < end_s)
        if waited_s and column in _STATISTICS:
            name = _STATISTICS[column]
            seconds[name] = seconds.get(name, 0.0) + waited_s
        if not began_here:
            seconds[column] += end_s - begin_s
        elif part == "backward":
            # What DDP does after the last bucket has arrived belongs to none of the columns.
            ready_at_s = max(ready for ready, _ in began_here)
            seconds[column] += ready_at_s - begin_s
            exposed.append((ready_at_s, max(arrived for _, arrived in began_here)))
        else:
            # Here the rank computes nothing while gradients travel, such as a discriminator's: all of the
            # exchange is exposed.
            waited = timeline.union(began_here)
            seconds[column] += end_s - begin_s - timeline.total(waited)
            exposed += waited
    if sent:
        travelled = timeline.union(sent)
        exposed = timeline.union(exposed)
        seconds["exchange_s"] = timeline.total(travelled)
        seconds["exposed_s"] = timeline.total(exposed)
        seconds["hidden_s"] = timeline.total(timeline.subtract(travelled, exposed))
    seconds["begun_at_s"] = marks[0][1]
    if ready_at_s is not None:
        seconds["ready_at_s"] = ready_at_s
    return seconds


class Readings:
    """Copies scalars to the host without waiting for them.

    A plain `item()` waits for all work that the device has been given so far, including the next step.
    `values` waits only for the work that computes these numbers, and for nothing that was queued after it.

    Args:
        tensors: scalars by name, of any real type, all on one device.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = list(tensors)
        scalars = [tensor.detach().to(torch.float64) for tensor in tensors.values()]
        stacked = torch.stack(scalars) if scalars else torch.empty(0, dtype=torch.float64, device="cpu")
        self._copied: torch.cuda.Event | None = None
        self._on_host = stacked
        # A copy into pinned memory runs on the stream and does not block the host; the event says when it has
        # ended.
        if stacked.is_cuda:
            self._on_host = torch.empty(len(stacked), dtype=torch.float64, device="cpu", pin_memory=True)
            self._on_host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def values(self) -> dict[str, float]:
        """Return the numbers by name, on a GPU once the copy to the host has ended."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._names, self._on_host.tolist(), strict=True))


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a finished step, which are read and recorded while the next step is in progress."""

    step: int
    ended_s: float
    """In seconds since the epoch."""
    readings: Readings
    """The numbers computed on the device."""
    numbers: Mapping[str, float]
    """The numbers known to the host."""
    clock: StepClock
    """The parts of the step's time."""
    inputs: Readings
    """The guard's findings about the step's batches, by the names of their tensors."""
