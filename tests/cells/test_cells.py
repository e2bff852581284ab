"""Distributed cells and the magics, in a real kernel."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator

import launching
import pytest
from kernel import Kernel, kernel


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run("%load_ext nbgpu").status == "ok"
        answer = started.run(f"%nbgpu start {launching.flags()}")
        assert answer.stdout.splitlines()[-1] == launching.described()
        yield started
        assert started.run("%nbgpu stop").stdout == "stopped\n"


def test_a_cell_runs_on_every_rank_and_its_last_value_is_shown(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\nx = torch.full((2,), float(rank))\nprint('from', rank)\nx")
    assert done.status == "ok"
    assert "[0] from 0\n" in done.stdout
    assert "[1] from 1\n" in done.stdout
    assert done.stdout.endswith("[0] tensor([0., 0.])\n[1] tensor([1., 1.])\n")
    assert notebook.run("%distributed x.sum().item()").stdout == "[0] 0.0\n[1] 2.0\n"


def test_stdout_and_stderr_are_told_apart(notebook: Kernel) -> None:
    done = notebook.run("%%distributed --ranks 1\nimport sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert (done.stdout, done.stderr) == ("[1] out\n", "[1] err\n")


def test_output_comes_while_the_cell_runs(notebook: Kernel) -> None:
    seen_s: list[float] = []
    started_s = time.monotonic()
    code = "%%distributed --ranks 0\nimport time\nprint('first', flush=True)\ntime.sleep(3)\nprint('last')"
    done = notebook.run(code, meanwhile=lambda: seen_s.append(time.monotonic() - started_s))
    assert done.stdout == "[0] first\n[0] last\n"
    assert seen_s[0] < done.took_s - 1.5


def test_rich_output_of_a_rank_is_shown_as_such(notebook: Kernel) -> None:
    done = notebook.run(
        "%%distributed\nfrom IPython.display import HTML, display\ndisplay(HTML(f'<b>{rank}</b>'))"
    )
    assert sorted(d["text/html"] for d in done.displays) == ["<b>0</b>", "<b>1</b>"]


def test_a_cell_that_raises_is_an_error_with_the_ranks_own_traceback(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\nprint('before')\nif rank == 1:\n    raise ValueError('on purpose')")
    assert done.status == "error"
    assert "[0-1] before\n" in done.stdout
    assert "on rank 1:" in done.error
    assert "ValueError: on purpose" in done.error
    assert "raise ValueError('on purpose')" in done.error
    assert "nbgpu" not in done.error


def test_syntax_errors_and_unknown_ranks_are_errors(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\nx = 1 +")
    assert done.status == "error"
    assert "SyntaxError" in done.error
    assert "0 to 1" in notebook.run("%%distributed --ranks 0,5\n1").error
    assert "0,2-3" in notebook.run("%%distributed --ranks one\n1").error


def test_values_travel_into_the_notebook_and_back(notebook: Kernel) -> None:
    notebook.run("%%distributed\nmine = rank * 10")
    assert notebook.run("%pull mine --rank 1 --as theirs\ntheirs").value == "10"
    assert notebook.run("a, b = 1, 2\n%push a b").status == "ok"
    assert notebook.run("%distributed a + b + rank").stdout == "[0] 3\n[1] 4\n"
    assert notebook.run("%%distributed --into by_rank\nmine + 1").status == "ok"
    assert notebook.run("by_rank").value == "{0: 1, 1: 11}"
    missing = notebook.run("%push never_made bb")
    assert "never_made: there is no variable of this name\nbb: there is no" in missing.error + missing.stderr
    assert notebook.run("%push a --ranks 1").status == "ok"
    assert notebook.run("%pull mine a --into both --ranks 1\nboth").value == "{1: {'mine': 10, 'a': 1}}"
    assert notebook.run("%pull mine --into all_of_them\nall_of_them").value == "{0: 0, 1: 10}"
    assert notebook.run("%pull mine+1 --rank 1 --as more\nmore").value == "11"
    assert "%pull mine+1 --as NAME" in notebook.run("%pull mine+1").stderr
    assert (
        "--into takes the value of each rank"
        in (wrong := notebook.run("%pull mine --into x --rank 1")).error + wrong.stderr
    )


def test_a_pulled_tensor_brings_torch_and_what_cannot_come_says_why(notebook: Kernel) -> None:
    notebook.run("%%distributed\nheld = {'x': torch.full((10**6,), 1.0 + rank), 'f': [None]}")
    assert notebook.run("%pull held --rank 1\nheld['x'].add_(1).mean().item()").value == "3.0"
    assert notebook.run("%distributed held['x'].mean().item()").stdout == "[0] 1.0\n[1] 2.0\n"
    notebook.run("%%distributed\nheld['f'][0] = (n for n in range(3))")
    error = notebook.run("%pull held helt --into x").error
    assert "helt: there is no variable of this name. Did you mean held?" in error
    assert "held['f'][0]: generator cannot travel" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("above", ["", "\n\n"], ids=["at the top", "below empty lines"])
def test_the_event_loop_goes_on_during_a_cell(notebook: Kernel, above: str) -> None:
    notebook.run(
        "import asyncio\nticks = []\n"
        "async def tick():\n    while True:\n        ticks.append(1)\n        await asyncio.sleep(0.05)\n"
        "ticking = asyncio.ensure_future(tick())"
    )
    notebook.run(f"{above}%%distributed\nimport time\ntime.sleep(1.5)")
    assert int(notebook.run("ticking.cancel(); len(ticks)").value) > 15


def test_a_timeout_interrupts_the_ranks_and_the_next_cell_runs(notebook: Kernel) -> None:
    done = notebook.run("%%distributed --timeout 0.5\nimport time\nkept = 1\ntime.sleep(60)", timeout_s=20)
    assert done.status == "error"
    assert "did not finish within 0.5 s" in done.error
    assert notebook.run("%distributed kept").stdout == "[0-1] 1\n"


def test_the_kernels_interrupt_ends_the_cell_and_keeps_the_state(notebook: Kernel) -> None:
    code = "%%distributed\nimport time\nheld = rank\nprint('working', flush=True)\ntime.sleep(60)"
    done = notebook.run(code, meanwhile=notebook.manager.interrupt_kernel, timeout_s=20)
    assert done.status == "error"
    code = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\n(held, int(total))"
    assert notebook.run(code).stdout.endswith("[0] (0, 2)\n[1] (1, 2)\n")


def test_the_interrupt_of_a_line_magic_too(notebook: Kernel) -> None:
    code = "%distributed print('working', flush=True); __import__('time').sleep(60)"
    done = notebook.run(code, meanwhile=notebook.manager.interrupt_kernel, timeout_s=20)
    assert done.status == "error"
    assert notebook.run("%distributed 1").stdout == "[0-1] 1\n"


def test_status_is_a_table_of_ranks(notebook: Kernel) -> None:
    lines = notebook.run("%nbgpu status").stdout.splitlines()
    assert lines[0] == launching.described()
    columns = [column for column in lines[1].split() if column != "host"]
    assert columns == ["rank", "device", "pid", "memory", "state"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]


def test_bad_settings_and_a_second_start_are_refused_in_words(notebook: Kernel) -> None:
    assert (
        "ranks = 0 is not valid. Give a value within: 1 to 64" in notebook.run("%nbgpu start --ranks 0").error
    )
    assert "already running" in notebook.run("%nbgpu start").error
    unknown = notebook.run("%nbgpu dance")
    assert (
        "there is no such command. Commands: start, status, stop, restart, resize, attach"
        in unknown.error + unknown.stderr
    )


def test_without_a_cluster_the_cell_says_how_to_start_one() -> None:
    with kernel() as notebook:
        notebook.run("%load_ext nbgpu")
        assert "%nbgpu start" in notebook.run("%%distributed\n1").error
        assert notebook.run("import sys; 'torch' in sys.modules").value == "False"


@pytest.mark.long
def test_a_cell_does_not_overtake_what_was_sent_before_it(notebook: Kernel) -> None:
    long = "nbgpu.current().submit(f'order = [1]; long = {20_000_000 * \"x\"!r}')"
    short = "await nbgpu.run_cell('', 'order.append(2)')"
    assert notebook.run(f"import nbgpu\n{long}\n{short}").error == ""
    assert notebook.run("%distributed order").stdout == "[0-1] [1, 2]\n"


def test_the_history_names_a_door_that_stays(notebook: Kernel) -> None:
    notebook.run("%%distributed --ranks 0\npass")
    parsed = "get_ipython().history_manager.input_hist_parsed[-2]"
    text = ast.literal_eval(notebook.run(parsed).value)
    assert text == "await __import__('nbgpu').run_cell('--ranks 0', 'pass\\n')"
    assert notebook.run(text).status == "ok"


def test_what_the_notebook_itself_writes_beside_a_cell_is_there_at_its_end(notebook: Kernel) -> None:
    """A cell on the ranks leaves ipykernel's waits for its streams out, but not where there is something to
    wait for."""
    write = "print('from here')\nawait nbgpu.run_cell('', 'pass')\nprint('and here', end='')"
    for _ in range(20):
        assert notebook.run("%%distributed\npass").stdout == ""
        assert notebook.run(f"import nbgpu\n{write}").stdout == "from here\nand here"
    flush = (
        "import sys\nfrom ipykernel.iostream import OutStream\nsys.stdout.flush.__func__ is OutStream.flush"
    )
    assert notebook.run(flush).value == "True"


DEPTHS = """
import inspect, sys
stream, depths = type(sys.stdout), []
own = stream._schedule_flush
def note_depth(self):
    depths.append(len(inspect.stack(0)))
    own(self)
