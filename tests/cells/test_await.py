"""Distributed cells with an `await` of their own: on ipyparallel's engines these are never answered with
ipykernel 7."""

from __future__ import annotations

import pytest
from kernel import Kernel

BOUND_S = 30
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"


def test_a_cell_awaits_and_its_last_value_is_shown(notebook: Kernel) -> None:
    code = "%%distributed\nimport asyncio\nawait asyncio.sleep(0.1)\nprint('slept')\nawait asyncio.sleep(0, rank + 5)"
    done = notebook.run(code, timeout_s=BOUND_S)
    assert done.status == "ok", done.error
    assert done.said(0, 1) == [["slept", "5"], ["slept", "6"]]


def test_collectives_in_coroutines(notebook: Kernel) -> None:
    notebook.run(
        "%%distributed\nasync def total_of(x):\n    await asyncio.sleep(0.01 * rank)\n"
        "    total = torch.tensor(float(x))\n    dist.all_reduce(total)\n    return int(total)"
    )
    assert notebook.run("%distributed await total_of(rank + 1)").stdout == "[0-1] 3\n"
    in_thread = (
        "%%distributed\nx = torch.ones(1)\nawait asyncio.to_thread(dist.all_reduce, x)\n"
        "ticks = [await total_of(n) for n in range(3)]\n(int(x), ticks)"
    )
    assert notebook.run(in_thread).stdout == "[0-1] (2, [0, 2, 4])\n"


def test_a_task_goes_on_between_cells(notebook: Kernel) -> None:
    notebook.run(
        "%%distributed\nasync def count():\n    global counted\n    for counted in range(4):\n        await asyncio.sleep(0.02)\n"
        "    return 'counted to', counted\ncounting = asyncio.ensure_future(count())"
    )
    assert notebook.run("%distributed await counting", timeout_s=BOUND_S).stdout == (
        "[0-1] ('counted to', 3)\n"
    )


def test_an_error_has_the_lines_of_the_cell(notebook: Kernel) -> None:
    code = "%%distributed\nawait asyncio.sleep(0)\nif rank == 1:\n    raise ValueError('on purpose')\nawait asyncio.sleep(600)"
    done = notebook.run(code, timeout_s=BOUND_S)
    assert "on rank 1:" in done.error
    assert "----> 3     raise ValueError('on purpose')" in done.error
    assert "freed from waiting for the others: rank 0" in done.stderr
    assert notebook.run(SUM).stdout == "[0-1] 2\n"


@pytest.mark.parametrize(
    "waits",
    [
        "await asyncio.sleep(600)",
        "import time; await asyncio.sleep(0); time.sleep(600)",
        "import time\nasync def sleep(): time.sleep(600)\nawait asyncio.gather(sleep(), sleep())",
        "await asyncio.to_thread(dist.barrier) if rank else await asyncio.sleep(600)",
        "async def wait(): dist.barrier()\nawait asyncio.wait_for(wait() if rank else asyncio.sleep(600), 600)",
    ],
)
def test_stop_ends_it_wherever_it_waits(notebook: Kernel, waits: str) -> None:
    code = f"%%distributed\nkept = rank\nprint('begun', flush=True)\n{waits}"
    done = notebook.run(code, meanwhile=notebook.manager.interrupt_kernel, timeout_s=BOUND_S)
    assert "the cell was stopped" in done.error
    assert "did not come back" not in done.stderr
    assert notebook.run(f"{SUM}, kept").stdout == "[0] (2, 0)\n[1] (2, 1)\n"


def test_status_names_the_line_that_awaits(notebook: Kernel) -> None:
    notebook.run(
        "import asyncio, nbgpu\nasync def look():\n    await asyncio.sleep(2)\n    return nbgpu.current().status()\n"
        "looking = asyncio.ensure_future(look())"
    )
    notebook.run("%%distributed --timeout 4\nimport asyncio\nawait asyncio.sleep(600)", timeout_s=BOUND_S)
    seen = notebook.run("print(await looking)").stdout
    assert seen.count("cell line 2: await asyncio.sleep(600)") == 2, seen
