"""Distributed cells: values that come and go, and Stop while the device has much to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from checks import Place, check

_NUM_TIMES = 5
_STOP = ("client/cells", "client/faults", "engine/ipykernel")


@check(
    "a tensor on the GPU is pulled and pushed bit by bit, beside `clone` and `cpu`",
    slice=1,
    page="benchmarks",
    shows=("client/variables", "engine/variables/transfer.py", "serialization"),
    budget_s=16,
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

        def on_rank(statement: str) -> dict[int, str]:
            synchronize = "torch.cuda.synchronize()" if place.on_gpu else "pass"
            said: dict[int, str] = cluster.execute(f"{statement}\n{synchronize}")
            return said

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
        # A cell has put another tensor there.
        cluster.push(y=pulled)
        said = cluster.execute("print(torch.equal(y.to(device), x), y.device.type)")
        assert said == {0: "True cpu\n"}, f"the pushed tensor differs: {said}"
    place.figure("size of the tensor", num_bytes / 1e6, "MB")


def _seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _stop(place: Place, code: str) -> None:
    """Run a cell on one rank, stop it, and note how long it takes until the next cell is right."""
    from kernel import kernel

    with kernel() as notebook:
        started = notebook.run(place.start_line(1), timeout_s=place.bound_s(60))
        assert started.status == "ok", started.error
        stopped_s: list[float] = []

        def stop() -> None:
            time.sleep(place.size(2.0, 0.5))
            stopped_s.append(time.monotonic())
            notebook.manager.interrupt_kernel()

        done = notebook.run(
            f"%%distributed\nkept = rank + 7\n{code}", meanwhile=stop, timeout_s=place.bound_s(60)
        )
        place.figure("from Stop until the cell is back", time.monotonic() - stopped_s[0], "s")
        print(done.error, done.stderr)
        assert done.status == "error", "the queue was over before the stop: make it longer"
        # A rank that is in C code gets no other cell before it has come back, and the cell says so.
        give_up_s = time.monotonic() + place.bound_s(40)
        total = "total = torch.ones(1, device=device); dist.all_reduce(total)\nint(total), kept"
        while (
            after := notebook.run(f"%%distributed\n{total}", timeout_s=place.bound_s(60))
        ).status == "error":
            print(after.error)
            assert time.monotonic() < give_up_s, f"the rank did not come back: {after.error}"
            time.sleep(0.5)
        place.figure("from Stop until the next cell is done", time.monotonic() - stopped_s[0], "s")
        assert after.said(0) == [["(1, 7)"]], f"{after.stdout}{after.error}"
        notebook.run("%nbgpu stop")


@check(
    "Stop of a cell that gives the device kernel after kernel; the next cell is right, variables are kept",
    slice=2,
    page="faults",
    shows=_STOP,
    budget_s=16,
    alone=True,
    seldom=False,
)
def stop_while_kernels_are_launched(place: Place) -> None:
    # On an H200 a product of two such matrices takes 1.4 ms. A queue holds a thousand kernels, and whoever
    # launches another one waits.
    edge, num_products, dtype = place.size((8192, 8000, "bfloat16"), (512, 20_000, "float32"))
    synchronize = "torch.cuda.synchronize()" if place.on_gpu else ""
    _stop(
        place,
        f"a = torch.randn({edge}, {edge}, device=device, dtype=torch.{dtype})\nprint('working', flush=True)\n"
        f"for _ in range({num_products}):\n    b = a @ a\n{synchronize}",
    )


@check(
    "Stop of a cell that waits for a device with ten seconds of work: it comes back, and variables are kept",
    slice=2,
    page="faults",
    shows=_STOP,
    budget_s=23,
    alone=True,
)
def stop_in_a_long_kernel_queue(place: Place) -> None:
    # 0.09 s for each product on an H200. The wait for all of them is one call of C, as the decomposition is.
    if place.on_gpu:
        work = (
            "a = torch.randn(32768, 32768, device=device, dtype=torch.bfloat16)\nprint('working', flush=True)\n"
            "for _ in range(110):\n    b = a @ a\ntorch.cuda.synchronize()"
        )
    else:
        work = "a = torch.randn(1200, 1200)\nprint('working', flush=True)\nfor _ in range(50):\n    torch.linalg.svd(a)"
    _stop(place, work)
