"""What a front end shows of a cell is the same whether the cell runs in a plain kernel or on a rank.

Both run all cells of the list, once and in its order; a plain kernel says what is right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

import launching
import pytest
from kernel import Kernel, kernel

OUTSIDE_OF_PYTEST = {"PYTEST_CURRENT_TEST": None}
"""Where this variable is set, ipykernel leaves the descriptors of stdout and stderr alone."""

PATIENCE_S = 20
"""How long a cell and what comes behind it may take."""

CELLS = {
    "lines on both streams": "import os, sys, threading, time\nprint('a', 1)\nprint('aside', file=sys.stderr)",
    "a value": "print('before')\n{'a': [1, 2]}",
    "no newline": "print('a'); print('b', end='')",
    "a display among lines": (
        "from IPython.display import HTML, display\nprint('before'); display(HTML('<b>x</b>')); print('after')"
    ),
    "a thread in its cell": (
        "import threading\nt = threading.Thread(target=lambda: print('thread')); t.start(); t.join(); print('end')"
    ),
    "a thread after its cell": """
import threading, time
def say():
    for i in range(3): time.sleep(.3); print('late', i, flush=True)
threading.Thread(target=say).start()
print('started')  # until: late 2""",
    "a thread's stderr after its cell": (
        "import threading\nthreading.Timer(.3, lambda: print('aside', file=sys.stderr)).start()  # until: aside"
    ),
    "a thread's half line after its cell": (
        "import threading\nthreading.Timer(.3, lambda: print('half', end='')).start()  # until: half"
    ),
    "a thread's display after its cell": (
        "threading.Timer(.3, lambda: display(HTML('<b>late display</b>'))).start()  # until: late display"
    ),
    "a thread's error after its cell": """
def fail(): time.sleep(.3); {}['key of the thread']
threading.Thread(target=fail, name='failing').start()  # until: KeyError""",
    "a thread's error in its cell": "t = threading.Thread(target=fail, name='failing'); t.start(); t.join()",
    "an asyncio task after its cell": """
import asyncio
async def say():
    await asyncio.sleep(.3); print('task', flush=True)
task = asyncio.ensure_future(say())  # until: task""",
    "an asyncio task in its cell": "await say()",
    "a callback of the event loop": (
        "asyncio.get_event_loop().call_later(.2, print, 'called back')\nprint('planned')  # until: called back"
    ),
    "asyncio.run in a running loop": "coroutine = say()\ntry: asyncio.run(coroutine)\nfinally: coroutine.close()",
    "a thread that runs an event loop": (
        "t = threading.Thread(target=lambda: asyncio.run(say())); t.start(); t.join()"
    ),
    "threads of an executor": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool: print(list(pool.map(lambda i: print('pool', i), range(3))))"
    ),
    "a spawned interpreter": """
import subprocess
n = subprocess.run([sys.executable, '-c', 'print("spawned")'])  # until: spawned""",
    "a program by !": "!echo from a program",
    "a program by os.system": "n = os.system('echo from a program')  # until: from a program",
    "the descriptor": "n = os.write(1, b'by the descriptor\\n')  # until: descriptor",
    "sys.stdout is a Tee": """
class Tee:
    def __init__(self, *files): self.files = files
    def write(self, text): [f.write(text) for f in self.files]
    def flush(self): [f.flush() for f in self.files]
kept = sys.stdout
print('early'); sys.stdout = Tee(kept, open(os.devnull, 'w')); print('both')  # until: both""",
    "sys.stdout still is a Tee": "print('later')\n'value'",
    "sys.stdout is a Tee that cannot flush": """
class Writer:
    def write(self, text): kept.write(text)
    flush = None
sys.stdout = Tee(kept); print('back')""",
    "sys.stdout is a file": "print('early'); sys.stdout = open(os.devnull, 'w'); print('in the file')  # until: early",
    "sys.stdout is back": "sys.stdout = kept; print('back')",
    "redirect_stdout": (
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as text: print('caught')\ntext.getvalue()"
    ),
    "an error within an Output": (
        "import ipywidgets as widgets\nout = widgets.Output()\nwith out: raise ValueError('inside')\nprint('goes on')"
    ),
    "an error of a button": """
button = widgets.Button()
button.on_click(lambda _: 1 / 0)
button.click()
print('goes on')""",
    "an error of an observer": """
slider = widgets.IntSlider()
slider.observe(lambda change: {}[change['new']], names='value')
try: slider.value = 3
except KeyError as error: print('raised', error)""",
    "an error that is shown by the person": """
try: 1 / 0
except ZeroDivisionError: get_ipython().showtraceback()
print('goes on')""",
    "an error of a cell": "def f(): raise RuntimeError('of the cell')\nf()",
    "%tb": "%tb",
    "the last error": "print(repr(sys.last_value))\nimport traceback; print(traceback.extract_tb(sys.last_traceback)[-1].name)",
    "sys.exit": "sys.exit(3)",
    "%tb of sys.exit": "%tb",
    "an error with a note": "e = ValueError('noted'); e.add_note('a note'); raise e",
    "an error from another": "try: 1 / 0\nexcept ZeroDivisionError as error: raise ValueError('chained') from error",
    "an error in Python's syntax": "x = = 1",
    "a script that fails": """
from pathlib import Path; import tempfile
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / 'fails.py'; script.write_text("print('script'); raise OSError('of the script')")
    %run {script}""",
    "a warning": "import warnings\nwarnings.warn('careful')",
    "a warning in a function": "def g(): warnings.warn('in g', RuntimeWarning)\ng()",
    "logging": "import logging\nlogging.warning('logged')",
    "an error in __del__": """
class Failing:
    def __del__(self): raise ValueError('in __del__')
x = Failing(); del x""",
    "an error of a task that nobody awaits": """
async def fail_later(): raise ValueError('of the task')
task = asyncio.ensure_future(fail_later())
await asyncio.sleep(.1); del task
import gc; gc.collect()
None""",
    "print of a bar": "from tqdm import tqdm\nfor _ in tqdm(range(2), bar_format='{desc}|{n}', desc='bar'): pass",
}
"""The cells by what each is about. Output that comes after a cell ends with the text behind '# until:'."""


