"""Steps over real slow links, measured and modelled by nbgpu's own functions.

The links are measured before and after each step, and so is the step without the exchange. The prediction is
the mean of those from the links before and after.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from slow_link import Place, SlowLink

from nbgpu.machine.links import Link
from nbgpu.performance.links import Links
from nbgpu.performance.steps import StepTimes

LAYERS = Path(__file__).with_name("layers.py")
_NUM_STEPS = 7
_BUDGET_S = 8.0
_DRIFT = 1.1
_QUIET_CORES = 0.3
_LISTEN_S = 2.0
_QUIET_WITHIN_S = 120.0
_DDP = ("all_reduce", "two all_reduce at once")
_FSDP = (*_DDP, "all_gather", "reduce_scatter")

Settings = dict[str, Any]
"""Of `layers.py`: `width`, `wait_ms`, `batch_size`, `bucket_mb` and `strategy`."""


def measure(
    place: Place, rows: Sequence[Settings], num_steps: int, budget_s: float, quiet_within_s: float
) -> dict[str, Any]:
    """Measure links and steps on one host. Every host calls this."""
    import torch
    import torch.distributed as dist

    from nbgpu.config import train_config
    from nbgpu.engine.group import group
    from nbgpu.engine.scaling import link_timing, step_timing

    torch.set_num_threads(1)
    device = torch.device("cpu")
    member = group.Membership(place.rank, place.world_size, place.rank, device, "gloo")
    store = dist.FileStore(str(place.rendezvous / "store"), place.world_size)  # type: ignore[attr-defined]
    group.form(member, store)
    only = _FSDP if any(row["strategy"] == "fsdp" for row in rows) else _DDP
    _wait_for_quiet(place.rank, quiet_within_s)
    links, steps, loads = [link_timing.measure(budget_s, only)], [], []
    for row in rows:
        _wait_for_quiet(place.rank, quiet_within_s)
        # torch has no fused SGD for sharded weights.
        optimizer = "adamw" if row["strategy"] == "fsdp" else "sgd"
        config = train_config(str(LAYERS), optimizer=optimizer, **row)
        steps.append(step_timing.measure(config.model_dump(mode="json"), num_steps))
        links.append(link_timing.measure(budget_s, only))
        loads.append(os.getloadavg()[0])
    dist.barrier()
    dist.destroy_process_group()
    return {"links": links, "steps": steps, "loads": loads}


def _wait_for_quiet(rank: int, patience_s: float) -> None:
    """Wait until other work leaves the cores alone, or for so long that it never will. A collective."""
    import torch.distributed as dist

    dist.barrier()
    give_up_s = time.monotonic() + patience_s
    # The others wait without using a core.
    while rank == 0 and time.monotonic() < give_up_s:
        cores = psutil.cpu_count() * psutil.cpu_percent(interval=_LISTEN_S) / 100
        if cores < _QUIET_CORES:
            break
    dist.barrier()


@dataclass(frozen=True)
class Row:
    """One step, measured and modelled."""

    settings: Settings
    times: StepTimes
    modelled_s: float
    no_overlap_s: float
    """Without overlap in the model: the computation, and then each bucket by itself."""
    described_s: float
    """By the link's rate and latency alone, with nothing measured of it."""
    link_drift: float
    load: float

    @property
    def error(self) -> float:
        return self.modelled_s / self.times.step_s - 1

    @property
    def is_disturbed(self) -> bool:
        drifts = (self.times.drift, self.link_drift)
        return not all(1 / _DRIFT <= drift <= _DRIFT for drift in drifts)


def rows_of(
    link: SlowLink,
    settings: Sequence[Settings],
    num_steps: int = _NUM_STEPS,
    budget_s: float = _BUDGET_S,
    quiet_within_s: float = _QUIET_WITHIN_S,
) -> Iterator[Row]:
    """Measure and model some rows over a link.

    Args:
        link: the hosts, one for each rank.
        settings: of the rows.
        num_steps: timed steps of each kind.
        budget_s: for each measurement of the links.
        quiet_within_s: how long to wait before each row until other work leaves the cores alone.
    """
    world_size = len(link.hosts)
    how = {"num_steps": num_steps, "budget_s": budget_s, "quiet_within_s": quiet_within_s}
    found = link.run(measure, patience_s=3600, rows=settings, **how)
    of_ranks = zip(*(host["links"] for host in found), strict=True)
    links = [Links("gloo", ["CPU"] * world_size, list(each)) for each in of_ranks]
    described = Link("described", link.delay_one_way_s, link.bits_per_s / 8, "as it was made")
    for index, row in enumerate(settings):
        steps = [host["steps"][index] for host in found]
        times = StepTimes(f"width {row['width']}", "gloo", row["batch_size"], steps, row["strategy"])
        before, after = links[index : index + 2]
        modelled = [times.predict(each, [world_size]).steps[0] for each in (before, after)]
        exchange_s = sum(before.of("all_reduce").seconds(bucket.num_bytes) for bucket in times.buckets)
        if row["strategy"] == "fsdp":
            # Nothing overlaps in FSDP on CPU ranks: without overlap is what the model says anyway.
            exchange_s = modelled[0].step_s - times.computing_s
        line, again = (each.of("all_reduce").seconds(times.num_bytes) for each in (before, after))
        yield Row(
            row,
            times,
            statistics.mean(step.step_s for step in modelled),
            times.computing_s + exchange_s,
            times.predict(link=described, ranks=[world_size]).steps[0].step_s,
            again / line,
            found[0]["loads"][index],
        )
