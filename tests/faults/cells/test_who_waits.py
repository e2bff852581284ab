"""A cell that hangs says who waits where and who does not, while it hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import faults
import launching
import pytest
from kernel import Done, Kernel, kernel
from rows import Measured, row

BOUND_S = 60
NOTICE_AFTER_S = 0.5
MAKE_DDP = "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        started.run("%load_ext nbgpu")
        command = f"%nbgpu start {launching.flags()} --notice-after-s {NOTICE_AFTER_S}"
        assert started.run(command).status == "ok"
        made = started.run(f"%%distributed\nimport time\n{MAKE_DDP}")
        assert made.status == "ok"
        yield started
        started.run("%nbgpu stop")


@pytest.fixture(autouse=True)
def the_next_sum_is_right(notebook: Kernel) -> Iterator[None]:
    yield
    done = notebook.run("%%distributed\none = torch.ones(1)\ndist.all_reduce(one)\nint(one)")
    assert done.stdout == "[0-1] 2\n"
    assert _notices(done) == []


HANGS = {
    "one has finished": (
        "if rank == 0:\n    dist.all_reduce(torch.ones(3))",
        "rank 0 waits in all_reduce, cell line 2, for {s} s; rank 1 has finished the cell",
    ),
    "another collective, elsewhere": (
        "if rank == 0:\n    dist.all_reduce(torch.ones(3))\nelse:\n    dist.all_gather_object([0, 0], rank)",
        "rank 0 waits in all_reduce, cell line 2, for {s} s; "
        "rank 1 waits in all_gather_object, cell line 4, for {s} s: they wait for each other",
    ),
    "the same line, for what never comes": (
        "dist.recv(torch.ones(3), src=1 - rank)",
        "all ranks wait in recv, cell line 1, for {s} s",
    ),
    "work that was begun": (
        "if rank == 0:\n    work = dist.all_reduce(torch.ones(3), async_op=True)\n    work.wait()",
        "rank 0 waits in work.wait(), cell line 3, for {s} s; rank 1 has finished the cell",
    ),
    "DDP's backward": (
        "if rank == 0:\n    ddp(torch.ones(2)).sum().backward()",
        "rank 0 waits in DDP backward, cell line 2, for {s} s; rank 1 has finished the cell. "
        "If the ranks have unequal numbers of batches, write the loop below `with model.join():`",
    ),
    "a function of an earlier cell": (
        "if rank == 0:\n    meet()",
        "rank 0 waits in barrier, meet, line 2 of an earlier cell, called at cell line 2, for {s} s; "
        "rank 1 has finished the cell",
    ),
    "a rank without the cell": (
        "dist.barrier()",
        "rank 0 waits in barrier, cell line 1, for {s} s; rank 1 was not given the cell",
    ),
}


def _notices(done: Done) -> list[str]:
    """What was said in the notice's place, in order; a cell of some length also gets a Stop button."""
    shown = [*done.displays, *done.updates]
    return [data["text/plain"] for data in shown if "text/html" in data]


def _seconds_aside(text: str) -> str:
    return re.sub(r"for \d+ s", "for {s} s", text)


@row(
    "a collective hangs: {hang}",
    "a notice under the cell says which ranks wait where, and which do not",
    bound_s=None,
)
@pytest.mark.parametrize("hang", HANGS)
def test_a_notice_says_who_waits_and_stop_leaves_it_as_a_line(
    notebook: Kernel, measured: Measured, hang: str
) -> None:
    def stop() -> None:
        measured.ended(hang)
        notebook.manager.interrupt_kernel()

    notebook.run("%%distributed\ndef meet():\n    dist.barrier()")
    code, expected = HANGS[hang]
    chosen = " --ranks 0" if "without" in hang else ""
    measured.fault_now()
    done = notebook.run(f"%%distributed{chosen}\n{code}", meanwhile=stop, timeout_s=BOUND_S)
    assert done.status == "error"
    first, *_, last = _notices(done)
    assert _seconds_aside(first) == expected
    assert _seconds_aside(last) == f"until it was stopped: {expected}"