FORKS = {
    "a process": (
        """
import multiprocessing as mp
fork = mp.get_context('fork')
print('parent')
p = fork.Process(target=print, args=('child', 1)); p.start(); p.join()
print('end')""",
        ["parent", "child 1", "end"],
    ),
    "text that waits at a fork": (
        "print('once')\np = fork.Process(target=print, args=('child',)); p.start(); p.join()",
        ["once", "child"],
    ),
    "a process that fails": (
        """
def fail_in_child(): raise ValueError('in the child')
p = fork.Process(target=fail_in_child, name='failing'); p.start(); p.join(); print(p.exitcode)""",
        ["1"],
    ),
    "a process that outlives its cell": (
        """
def say_late(): time.sleep(.3); print('child is late')
p = fork.Process(target=say_late); p.start()
print('started')  # until: late""",
        ["started", "child is late"],
    ),
    "os.fork": (
        "if (pid := os.fork()) == 0: print('child', end=''); os._exit(0)\nprint(os.waitpid(pid, 0)[1])",
        ["child0"],
    ),
    "a child's child": (
        """
def fork_again():
    q = fork.Process(target=print, args=('grandchild',)); q.start(); q.join(); print('child')
p = fork.Process(target=fork_again); p.start(); p.join()""",
        ["grandchild", "child"],
    ),
    "a pool": (
        "with fork.Pool(1) as pool: print(pool.map(print, ['a', 'b', 'c']))",
        ["a", "b", "c", "[None, None, None]"],
    ),
    "workers of a DataLoader": (
        """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): print('item', i); return i
print(sum(int(x) for x in torch.utils.data.DataLoader(Data(), num_workers=1)))""",
        ["item 0", "item 1", "item 2", "item 3", "6"],
    ),
    "workers that live on": (
        """
loader = torch.utils.data.DataLoader(Data(), num_workers=1, persistent_workers=True)
print(sum(int(x) for x in loader))""",
        ["item 0", "item 1", "item 2", "item 3", "6"],
    ),
    "workers that live on, in a later cell": (
        "print(sum(int(x) for x in loader)); del loader",
        ["item 0", "item 1", "item 2", "item 3", "6"],
    ),
}
"""Cells whose forked children print, and the lines that belong on the screen: a plain kernel shows the same
letters, but mixes the children's with its own."""


