"""An interrupt that comes at a bad moment."""

from __future__ import annotations

import threading

import nbgpu

NUM_CELLS = 60
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