stream._schedule_flush = note_depth
"""


def test_cells_leave_nothing_between_the_notebook_and_its_streams(notebook: Kernel) -> None:
    assert notebook.run(DEPTHS).status == "ok"
    for _ in range(5):
        assert notebook.run("print('x', end='')").stdout == "x"
        assert notebook.run("%%distributed\nprint('y')").stdout == "[0-1] y\n"
    assert notebook.run("del depths[:]\nprint('x', end='')\nbefore = depths[:]").stdout == "x"
    for _ in range(5):
        assert notebook.run("%%distributed\npass").status == "ok"
    after = notebook.run("del depths[:]\nprint('x', end='')\ndepths == before != [], depths, before")
    assert after.value.startswith("(True, "), after.value
    assert notebook.run("stream._schedule_flush = own").status == "ok"


COUNTING = """
import itertools, nbgpu
count = itertools.count()
def push_count(info):
    nbgpu.current().push(count=next(count))
get_ipython().events.register('pre_run_cell', push_count)
seen = []
get_ipython().events.register('pre_run_cell', seen.append)  # it has no module
"""


def test_what_a_person_has_done_before_each_cell_is_done_before_the_ranks_begin(notebook: Kernel) -> None:
    assert notebook.run(COUNTING).status == "ok"
    for expected in range(3):
        assert notebook.run("%%distributed\ncount").stdout == f"[0-1] {expected}\n"
    no_more = "get_ipython().events.callbacks['pre_run_cell'].clear()\nlen(seen) > 3"
    assert notebook.run(no_more).value == "True"


REJECTING = """
import ast
from IPython.core.error import InputRejected
class Reject(ast.NodeTransformer):
    def visit_Await(self, node):
        raise InputRejected("no cells today")
get_ipython().ast_transformers.append(Reject())
"""


def test_a_cell_that_ipython_then_refuses_is_taken_back_from_the_ranks(notebook: Kernel) -> None:
    assert notebook.run(REJECTING).status == "ok"
    refused = notebook.run("%%distributed\nimport time\ntime.sleep(600)", timeout_s=60)
    assert "no cells today" in refused.error
    assert notebook.run("get_ipython().ast_transformers.clear()").status == "ok"
    assert notebook.run("%distributed rank", timeout_s=60).stdout == "[0] 0\n[1] 1\n"
