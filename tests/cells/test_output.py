"""What reaches the notebook of all that the ranks print: everything, once, in order, and in few messages."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import zip_longest

import launching
import pytest
from kernel import Kernel, kernel

START = f"%load_ext nbgpu\n%nbgpu start {launching.flags()} --max-output-lines 25000"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel() as started:
        folder = tmp_path_factory.mktemp("notebook")
        assert started.run(f"%cd -q {folder}\n{START}").status == "ok"
        started.run("from pathlib import Path")
        yield started
        started.run("%nbgpu stop")


def test_what_ranks_say_alike_is_said_once(notebook: Kernel) -> None:
    code = "print('begin')\nprint('rank', rank)\nprint('on', rank, 'too')\nprint('end')\n[1, 2]"
    done = notebook.run(f"%%distributed\n{code}")
    assert done.stdout.splitlines() == [
        "[0-1] begin",
        "[0] rank 0",
        "[0] on 0 too",
        "[1] rank 1",
        "[1] on 1 too",
        "[0-1] end",
        "[0-1] [1, 2]",
    ]


def test_every_line_of_ten_thousand_from_each_rank(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\nfor i in range(10_000): print(rank, 'line', i)")
    for rank, lines in enumerate(done.said(0, 1)):
        assert first_difference(lines, [f"{rank} line {i}" for i in range(10_000)]) is None
    # What ranks say at nearly the same time stands there once. On a busy machine one may be too far behind
    # for that.
    same = notebook.run("%%distributed\nfor i in range(10_000): print('line', i)")
    for lines in same.said(0, 1):
        assert first_difference(lines, [f"line {i}" for i in range(10_000)]) is None


def first_difference(lines: list[str], expected: list[str]) -> tuple[int, str | None, str | None] | None:
    """Where two texts part; pytest would take minutes for what it says of long ones that differ in many
    lines."""
    pairs = enumerate(zip_longest(lines, expected))
    return next(((number, a, b) for number, (a, b) in pairs if a != b), None)


def test_what_was_printed_before_an_error_is_there(notebook: Kernel) -> None:
    for _ in range(5):
        done = notebook.run("%%distributed\nfor i in range(2000): print(rank, i)\nraise ValueError('late')")
        assert done.status == "error"
        assert [lines[-1:] for lines in done.said(0, 1)] == [["0 1999"], ["1 1999"]]


def test_output_with_no_newline_of_threads_of_processes_and_of_great_size(notebook: Kernel) -> None:
    code = """
import subprocess, sys, threading
threading.Thread(target=lambda: print('from a thread')).start()
print(subprocess.run(['echo', 'from a process'], capture_output=True, text=True).stdout, end='')
!echo from a shell
print('x' * 1_500_000)
print('aside', file=sys.stderr)
print('no newline', end='')
"""
    done = notebook.run(f"%%distributed --ranks 1{code}")
    (lines,) = done.said(1)
    assert {"from a thread", "from a process", "from a shell", "x" * 1_500_000} < set(lines)
    assert lines[-1] == "no newline"
    assert done.stderr == "[1] aside\n"


def test_a_forked_child_ends_with_its_cell_as_with_a_script(notebook: Kernel) -> None:
    forks = "import os, sys\nif (pid := os.fork()) == 0:\n    print('child')\n    {ends}\nos.waitpid(pid, 0)[1] >> 8"
    for ends, code in (("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no')", 1), ("1 / 0", 1)):
        done = notebook.run(f"%%distributed --ranks 1\n{forks.format(ends=ends)}", timeout_s=30)
        assert done.status == "ok", done.error
        assert done.said(1) == [["child", str(code)]], ends
        if code == 1:
            assert ("ZeroDivisionError" if "/" in ends else "no") in done.stderr
    done = notebook.run(
        "%%distributed\nif rank == 1 and os.fork() == 0: rank = 7\ndist.barrier() if rank < 7 else rank"
    )
    assert done.status == "ok", done.error


def test_halves_of_lines_never_mix_and_a_bar_is_one_line(notebook: Kernel) -> None:
    code = """
import sys, time
for i in range(4):
    print(f'first half {rank} {i},', end='', flush=True); time.sleep(0.15)
    print(f' second half {rank} {i}')
from tqdm.auto import tqdm
for i in tqdm(range(20), desc=f'bar {rank}', file=sys.stdout, mininterval=0): time.sleep(0.02)
"""
    done = notebook.run(f"%%distributed{code}")
    for rank, (*lines, bar) in enumerate(done.said(0, 1)):
        assert lines == [f"first half {rank} {i}, second half {rank} {i}" for i in range(4)]
        assert re.fullmatch(rf"bar {rank}: 100%.*20/20 .*", bar)


def test_a_display_stands_where_it_was_shown_and_once_where_it_is_the_same(notebook: Kernel) -> None:
    code = """