@dataclass
class Shown:
    """What a front end shows of a cell."""

    blocks: list[Any] = field(default_factory=list)
    """Text, displays and values in order, as text and MIME bundles."""
    stderr: str = ""
    errors: list[str] = field(default_factory=list)

    @classmethod
    def from_messages(cls, messages: Iterable[Mapping[str, Any]]) -> Shown:
        shown, text = cls(), ""
        for message in messages:
            content = message["content"]
            match message["msg_type"]:
                case "stream" if content["name"] == "stdout":
                    text += content["text"]
                case "stream":
                    shown.stderr += content["text"]
                case "execute_result":
                    text += content["data"]["text/plain"] + "\n"
                case "display_data":
                    shown.blocks += [_normal(text), content["data"]]
                    text = ""
                case "error":
                    shown.errors.append(_normal(f"{content['ename']}: {content['evalue']}"))
        shown.blocks.append(_normal(text))
        shown.blocks = [block for block in shown.blocks if block]
        stderr = _normal(shown.stderr)
        # A rank shows an error that ends no cell as text.
        shown.errors = _TRACEBACK.findall(stderr) + shown.errors
        shown.stderr = _TRACEBACK.sub("", stderr)
        return shown


_TRACEBACK = re.compile(r"^-{70,}\n.*?^(\w+: [^\n]*)$\n?", re.MULTILINE | re.DOTALL)
_SAME = {
    r"\x1b\[[0-9;]*m": "",
    r"^\[0\]( |\n|$)": "",  # the label of rank 0
    r"^RankError: rank 0: ": "",
    r"\r\n": "\n",
    r"^.*\r": "",  # rows that a bar has redrawn
    r"[^\s\"]*/ipykernel_\d+/\d+\.py|<ipython-input-[^>]*>|\b\d+\.py\b": "CELL",
    r"0x[0-9a-f]+": "0x0",
    r"\bTask-\d+": "Task",
}
"""What may differ, and what stands in its place."""


def _normal(text: str) -> str:
    """Return a text without what may differ between the two."""
    for pattern, same in _SAME.items():
        text = re.sub(pattern, same, text, flags=re.MULTILINE)
    return text.rstrip("\n")


