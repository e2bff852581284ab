"""Where a step's time went, from the intervals of a trace. Real traces are in tests/runs/test_profiler.py."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.engine.logs.timeline import breakdown, intersect, subtract, total, union

MAIN, GLOO = 1, 2
MS = 1000.0


def event(
    name: str, start_ms: float, end_ms: float, cat: str, tid: int = MAIN, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "tid": tid,
        "ts": start_ms * MS,
        "dur": (end_ms - start_ms) * MS,
        "args": args,
    }


def part(name: str, start_ms: float, end_ms: float) -> dict[str, Any]:
    return event(f"nbgpu.{name}", start_ms, end_ms, "user_annotation")


def parts_of_a_step(at_ms: float) -> list[dict[str, Any]]:
    """100 ms: 10 of data, 30 of forward, 5 of waiting, 40 of backward, 10 of optimizer, 5 of other things."""
    return [
        part("step", at_ms, at_ms + 100),
        part("data", at_ms, at_ms + 10),
        part("agreement", at_ms + 10, at_ms + 12),
        part("forward", at_ms + 12, at_ms + 42),
        part("waiting", at_ms + 42, at_ms + 47),
        part("backward", at_ms + 47, at_ms + 87),
        part("optimizer", at_ms + 87, at_ms + 97),
    ]


def test_on_a_cpu_the_main_thread_tells_and_what_it_waits_for_is_communication() -> None:
    events = []
    for at_ms in (0.0, 100.0):
        events += parts_of_a_step(at_ms)
        # The agreement's transfer: nobody waits for it until the part called so.
        events.append(event("gloo:all_reduce", at_ms + 13, at_ms + 45, "user_annotation", GLOO))
        # Python's time between two operators of the forward pass is the forward pass's.
        events.append(event("aten::conv3d", at_ms + 12, at_ms + 20, "cpu_op"))
        events.append(event("aten::conv3d", at_ms + 25, at_ms + 42, "cpu_op"))
        # Gradients cross while the backward pass goes on until 70, and are waited for until 80.
        events.append(event("ConvolutionBackward0", at_ms + 47, at_ms + 70, "cpu_op"))
        events.append(event("gloo:all_reduce", at_ms + 60, at_ms + 80, "user_annotation", GLOO))
        events.append(event("aten::copy_", at_ms + 80, at_ms + 87, "cpu_op"))
        # An operator of another thread, such as one that loads data, is none of the step's.
        events.append(event("aten::stack", at_ms + 70, at_ms + 80, "cpu_op", tid=77))
    found = breakdown(events)
    assert found.num_steps == 2
    assert found.step_s == pytest.approx(0.1)
    assert found.data_s == pytest.approx(0.010)
    assert found.forward_s == pytest.approx(0.030)
    assert found.communication_s == pytest.approx(0.005 + 0.010)
    assert found.backward_s == pytest.approx(0.030)
    assert found.optimizer_s == pytest.approx(0.010)
    assert found.other_s == pytest.approx(0.002 + 0.003)
    assert found.hidden_s == pytest.approx(0.029 + 0.010)
    assert "communication 15.0 %" in found.in_words()


def test_on_a_gpu_its_kernels_tell_and_what_launched_them() -> None:
    """The host queues all of a step's kernels in its first half; names as Kineto writes them."""
    events = [
        part("step", 0, 100),
        part("data", 0, 10),
        part("forward", 10, 20),
        part("backward", 20, 40),
        part("optimizer", 40, 45),
    ]
    kernels = [
        ("Memcpy HtoD", "gpu_memcpy", 5, 8, 12),  # launched in data
        ("sm90_xmma_fprop", "kernel", 15, 12, 35),
        ("sm90_xmma_dgrad", "kernel", 25, 35, 60),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 30, 50, 75),
        ("sm90_xmma_wgrad", "kernel", 35, 60, 70),
        ("multi_tensor_apply_kernel", "kernel", 42, 75, 80),
        ("elementwise_kernel", "kernel", 47, 80, 82),  # launched after the last part
    ]
    for number, (name, cat, launched, start, end) in enumerate(kernels):
        launch = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
        events.append(event(launch, launched, launched + 0.5, "cuda_runtime", correlation=number))
        events.append(event(name, start, end, cat, tid=7, correlation=number))
    found = breakdown(events)
    assert found.data_s == pytest.approx(
        0.004 + 0.008
    )  # the copy, and the GPU idle while the host has no data
    assert found.forward_s == pytest.approx(0.023)
    assert found.backward_s == pytest.approx(0.035)
    assert found.communication_s == pytest.approx(0.005)
    assert found.hidden_s == pytest.approx(0.020)
    assert found.optimizer_s == pytest.approx(0.005)
    assert found.other_s == pytest.approx(0.020)  # a kernel of none of the parts, and an idle GPU


def test_a_trace_without_steps_is_none() -> None:
    with pytest.raises(ValueError, match="no step"):
        breakdown([event("aten::conv3d", 0, 1, "cpu_op")])


def test_intervals() -> None:
    assert union([(5, 6), (1, 3), (2, 4), (6, 7), (9, 9)]) == [(1, 4), (5, 7)]
    assert intersect([(0, 4), (6, 9)], [(1, 2), (3, 7)]) == [(1, 2), (3, 4), (6, 7)]
    assert subtract([(0, 10)], [(-2, 1), (3, 4), (9, 12)]) == [(1, 3), (4, 9)]
    assert subtract([(0, 1), (2, 3)], []) == [(0, 1), (2, 3)]
    assert subtract([], [(0, 1)]) == []
    assert total([(0, 1.5), (2, 3)]) == 2.5