def test_a_rank_that_is_not_at_the_cell_yet_is_told_in_plain_words(notebook: Kernel) -> None:
    notebook.run("import nbgpu\nbusy = nbgpu.current().ranks.call('time:sleep', 8, ranks=[1])")
    during = notebook.run("%nbgpu status")
    assert re.search(r"^1 .* busy$", during.stdout, re.M), during.stdout
    done = notebook.run("%%distributed\ndist.barrier()", timeout_s=BOUND_S)
    assert done.status == "ok"
    said = r"rank 0 waits in barrier, cell line 1, for \d+ s; rank 1 has not begun the cell"
    assert [text for text in _notices(done) if text], done
    assert all(re.fullmatch(said, text) for text in _notices(done) if text), _notices(done)


def test_the_notice_goes_away_when_the_ranks_go_on(notebook: Kernel) -> None:
    done = notebook.run(
        "%%distributed\nif rank == 1:\n    time.sleep(3)\ndist.all_reduce(torch.ones(3))", timeout_s=BOUND_S
    )
    assert done.status == "ok"
    notices = _notices(done)
    assert "rank 0 waits in all_reduce, cell line 3, for" in notices[0]
    assert "; rank 1 is at cell line 2: time.sleep(3)" in notices[0]
    # It counts up in place; a saved notebook keeps nothing of it.
    assert len(set(notices)) > 2
    assert notices[-1] == ""


def test_a_rank_that_holds_the_gil_is_told_from_one_that_does_not_answer_for_long(notebook: Kernel) -> None:
    code = f"time.sleep(1.5)\n{faults.at(1, 'hold_gil_asleep')}\ndist.all_reduce(torch.ones(3))"
    done = notebook.run(f"%%distributed\n{code}", timeout_s=BOUND_S)
    assert done.status == "ok"
    shown = _notices(done)
    said = "rank 1 does not answer for 1 s: it is in C code that holds the GIL (using no CPU, last seen at cell line 1)"
    assert any(said.replace("1 s", f"{s} s") in text for text in shown for s in (1, 2)), shown
    assert shown[-1] == ""


@pytest.mark.parametrize(
    "code",
    [
        "time.sleep(2)",
        "until = time.monotonic() + 2\nwhile time.monotonic() < until: pass",
        "for _ in range(20):\n    time.sleep(0.1)\n    dist.all_reduce(torch.ones(3))",
        f"{MAKE_DDP}\nfor _ in range(20):\n    time.sleep(0.1 * rank)\n    ddp(torch.ones(2)).sum().backward()",
    ],
)
def test_ranks_that_get_on_are_left_alone(notebook: Kernel, code: str) -> None:
    done = notebook.run(f"%%distributed\n{code}", timeout_s=BOUND_S)
    assert (done.status, _notices(done), done.stderr) == ("ok", [], ""), done.error


def test_status_in_the_middle_of_a_cell_shows_each_ranks_line(notebook: Kernel) -> None:
    notebook.run(
        "import threading, nbgpu, time\nsaid = []\n"
        "def ask():\n"
        "    started_s = time.monotonic()\n"
        "    said.append(nbgpu.current().status())\n"
        "    said.append(time.monotonic() - started_s)\n"
        "threading.Timer(1.0, ask).start()"
    )
    notebook.run(f"%%distributed\n{faults.at(1, 'hold_gil_asleep')}\ndist.barrier()", timeout_s=BOUND_S)
    lines = notebook.run("print(said[0])").stdout.splitlines()
    assert lines[2].endswith("cell line 2, in barrier: dist.barrier()")
    assert "it is in C code that holds the GIL" in lines[3]
    # Promised is one second; asserted that it did not wait for the rank.
    assert float(notebook.run("said[1]").value) < 1.5
    idle = notebook.run("%nbgpu status").stdout.splitlines()
    assert [line.split()[-1] for line in idle[2:]] == ["idle", "idle"]


@pytest.mark.one_host("the notebook stops the process of a rank, which is on its own host for that")
def test_a_rank_whose_process_is_stopped_is_told_from_one_in_c_code(notebook: Kernel) -> None:
    pid = int(notebook.run("%distributed __import__('os').getpid()").stdout.split("[1] ")[1])
    code = (
        "import os, signal, nbgpu\n"
        f"os.kill({pid}, signal.SIGSTOP)\n"
        # On a busy machine its threads go on until one of them has taken the signal.
        f"while ') T ' not in open('/proc/{pid}/stat').read(): pass\n"
        "print(nbgpu.current().status())\n"
        f"os.kill({pid}, signal.SIGCONT)"
    )
    done = notebook.run(code)
    assert (
        f"does not answer: its process is stopped (SIGSTOP; a debugger?). kill -CONT {pid} lets it go on"
        in done.stdout
    )
