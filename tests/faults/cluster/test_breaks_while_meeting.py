"""The ranks are broken at random moments while they meet, and afterwards their sums are right."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
from rows import row

import nbgpu

NUM_BREAKS = 50
WELL = {0: "2 0\n", 1: "2 7\n"}
TOTAL = "total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
BREAKS = (
    "if rank == {rank}: time.sleep({delay_s}); 1 / 0\ndist.barrier()",
    "if rank == {rank}: time.sleep({delay_s}); 1 / 0\nown = dist.new_group([0, 1]); dist.barrier(own)",
    "own = dist.new_group([0, 1])\nif rank == {rank}: time.sleep({delay_s}); 1 / 0\n"
    "while True: dist.barrier(dist.new_group([0, 1]))",
    "if rank == {rank}: time.sleep({delay_s}); 1 / 0\nwhile True: dist.all_reduce(torch.ones(1000))",
    "if rank == {rank}: time.sleep({delay_s}); 1 / 0\n"
    "dist.distributed_c10d._get_default_store().wait(['never'])",
)


@pytest.mark.long
@row(
    "50 times in a row, a rank raises at a random moment: in a collective, while a group is made, or while the "
    "others wait in the store in which the ranks meet",
    "the failure is named each time, all are back, the sum is right each time, variables are kept",
    bound_s=None,
)
def test_no_sum_is_wrong_after_many_random_breaks(cluster2: nbgpu.Cluster) -> None:
    chance = random.Random(0)
    cluster2.execute("import time\nkept = 7 * rank")
    for _ in range(NUM_BREAKS):
        code = chance.choice(BREAKS).format(rank=chance.randrange(2), delay_s=chance.uniform(0, 0.03))
        with pytest.raises(nbgpu.RankError, match="ZeroDivisionError"):
            cluster2.execute(code)
        assert cluster2.execute(TOTAL) == WELL
        cluster2.parts.state.news.clear()


@row(
    "a rank is killed while the other waits for it in the store in which the ranks meet",
    "the end is named, the rank is replaced, the sum is right, the other's variables are kept",
    bound_s=None,
)
@pytest.mark.parametrize("whose", [0, 1])
def test_a_rank_is_killed_while_ranks_meet(whose: int, cluster2: nbgpu.Cluster) -> None:
    """Rank 0 waits for a key that never comes, rank 1 sleeps."""
    cluster2.execute("kept = 7 * rank")
    killer = threading.Timer(0.3, os.kill, (cluster2.pids[whose], signal.SIGKILL))
    killer.start()
    with pytest.raises(nbgpu.RankError, match=f"rank {whose}"):
        cluster2.execute(
            "import time\nif rank == 0: dist.distributed_c10d._get_default_store().wait(['never'])\ntime.sleep(60)"
        )
    killer.join()
    cluster2.execute("kept = 7 * rank")
    assert cluster2.execute(TOTAL) == WELL
    cluster2.parts.state.news.clear()
