"""An interrupt that comes at a bad moment."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbgpu

# Of a rank that has imported torch's compiler nothing could be shown.
pytestmark = pytest.mark.cold

NUM_CELLS = 60
NUM_STOPS = 40
PATIENCE_S = 30


def test_an_interrupt_before_the_first_or_after_the_last_line_loses_no_answer(
    cluster2: nbgpu.Cluster,
) -> None:
    over = threading.Event()

    def interrupt_all_the_time() -> None:
        while not over.wait(0.001):
            cluster2.ranks.interrupt((0, 1))

    thread = threading.Thread(target=interrupt_all_the_time)
    thread.start()
    try:
        for _ in range(NUM_CELLS):
            for rank, result in cluster2.submit("x = 1").items():
                assert result.wait(PATIENCE_S), f"rank {rank} never answered"
    finally:
        over.set()
        thread.join()
    assert cluster2.execute("print(rank)") == {0: "0\n", 1: "1\n"}


@pytest.fixture
def heeded() -> Iterator[None]:
    """A shell that puts a process into the background has it ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("heeded")
# An interrupt may come between psutil's opening of a file and its closing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_cell_is_sent_leaves_it_on_no_rank(cluster2: nbgpu.Cluster) -> None:
    """On one rank alone it would meet the other's next cell in a collective: a wrong sum, or a wait for
    ever."""
    chance = random.Random(0)
    stopped = 0
    for _ in range(NUM_STOPS):
        stop = threading.Timer(chance.uniform(0, 0.012), os.kill, (os.getpid(), signal.SIGINT))
        try:
            stop.start()  # which may be cut off as well
            cluster2.execute("dist.all_reduce(torch.full((1,), 100.0))")
            stop.join()
            time.sleep(0.05)  # within the block that awaits the interrupt
        except KeyboardInterrupt:
            stopped += 1
        stop.join()
        cluster2.parts.state.news.clear()
        total = "total = torch.ones(1); dist.all_reduce(total); print(int(total))"
        assert cluster2.execute(total) == {0: "2\n", 1: "2\n"}
    assert stopped == NUM_STOPS


@pytest.mark.parametrize("in_a", ["cell", "call"])
def test_a_stop_during_an_import_leaves_the_package_whole(
    cluster2: nbgpu.Cluster, tmp_path: Path, in_a: str
) -> None:
    """Python takes the package away whose import was cut off, but not its parts, and would never join them
    again.

    A call is what the client asks the ranks for: a training run, or the search for a batch size.
    """
    name = f"package_cut_off_in_a_{in_a}"
    package = tmp_path / name
    package.mkdir()
    (package / "part.py").write_text("value = 7\n")
    (package / "__init__.py").write_text(
        f"import {name}.part\nimport os, time\nopen(f'{tmp_path}/begun-{{os.getpid()}}', 'w').close()\ntime.sleep(wait_s)\n"
    )
    cluster2.execute(f"import builtins, sys; sys.path.insert(0, {str(tmp_path)!r}); builtins.wait_s = 60")
    if in_a == "cell":
        results = cluster2.submit(f"import {name}")
    else:
        results = cluster2.ranks.call("importlib:import_module", name)
    give_up_s = time.monotonic() + PATIENCE_S
    while len(list(tmp_path.glob("begun-*"))) < 2:
        assert time.monotonic() < give_up_s, "the ranks do not import the package"
        time.sleep(0.02)
    cluster2.ranks.interrupt((0, 1))
    for result in results.values():
        assert result.wait(PATIENCE_S)
    cluster2.execute("builtins.wait_s = 0")
    said = cluster2.execute(f"import {name}; print({name}.part.value)")
    cluster2.execute("sys.path.pop(0); del builtins.wait_s")
    assert said == {0: "7\n", 1: "7\n"}


@pytest.mark.long
def test_a_stop_during_the_import_of_torchs_compiler_waits_for_its_end(cluster2: nbgpu.Cluster) -> None:
    """It cannot be imported twice, and no optimizer works without it."""
    assert cluster2.execute("import sys; print('torch._dynamo' in sys.modules)") == {
        0: "False\n",
        1: "False\n",
    }
    results = cluster2.submit("import torch._dynamo")
    time.sleep(0.5)
    for _ in range(5):
        cluster2.ranks.interrupt((0, 1))
    for result in results.values():
        assert result.wait(PATIENCE_S)
    said = cluster2.execute(
        "import torch._dynamo; torch._dynamo.decorators; print(torch.compile(torch.neg, backend='eager')(torch.ones(())).item())"
    )
    assert said == {0: "-1.0\n", 1: "-1.0\n"}