from IPython.display import HTML, display
print('before')
display(HTML('<b>same</b>'))
print('after', rank)
HTML(f'<i>{rank}</i>')
"""
    done = notebook.run(f"%%distributed{code}")
    assert [d["text/html"] for d in done.displays] == ["<b>same</b>", "<i>0</i>", "<i>1</i>"]
    assert done.stdout.splitlines() == [
        *("[0-1] before", "[0-1]", "[0] after 0", "[1] after 1", "[0]", "[1]"),
    ]


def slow_lines(notebook: Kernel, num_lines: int) -> tuple[int, int, float]:
    """(bytes, messages, seconds) of a cell whose ranks print so many lines, 4 ms apart."""
    sizes: list[int] = []
    client = notebook.client
    code = f"%%distributed\nimport time\nfor i in range({num_lines}): print('line', i, rank, flush=True); time.sleep(0.004)"
    started_s = time.monotonic()
    message_id = client.execute(code, allow_stdin=False)
    while True:
        message = client.get_iopub_msg(timeout=180)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        if message["msg_type"] == "stream":
            sizes.append(
                len(client.session.json_packer(message))
                if hasattr(client.session, "json_packer")
                else len(str(message))
            )
        elif message["content"].get("execution_state") == "idle":
            break
    client.get_shell_msg(timeout=10)
    return sum(sizes), len(sizes), time.monotonic() - started_s


@pytest.mark.long
def test_bytes_grow_with_what_is_printed_and_updates_with_time(notebook: Kernel) -> None:
    measured = [slow_lines(notebook, num_lines) for num_lines in (250, 500, 1000)]
    num_bytes = [m[0] for m in measured]
    assert num_bytes[2] / num_bytes[0] < 6, num_bytes
    for _, num_messages, took_s in measured:
        assert num_messages <= 10 * took_s + 2


def test_a_cell_that_says_too_much_goes_on_in_files(notebook: Kernel) -> None:
    code = "for i in range(30_000): print('line', i, rank)\nprint('end')"
    done = notebook.run(f"%%distributed\n{code}")
    lines = done.stdout.splitlines()
    assert 25_000 <= len(lines) < 25_100
    assert "[0-1] end" in lines
    assert "more than the 25,000 lines" in done.stderr
    for rank in (0, 1):
        (path,) = re.findall(rf"\S+-output-\w+/rank{rank}\.txt", done.stderr)
        assert not path.startswith("/")
        text = notebook.run(
            f"print(oct(Path({path!r}).parent.stat().st_mode)[-3:], Path({path!r}).read_text())"
        ).stdout
        assert text.splitlines() == [
            "700 line 0 " + str(rank),
            *(f"line {i} {rank}" for i in range(1, 30_000)),
            "end",
            "",
        ]


def test_the_end_of_a_cell_is_known_whatever_it_publishes(notebook: Kernel) -> None:
    code = """
import sys, threading
from IPython.display import display, update_display
thread = threading.Thread(target=print, args=['from a thread'])
thread.start(); thread.join()
print('out'); print('err', file=sys.stderr)
display(1, display_id='one'); update_display(2, display_id='one')
if rank: 1 / 0
'last'
"""
    done = notebook.run(
        f"""
import nbgpu
from nbgpu.client.engines.connection import Arrivals
from nbgpu.protocol.records import CellOptions
def kinds(code):
    came = Arrivals()
    nbgpu.current().parts.cells.send_cell(code, None, CellOptions(), came)
    came.wait_for_ends([0, 1], 30)
    messages = came.take()
    of_ranks = [sorted({{m["header"]["msg_type"] for r, m in messages if r == rank}}) for rank in (0, 1)]
    return [came.has_ended(rank) for rank in (0, 1)], of_ranks
kinds({code!r}), kinds('pass'), kinds('await __import__("asyncio").sleep(0.1, 5)'), kinds('syntax error')
"""
    )
    assert done.status == "ok", done.error
    raised, last = ["display_data", "stream", "update_display_data"], ["execute_result"]
    ended = [True, True]
    assert eval(done.value) == (
        (ended, [sorted(raised + last), raised]),
        (ended, [[], []]),
        (ended, [last, last]),
        (ended, [[], []]),
    )


def test_what_was_shown_is_not_kept(notebook: Kernel) -> None:
    code = """
import nbgpu
from nbgpu.client.engines.connection import Arrivals
from nbgpu.protocol.records import CellOptions
came = Arrivals()
(result,) = nbgpu.current().parts.cells.send_cell("print('y' * 1_000_000)", [0], CellOptions(), came).values()
came.wait_for_ends([0], 20)
sum(len(m['content']['text']) for _, m in came.take()), result.metadata['stdout'], len(came.take())
"""
    assert notebook.run(code).value == "(1000001, '', 0)"


def test_nothing_of_a_cell_is_kept_when_it_is_over(notebook: Kernel) -> None:
    notebook.run(
        """
import nbgpu
def kept():
    client = nbgpu.current().ranks._client
    records = client._futures, client._output_futures, client.metadata, client.results, client.outstanding
    return [len(each) for each in records] + [sum(map(len, client._outstanding_dict.values()))]
before = kept()
"""
    )
    for cell in (
        "pass",
        "print(rank)\n1 / 0",
        "syntax error",
        "await __import__('asyncio').sleep(0.1, rank)",
    ):
        notebook.run(f"%%distributed\n{cell}")
    assert notebook.run("kept() == before, before, kept()").value.startswith("(True,")


def test_a_folder_is_made_only_for_what_needs_it(notebook: Kernel) -> None:
    before = notebook.run("len(list(Path('.').rglob('rank0.txt')))").value
    notebook.run("%%distributed\nprint('little')")
    assert notebook.run("len(list(Path('.').rglob('rank0.txt')))").value == before


def test_a_line_printed_after_a_bar_stands_after_it(notebook: Kernel) -> None:
    bar = "for _ in tqdm(range(3), desc='bar', bar_format='{desc} {n}'): pass\n"
    code = f"from tqdm import tqdm\nprint('before')\n{bar}print('between')\n{bar}print('after')"
    for pause in ("", "\nimport time; time.sleep(1)"):
        done = notebook.run(f"%%distributed\n{code}{pause}")
        lines = [line.removeprefix("[0-1] ") for line in done.written.splitlines() if line]
        assert lines == ["before", "bar 3", "between", "bar 3", "after"]
