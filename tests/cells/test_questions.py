"""`input()` on ranks, asked for in the notebook."""

from __future__ import annotations

import queue
from contextlib import suppress
from pathlib import Path

from kernel import Kernel

BOUND_S = 30
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"


def test_every_rank_gets_its_own_answer_one_after_the_other(notebook: Kernel) -> None:
    code = (
        "%%distributed\nprint('before')\nname = input('name? ')\nprint(rank, 'is', name)\n"
        "total = torch.tensor(len(name))\ndist.all_reduce(total)\nint(total)"
    )
    done = notebook.run(code, answers=["Ada", "Grace"], timeout_s=BOUND_S)
    assert done.status == "ok", done.error
    assert sorted(done.prompts) == ["rank 0: name? ", "rank 1: name? "]
    names = dict(zip([int(prompt[5]) for prompt in done.prompts], ["Ada", "Grace"], strict=True))
    assert done.said(0, 1) == [["before", f"{rank} is {names[rank]}", "8"] for rank in (0, 1)]


def test_what_was_printed_before_is_shown_before_the_question(notebook: Kernel) -> None:
    seen: list[str] = []

    def look() -> None:
        with suppress(queue.Empty):
            while True:
                message = notebook.client.get_iopub_msg(timeout=0.1)
                seen.append(message["content"].get("text", ""))
        notebook.client.input("")

    code = "%%distributed --ranks 1\nfor n in range(1000): print('line', n)\ninput()"
    done = notebook.run(code, answers=[look], timeout_s=BOUND_S)
    assert "line 999" in done.stdout + "".join(seen)


def test_passwords_and_the_end_of_input(notebook: Kernel) -> None:
    code = "%%distributed --ranks 0\nimport getpass\ngetpass.getpass('key: ')"
    done = notebook.run(code, answers=["secret"], timeout_s=BOUND_S)
    assert (done.prompts, done.stdout) == (["rank 0: key: "], "[0] 'secret'\n")
    assert "EOFError" in notebook.run("%distributed input()", answers=["\x04"], timeout_s=BOUND_S).error


def test_a_line_magic_and_an_awaited_cell_ask_too(notebook: Kernel) -> None:
    done = notebook.run("%distributed input('a? ') if rank else 0", answers=["1"], timeout_s=BOUND_S)
    assert done.stdout == "[0] 0\n[1] '1'\n"
    code = "%%distributed --ranks 1\nimport asyncio\nawait asyncio.to_thread(input, 'b? ')"
    assert notebook.run(code, answers=["2"], timeout_s=BOUND_S).stdout == "[1] '2'\n"


def test_stop_works_while_a_rank_asks(notebook: Kernel) -> None:
    code = "%%distributed\nkept = rank\nif rank: input('never answered')\ndist.barrier()"
    done = notebook.run(code, answers=[notebook.manager.interrupt_kernel], timeout_s=BOUND_S)
    assert "the cell was stopped" in done.error
    assert notebook.run(f"{SUM}, kept").stdout == "[0] (2, 0)\n[1] (2, 1)\n"
    # An answer to a question that is over goes to nobody.
    notebook.client.input("late")
    done = notebook.run("%%distributed --ranks 0\ninput('next? ')", answers=["right"], timeout_s=BOUND_S)
    assert done.stdout == "[0] 'right'\n"


def test_a_failure_elsewhere_ends_the_question(notebook: Kernel) -> None:
    """The notebook goes on watching the ranks while nobody types."""
    code = "%%distributed\nimport time\nif rank: time.sleep(1); 1/0\ninput('never answered')"
    done = notebook.run(code, timeout_s=BOUND_S, allow_stdin=True)
    assert "ZeroDivisionError" in done.error
    assert "freed from waiting for the others: rank 0" in done.stderr
    assert notebook.run(SUM).stdout == "[0-1] 2\n"


def test_with_nobody_to_answer_it_is_an_error(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\ninput('who? ')", allow_stdin=False, timeout_s=BOUND_S)
    assert "StdinNotImplementedError" in done.error
    assert "there is nobody to answer" in done.error
    notebook.run("import nbgpu")
    done = notebook.run("nbgpu.current().execute('input()')", timeout_s=BOUND_S)
    assert "there is nobody to answer" in done.error


def test_between_cells_nobody_answers(notebook: Kernel, tmp_path: Path) -> None:
    may_ask = tmp_path / "may_ask"
    code = f"""%%distributed --ranks 0
import os, threading, time
def ask():
    global told
    while not os.path.exists({str(may_ask)!r}):
        time.sleep(0.01)
    try:
        told = input('late? ')
    except Exception as error:
        told = type(error).__name__
asking = threading.Thread(target=ask)
asking.start()
"""
    assert notebook.run(code, allow_stdin=True, timeout_s=BOUND_S).status == "ok"
    may_ask.touch()
    done = notebook.run("%%distributed --ranks 0\nasking.join(20)\ntold", timeout_s=BOUND_S)
    assert done.stdout == "[0] 'StdinNotImplementedError'\n"