class Running:
    """A cell that runs, with the messages that it leads to, also behind it up to the text of '# until:'."""

    def __init__(self, notebook: Kernel, code: str) -> None:
        self._client = notebook.client
        awaited = re.search(r"# until: (.*)", code)
        self._awaited = awaited[1] if awaited else ""
        self._id = self._client.execute(code, store_history=True, allow_stdin=False)
        self._messages: list[Mapping[str, Any]] = []
        self._is_over = False

    def shown(self) -> Shown:
        """Wait for the end, and return what is shown."""
        give_up_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_s and not (self._is_over and self._awaited in self._text()):
            with suppress(Empty):
                self._take(self._client.get_iopub_msg(timeout=0.1))
        while self._client.get_shell_msg(timeout=10)["parent_header"].get("msg_id") != self._id:
            pass
        return Shown.from_messages(self._messages)

    def _text(self) -> str:
        return str([message["content"] for message in self._messages])

    def _take(self, message: Mapping[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind in ("stream", "display_data", "execute_result", "error"):
            self._messages.append(message)
        elif message["parent_header"].get("msg_id") == self._id:
            self._is_over = self._is_over or content.get("execution_state") == "idle"


@pytest.fixture(scope="module")
def rank() -> Iterator[Kernel]:
    with kernel(environment=OUTSIDE_OF_PYTEST) as notebook:
        assert notebook.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags(1)}").status == "ok"
        yield notebook
        notebook.run("%nbgpu stop")


@pytest.fixture(scope="module")
def shown(rank: Kernel) -> dict[str, tuple[Shown, Shown]]:
    """For each cell what a plain kernel and what a rank shows."""
    shown = {}
    with kernel(environment=OUTSIDE_OF_PYTEST) as plain:
        for name, code in (CELLS | {name: code for name, (code, _) in FORKS.items()}).items():
            by_plain, by_rank = Running(plain, code), Running(rank, f"%%distributed\n{code.lstrip()}")
            shown[name] = by_plain.shown(), by_rank.shown()
    return shown


@pytest.mark.parametrize("cell", CELLS)
def test_a_rank_shows_what_a_plain_kernel_shows(shown: dict[str, tuple[Shown, Shown]], cell: str) -> None:
    by_plain, by_rank = shown[cell]
    assert by_rank == by_plain
    assert "NameError" not in str(by_plain)


@pytest.mark.parametrize("cell", FORKS)
def test_text_of_forked_children_comes_whole_and_in_order(
    shown: dict[str, tuple[Shown, Shown]], cell: str
) -> None:
    by_plain, by_rank = shown[cell]
    assert "\n".join(by_rank.blocks).splitlines() == FORKS[cell][1]
    by_letter = [sorted("".join("".join(shown.blocks).split())) for shown in (by_rank, by_plain)]
    assert by_letter[0] == by_letter[1]
    assert (by_rank.stderr, by_rank.errors) == (by_plain.stderr, [])


def test_an_error_in_a_running_loop_names_no_file_of_nbgpu(rank: Kernel) -> None:
    done = rank.run("%%distributed\nimport asyncio\nasync def say(): pass\nasyncio.run(say())")
    assert "RuntimeError: asyncio.run() cannot be called from a running event loop" in done.error
    assert done.stderr == ""


def test_the_errors_of_a_group_are_shown(rank: Kernel) -> None:
    code = "raise ExceptionGroup('several', [ValueError('one'), ExceptionGroup('more', [KeyError('two')])])"
    done = rank.run(f"%%distributed\n{code}")
    assert code in done.error
    assert "| ValueError: one\n" in done.error
    assert "| KeyError: 'two'\n" in done.error
    assert "interactiveshell.py" not in done.error


def test_a_handler_of_errors_takes_those_that_it_is_for(rank: Kernel) -> None:
    handler = "def handle(shell, kind, error, tb, tb_offset=None): print('handled', kind.__name__)"
    set_it = "get_ipython().set_custom_exc((LookupError,), handle)"
    handled = rank.run(f"%%distributed\n{handler}\n{set_it}\n{{}}['key']")
    assert (handled.stdout, handled.error) == ("[0] handled KeyError\n", "on rank 0:\nKeyError: 'key'")
    for code in ("torch.ones(2) @ torch.ones(3)", "get_ipython().set_custom_exc((), None)\n{}.pop('key')"):
        other = rank.run(f"%%distributed\n{code}")
        assert "handled" not in other.stdout
        assert f"----> {code.count(chr(10)) + 1} {code.splitlines()[-1]}" in other.error


def test_no_arguments_are_left_of_the_process_that_forked_the_rank(rank: Kernel) -> None:
    parse = "from argparse import ArgumentParser\nimport sys\nprint(sys.argv, ArgumentParser().parse_args())"
    assert rank.run(f"%%distributed\n{parse}").stdout == "[0] [''] Namespace()\n"
    spawned = "import subprocess\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv)']).returncode)"
    assert "['-c']" in rank.run(f"%%distributed\n{spawned}").stdout


def test_a_childs_display_is_shown_as_text_and_a_long_line_whole(rank: Kernel) -> None:
    code = """%%distributed
import multiprocessing as mp
from IPython.display import HTML, display
def show(): display(HTML('<b>x</b>')); print('\u00b5' * 300_000)
p = mp.get_context('fork').Process(target=show); p.start(); p.join(); print('end')"""
    assert rank.run(code).stdout.splitlines() == [
        "[0] <IPython.core.display.HTML object>",
        "[0] " + "\u00b5" * 300_000,
        "[0] end",
    ]
