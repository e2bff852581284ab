"""Distributed cells: values that come and go, and Stop while the device has much to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from checks import Place, check

_NUM_TIMES = 5


@check(
    "a tensor on the GPU is pulled and pushed bit by bit, beside `clone` and `cpu`",
    slice=1,
    page="benchmarks",
    alone=True,
    seldom=False,
)
def pull_and_push(place: Place) -> None:
    import torch

    num_bytes = place.size(400_000_000, 8_000_000)
    with place.cluster() as cluster:
        cluster.execute(
            f"x = torch.randn({num_bytes // 4}, device=device)\nchecksum = int(x.view(torch.int32).sum())"
        )
        pulled = cluster.pull("x")
        assert pulled.device.type == "cpu"
        assert int(pulled.view(torch.int32).sum()) == cluster.pull("checksum"), "the pulled tensor differs"

        def on_rank(statement: str) -> None:
            synchronize = "torch.cuda.synchronize()" if place.on_gpu else "pass"
            cluster.execute(f"{statement}\n{synchronize}")

        times: dict[str, Callable[[], Any]] = {
            "pull": lambda: cluster.pull("x"),
            "push": lambda: cluster.push(y=pulled),
            "push, and to the device": lambda: (cluster.push(y=pulled), on_rank("z = y.to(device)")),
            "a cell with `x.cpu()`": lambda: on_rank("y = x.cpu()"),
            "a cell with `x.clone()`": lambda: on_rank("y = x.clone()"),
            "`clone` of the pulled tensor here": lambda: pulled.clone(),
        }
        for name, work in times.items():
            taken_s = [_seconds(work) for _ in range(_NUM_TIMES)]
            place.figure(name, 1e3 * statistics.median(taken_s), "ms")
        on_rank("z = y.to(device)")
        same = cluster.execute("cluster_said = torch.equal(z.cpu(), y); print(cluster_said)")
        assert same == {0: "True\n"}, same
        cluster.push(y=pulled)
        said = cluster.execute("print(torch.equal(y.to(device), x), y.device.type)")
        assert said == {0: "True cpu\n"}, f"the pushed tensor differs: {said}"
    place.figure("size of the tensor", num_bytes / 1e6, "MB")


def _seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


@check(
    "Stop of a cell that has given the device work for many seconds; the next cell is right, variables are kept",
    slice=1,
    page="faults",
    alone=True,
    timeout_s=150,
    seldom=False,
)
def stop_in_a_long_kernel_queue(place: Place) -> None:
    from kernel import kernel

    # On an H200 a product of two such matrices takes 1.4 ms, and a queue holds a thousand kernels.
    edge, num_products = place.size((8192, 8000), (512, 2000))
    synchronize = "torch.cuda.synchronize()" if place.on_gpu else "pass"
    queue = (
        f"a = torch.randn({edge}, {edge}, device=device, dtype=torch.bfloat16 if {place.on_gpu} else None)\n"
        "kept = rank + 7\nprint('working', flush=True)\n"
        f"for _ in range({num_products}):\n    b = a @ a\n{synchronize}"
    )
    with kernel() as notebook:
        started = notebook.run(place.start_line(1))
        assert started.status == "ok", started.error
        stopped_s: list[float] = []

        def stop() -> None:
            time.sleep(place.size(2.0, 0.5))
            stopped_s.append(time.monotonic())
            notebook.manager.interrupt_kernel()

        done = notebook.run(f"%%distributed\n{queue}", meanwhile=stop, timeout_s=90)
        back_s = time.monotonic() - stopped_s[0]
        place.figure("from Stop until the cell is back", back_s, "s")
        assert done.status == "error", "the queue was over before the stop: make it longer"
        assert "KeyboardInterrupt" in done.error, done.error
        after = notebook.run(
            "%%distributed\ntotal = torch.ones(1, device=device); dist.all_reduce(total)\nint(total), kept",
            timeout_s=90,
        )
        assert after.said(0) == [["(1, 7)"]], f"{after.stdout}{after.error}"
        place.figure("from Stop until the next cell is done", time.monotonic() - stopped_s[0], "s")
        notebook.run("%nbgpu stop")
