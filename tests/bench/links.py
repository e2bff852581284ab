"""The model of a step beside real steps over real slow links between network namespaces.

For each row a rank is a process on a host of its own. The links and the step are measured by nbgpu's own
functions, and the model is nbgpu's own. The links are measured before and after each row, and the step
without the exchange too; where they differ by more than 10 %, other work disturbed the row, which is marked,
and tried once more. The prediction is the mean of those from the links before and after.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from linked_steps import Row, Settings, rows_of
from slow_link import slow_link, why_not

LINKS = {"1 Gbit/s, 0.1 ms one way": (1e9, 1e-4), "200 Mbit/s, 1 ms one way": (200e6, 1e-3)}
WIDTHS = {256: 2.0, 512: 4.0, 1024: 8.0}
"""By width, how many ms a waiting layer waits in the forward pass. Eight layers have 2, 8 and 34 MB."""
BATCHES = {256: 1024, 512: 512, 1024: 128}
"""By width, the batch of layers that compute."""
BUCKETS_MB = (1, 25)


def waiting(strategy: str = "ddp") -> list[Settings]:
    buckets = BUCKETS_MB if strategy == "ddp" else BUCKETS_MB[-1:]
    return [
        {"width": width, "wait_ms": wait_ms, "batch_size": 1, "bucket_mb": mb, "strategy": strategy}
        for width, wait_ms in WIDTHS.items()
        for mb in buckets
    ]


def computing() -> list[Settings]:
    return [
        {"width": width, "batch_size": batch_size, "bucket_mb": mb, "strategy": "ddp"}
        for width, batch_size in BATCHES.items()
        for mb in BUCKETS_MB
    ]


WAITING_AIM = "median at most 5 %, worst at most 15 %"
COMPUTING_AIM = "median at most 10 % where each rank has a core"


def waiting_2() -> str:
    """Layers that wait, as a CPU does while its GPU works, on 2 ranks"""
    return _group(2, waiting(), WAITING_AIM)


def waiting_4() -> str:
    """Layers that wait, as a CPU does while its GPU works, on 4 ranks"""
    return _group(4, waiting(), WAITING_AIM)


def sharded_2() -> str:
    """Layers that wait, with FSDP on 2 ranks"""
    return _group(2, waiting("fsdp"), "")


def computing_2() -> str:
    """Layers that compute, on 2 ranks"""
    return _group(2, computing(), COMPUTING_AIM)


PARTS = {
    "links-waiting-2": waiting_2,
    "links-waiting-4": waiting_4,
    "links-fsdp": sharded_2,
    "links-computing": computing_2,
}


def _group(world_size: int, settings: Sequence[Settings], aim: str) -> str:
    if reason := why_not():
        raise SystemExit(f"no slow links can be made here: {reason}")
    lines = [
        "| link | MB | bucket_mb | buckets | alone, ms | measured, ms | modelled, ms | error | no overlap | described "
        "link | drift, step | drift, link | load | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    kept: list[Row] = []
    for title, (bits_per_s, delay_s) in LINKS.items():
        with slow_link(world_size, bits_per_s, delay_s) as link:
            first = list(rows_of(link, settings))
            again = [row.settings for row in first if row.is_disturbed]
            second = list(rows_of(link, again)) if again else []
        retried = iter(second)
        for row in first:
            lines.append(_line(title, row, "disturbed, tried again" if row.is_disturbed else ""))
            if row.is_disturbed:
                row = next(retried)
                lines.append(_line(title, row, "again" + (", disturbed again" if row.is_disturbed else "")))
            kept.append(row)
    return "\n".join(lines) + "\n\n" + _summary(kept, aim)


def _line(title: str, row: Row, remark: str) -> str:
    times = row.times
    baselines = (row.no_overlap_s / times.step_s - 1, row.described_s / times.step_s - 1)
    cells = (
        title,
        f"{times.num_bytes / 1e6:.1f}",
        f"{row.settings['bucket_mb']:g}" if times.strategy == "ddp" else "",
        f"{len(times.buckets)}" if times.strategy == "ddp" else "",
        *(f"{1000 * s:.1f}" for s in (times.computing_s, times.step_s, row.modelled_s)),
        f"{100 * row.error:+.1f} %",
        *(f"{100 * error:+.1f} %" for error in baselines),
        *(f"x{drift:.2f}" for drift in (times.drift, row.link_drift)),
        f"{row.load:.1f}",
        remark,
    )
    return f"| {' | '.join(cells)} |"


def _summary(rows: Sequence[Row], aim: str) -> str:
    """In words, over the last attempt of each row."""
    errors: Mapping[str, list[float]] = {
        "the model": [abs(row.error) for row in rows],
        "no overlap": [abs(row.no_overlap_s / row.times.step_s - 1) for row in rows],
        "the described link": [abs(row.described_s / row.times.step_s - 1) for row in rows],
    }
    parts = [
        f"{name} is off by {100 * statistics.median(found):.1f} % (median) and {100 * max(found):.1f} % (worst)"
        for name, found in errors.items()
    ]
    return f"Of {len(rows)} rows {'; '.join(parts)}{f' (aim: {aim})' if aim else ''}.\n\n"
