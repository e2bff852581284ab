"""Whatever goes wrong on one rank, the cell ends, the cause is named, and the next collective is right.

Every collective here has torch's own timeout of half an hour: whoever waited for it would not see the end of
this test. The bounds in seconds only tell an end from that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import faults
import launching
import pytest
from kernel import Kernel, kernel
from rows import Measured, row

NUM_RANKS = 3
BOUND_S = 15
MAKE_DDP = "model = torch.nn.Linear(256, 256)\nddp = torch.nn.parallel.DistributedDataParallel(model)"
TRAIN = "for step in range(10**6):\n    ddp(torch.randn(4, 256)).sum().backward()"

WAITS = {
    "all_reduce": "dist.all_reduce(torch.ones(1000))",
    "broadcast": "dist.broadcast(torch.ones(1000), src={bad})",
    "barrier": "dist.barrier()",
    "the making of a group": "dist.new_group([0, 1, 2])",
    "a group of the person's own": "dist.all_reduce(torch.ones(10), group=own)",
    "plain Python": "import time\nfor _ in range(6000): time.sleep(0.1)",
}


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        started.run("%load_ext nbgpu")
        assert started.run(f"%nbgpu start {launching.flags(NUM_RANKS)}").status == "ok"
        yield started
        started.run("%nbgpu stop")


@pytest.fixture(autouse=True)
def ranks_are_well_afterwards(notebook: Kernel) -> Iterator[None]:
    """After every fault: the sum is right on every rank, and the variables are as they were."""
    notebook.run("%%distributed\nkept = 7 * rank\nown = dist.new_group(list(range(world_size)))")
    yield
    done = notebook.run(
        "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total), kept", timeout_s=BOUND_S
    )
    assert done.said(0, 1, 2) == [[f"({NUM_RANKS}, {7 * r})"] for r in range(3)], done.error + done.stderr
    # torch keeps a group with its three threads until it is destroyed, also one that no variable has.
    ended = notebook.run("%%distributed\ndist.destroy_process_group(own)")
    assert ended.status == "ok", ended.error


@row(
    "one rank raises, the others wait in {waits}",
    "all are back; the cause is shown with its rank, freed ranks in one line; the sum is right; variables are kept",
    bound_s=1,
)
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("waits", WAITS)
def test_one_rank_raises_while_the_others_wait(
    notebook: Kernel, measured: Measured, waits: str, bad: int
) -> None:
    code = f"%%distributed\n{faults.at(bad, 'raise')}\n{WAITS[waits].format(bad=bad)}"
    done = notebook.run(code, timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.status == "error"
    assert done.error.startswith(f"on rank {bad}:")
    assert "ValueError: on purpose" in done.error
    assert done.error.count("on rank") == 1, "the freed ranks are no failures"
    others = ", ".join(str(r) for r in range(NUM_RANKS) if r != bad)
    assert f"freed from waiting for the others: ranks {others}" in done.stderr


def test_a_group_of_the_persons_own_goes_on(notebook: Kernel) -> None:
    done = notebook.run(f"%%distributed\n{faults.at(1, 'raise')}\ndist.barrier()", timeout_s=BOUND_S)
    assert "make it again" not in done.stderr
    done = notebook.run("%%distributed\nmine = torch.ones(1)\ndist.all_reduce(mine, group=own)\nint(mine)")
    assert done.said(0, 1, 2) == [["3"]] * 3


def test_a_mere_mistake_leaves_the_groups_as_they_are(notebook: Kernel) -> None:
    done = notebook.run("%%distributed --ranks 1\nnot_a_name", timeout_s=BOUND_S)
    assert "NameError" in done.error
    assert done.stderr == ""
    done = notebook.run("%%distributed\nmine = torch.ones(1)\ndist.all_reduce(mine, group=own)\nint(mine)")
    assert done.said(0, 1, 2) == [["3"]] * 3


@pytest.mark.parametrize("waits", [True, False], ids=["the sender waits", "nobody waits"])
def test_news_of_a_failed_cell_never_reaches_the_next(notebook: Kernel, waits: bool) -> None:
    """A small broadcast is sent before anybody takes it: what rank 0 sent in vain must not be taken later,
    also where no rank was in a collective any more when rank 1 raised."""
    sent = f"dist.broadcast(torch.full((1,), 100.0), src=0, async_op={not waits})"
    late = "" if waits else "__import__('time').sleep(0.5)\n"
    code = f"%%distributed\nif rank == 0: {sent}\nif rank == 1: {late or 'pass'}\n{faults.at(1, 'raise')}"
    assert "on purpose" in notebook.run(code, timeout_s=BOUND_S).error
    code = "%%distributed\nnews = torch.full((1,), float(rank + 1))\ndist.broadcast(news, src=0)\nint(news)"
    assert notebook.run(code, timeout_s=BOUND_S).said(0, 1, 2) == [["1"]] * 3


@row(
    "one rank raises between two steps of DDP by hand, the others wait in backward",
    "as above, and the same DDP object averages the gradients of all ranks",
    bound_s=1,
)
@pytest.mark.parametrize("bad", [0, 2])
def test_ddp_goes_on_after_a_failure_in_the_middle_of_training(
    notebook: Kernel, measured: Measured, bad: int
) -> None:
    notebook.run(f"%%distributed\ntorch.manual_seed(0)\n{MAKE_DDP}")
    fault = faults.at(bad, "raise").replace(f"rank == {bad}", f"rank == {bad} and step == 20")
    done = notebook.run(f"%%distributed\n{TRAIN}\n    {fault}", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert f"on rank {bad}:" in done.error
    # The same object works on, and averages the gradients over all ranks: (0 + 1 + 2) / 3.
    code = (
        "%%distributed\nddp.zero_grad()\nddp(torch.full((1, 256), float(rank))).sum().backward()\n"
        "float(ddp.module.weight.grad[0, 0])"
    )
    done = notebook.run(code, timeout_s=BOUND_S)
    assert done.said(0, 1, 2) == [["1.0"]] * 3


STOPS = {
    "in a Python loop": "import time\nwhile True: time.sleep(0.01)",
    "in a collective that never completes": "if rank == 0: dist.all_reduce(torch.full((1,), 100.0))",
    "in the making of a group to which one does not come": "if rank > 0: dist.new_group([0, 1, 2])",
    "in a loop of collectives": "while True: dist.all_reduce(torch.ones(1000))",
    "in DDP's backward": f"{MAKE_DDP}\n{TRAIN}",
    "in a rank that waits for one that is done": "if rank > 0: dist.barrier()",
}


@row(
    "Stop {where}",
    "the cell ends, every rank lives and keeps its variables, the sum is right, a cell sent at once runs",
    bound_s=1,
)
@pytest.mark.parametrize("where", STOPS)
def test_stop(notebook: Kernel, measured: Measured, where: str) -> None:
    def stop() -> None:
        measured.fault_now()
        notebook.manager.interrupt_kernel()

    code = f"%%distributed\nprint('working', flush=True)\n{STOPS[where]}"
    done = notebook.run(code, meanwhile=stop, timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.status == "error"


@pytest.mark.parametrize("sent_before_stop", [False, True])
def test_a_cell_that_is_sent_after_stop_runs_and_one_that_waited_does_not(
    notebook: Kernel, sent_before_stop: bool
) -> None:
    """The ranks may take a second to come back, and ipykernel drops what is sent meanwhile."""
    client = notebook.client
    stopped = client.execute("%%distributed\nif rank == 0: dist.barrier()")
    time.sleep(1)
    if sent_before_stop:
        next_one = client.execute("%distributed 1")
        time.sleep(1)
    notebook.manager.interrupt_kernel()
    if not sent_before_stop:
        time.sleep(0.05)
        next_one = client.execute("%distributed 1")
    assert _statuses(notebook, 2) == {stopped: "error", next_one: "aborted" if sent_before_stop else "ok"}
    # "Run All" stops behind a cell that fails, after a Stop as before it.
    failing, behind = client.execute("1 / 0"), client.execute("2")
    assert _statuses(notebook, 2) == {failing: "error", behind: "aborted"}


def _statuses(notebook: Kernel, num: int) -> dict[str, str]:
    """The status of each of the next replies, by the request's id."""
    replies = [notebook.client.get_shell_msg(timeout=BOUND_S) for _ in range(num)]
    return {reply["parent_header"]["msg_id"]: reply["content"]["status"] for reply in replies}


@pytest.mark.long
@row("Stop in C code that holds the GIL", "the cell ends, says so, and how to give the rank up", bound_s=2)
def test_stop_in_c_code_says_so_and_the_rank_comes_back(notebook: Kernel, measured: Measured) -> None:
    def stop() -> None:
        time.sleep(1)  # until the rank is in C
        measured.fault_now()
        notebook.manager.interrupt_kernel()

    code = f"%%distributed\nprint('working', flush=True)\nimport time; time.sleep(0.3)\n{faults.at(0, 'hold_gil')}"
    done = notebook.run(code, meanwhile=stop, timeout_s=BOUND_S)
    measured.ended(done.error)
    assert "rank 0 did not come back: it does not answer for" in done.error
    assert "it is in C code that holds the GIL (computing" in done.error
    assert "at cell line 3. " in done.error
    assert "%nbgpu restart --rank 0" in done.error
    # The next cell is refused in words until the rank is back, and runs then.
    give_up_s = time.monotonic() + 300
    while (answer := notebook.run("%distributed 1")).status == "error" and time.monotonic() < give_up_s:
        assert "still in an earlier cell" in answer.error
        time.sleep(0.5)
    assert answer.status == "ok"
