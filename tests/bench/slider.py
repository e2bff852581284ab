"""What one move of a slider of `nbgpu.overlap` takes, from its event to the new picture."""

from __future__ import annotations

import time
from statistics import median, quantiles

from nbgpu.machine.links import parse_link
from nbgpu.performance.steps import StepTimes
from nbgpu.ui.overlap import OverlapView

_NUM_MOVES = 400
_BUCKETS = (4, 40, 400)


def slider() -> str:
    """What a move of the slider of a link takes"""
    rows = ["| buckets | median, ms | 95 % within, ms | the picture, kB |", "|---|---|---|---|"]
    for num_buckets in _BUCKETS:
        view = OverlapView(_times(num_buckets), parse_link("10GbE"))
        taken_s = []
        for move in range(_NUM_MOVES):
            begun_s = time.perf_counter()
            view.rate.value = 10.0 * (move + 1)
            taken_s.append(time.perf_counter() - begun_s)
        within_s = quantiles(taken_s, n=20)[-1]
        kilobytes = len(view.picture.value) / 1e3
        rows.append(
            f"| {num_buckets} | {1e3 * median(taken_s):.2f} | {1e3 * within_s:.2f} | {kilobytes:.0f} |"
        )
    return "\n".join(rows) + "\n\nIn the kernel; the page then draws what it gets (aim: 50 ms).\n\n"


def _times(num_buckets: int) -> StepTimes:
    step = {
        "forward_s": 0.03,
        "backward_s": 0.06,
        "last_backward_s": 0.06,
        "optimizer_s": 0.01,
        "step_s": 0.1,
        "buckets": [(0.06 * (i + 1) / num_buckets, 100e6 / num_buckets) for i in range(num_buckets)],
        "blocks": [],
        "rest_bytes": 0,
        "micro_batches": 1,
    }
    rank = {"alone": [step], "together": [step], "alone again": [step]}
    return StepTimes("a recipe", "gloo", 4, [rank, rank])
