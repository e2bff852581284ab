"""Tab and Shift-Tab in distributed cells, asked of a real kernel as a page asks it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import launching
import pytest
from kernel import Kernel, kernel

BOUND_S = 20
"""A kernel that waits for a rank in a cell of a minute is found out; a busy host is not."""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        started.run(
            "%%distributed\nimport fractions as fr\nx = torch.zeros(2, 3)\nsettings = {'alpha': 1, 'beta': 2}\n"
            "def blend(first, second=0.5):\n    'Mixes two.'\nonly_here = rank\n"
            "if rank == 1: second_rank_has_it = 1"
        )
        yield started
        started.run("%nbgpu stop")


def complete(notebook: Kernel, code: str, cursor: int | None = None) -> dict[str, Any]:
    return _reply(notebook, notebook.client.complete(code, len(code) if cursor is None else cursor))


def inspect(notebook: Kernel, code: str, cursor: int | None = None, detail: int = 0) -> dict[str, Any]:
    """The first answer that finds something: on a busy host a rank may take a moment longer than is waited
    for."""
    cursor = len(code) if cursor is None else cursor
    give_up_s = time.monotonic() + BOUND_S
    while not (reply := _reply(notebook, notebook.client.inspect(code, cursor, detail)))["found"]:
        if time.monotonic() > give_up_s:
            raise AssertionError(f"nothing was found within {BOUND_S} s")
    return reply


def offer(notebook: Kernel, code: str, cursor: int | None = None) -> dict[str, Any]:
    """The first answer that offers something."""
    give_up_s = time.monotonic() + BOUND_S
    while not (reply := complete(notebook, code, cursor))["matches"]:
        if time.monotonic() > give_up_s:
            raise AssertionError(f"nothing was offered within {BOUND_S} s")
    return reply


def matches(notebook: Kernel, code: str) -> list[str]:
    return list(offer(notebook, code)["matches"])


def finds(notebook: Kernel, code: str) -> bool:
    """Whether one question finds something."""
    return bool(_reply(notebook, notebook.client.inspect(code, len(code)))["found"])


def _reply(notebook: Kernel, message_id: str) -> dict[str, Any]:
    give_up_s = time.monotonic() + BOUND_S
    while time.monotonic() < give_up_s:
        reply = notebook.client.get_shell_msg(timeout=BOUND_S)
        if reply["parent_header"].get("msg_id") == message_id:
            content: dict[str, Any] = reply["content"]
            assert content["status"] == "ok"
            return content
    raise AssertionError(f"no reply within {BOUND_S} s")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x.sh", {"shape", "share_memory_"}),
        ("settings['", {"alpha", "beta"}),
        ("fr.Fra", {"Fraction"}),
        ("dist.all_re", {"all_reduce"}),
        ("torch.nn.functional.gel", {"gelu"}),
        ("worl", {"world_size"}),
        ("blend(sec", {"second="}),
        ("y = 1\nonly_h", {"only_here"}),
    ],
)
def test_tab_offers_what_the_ranks_have(notebook: Kernel, body: str, expected: set[str]) -> None:
    assert expected <= set(matches(notebook, f"%%distributed\n{body}"))
    last_line = body.splitlines()[-1]
    assert expected <= set(matches(notebook, f"before = 1\n%distributed {last_line}"))


def test_an_answer_is_that_of_a_plain_cell_further_down(notebook: Kernel) -> None:
    """Its places are those of the whole cell; the rank's own kernel says what it would reply to the body
    alone."""
    body = "café = 1\nx.sh\nlater = 2"
    cursor = body.index("x.sh") + 4
    plain = notebook.run(
        "import nbgpu\n"
        "nbgpu.current().apply(__import__('ipyparallel').Reference('get_ipython().kernel.do_complete'), "
        f"{body!r}, {cursor}, ranks=[0])[0]"
    )
    expected = eval(plain.value)
    magic = "\n%%distributed --timeout 5\n"
    given = offer(notebook, magic + body, len(magic) + cursor)
    begin = len(magic)
    assert given["matches"] == expected["matches"]
    assert given["matches"][0] == "shape"
    assert given["cursor_start"] == expected["cursor_start"] + begin
    assert given["cursor_end"] == expected["cursor_end"] + begin == begin + cursor
    kind = "_jupyter_types_experimental"
    # Of types IPython works out as many as it can within a time of its own.
    assert [(match["text"], match["start"], match["end"]) for match in given["metadata"][kind]] == [
        (match["text"], match["start"] + begin, match["end"] + begin) for match in expected["metadata"][kind]
    ]


def test_the_first_of_the_named_ranks_answers(notebook: Kernel) -> None:
    assert complete(notebook, "%%distributed\nsecond_ra")["matches"] == []
    assert matches(notebook, "%%distributed --ranks 1\nsecond_ra") == ["second_rank_has_it"]
    assert matches(notebook, "%%distributed --ranks 7\nonly_h") == ["only_here"]


def test_shift_tab_shows_what_a_rank_knows(notebook: Kernel) -> None:
    for code in ("%%distributed\nblend(", "%distributed blend(", "%%distributed --ranks 1\nblend"):
        reply = inspect(notebook, code)
        assert reply["found"]
        assert "second" in reply["data"]["text/plain"]
        assert "Mixes two." in reply["data"]["text/plain"]
    assert "all_reduce" in inspect(notebook, "%%distributed\ndist.all_reduce(x)", 29)["data"]["text/plain"]
    assert not finds(notebook, "%%distributed\nnever_made")
    source = inspect(notebook, "%%distributed\nblend", detail=1)
    plain = re.sub(r"\x1b\[[\d;]*m", "", source["data"]["text/plain"])
    assert "def blend(first, second=0.5)" in plain


def test_plain_cells_are_answered_by_the_notebook(notebook: Kernel) -> None:
    notebook.run("only_in_notebook = {'gamma': 3}\ndef here(a): 'In the notebook.'")
    assert complete(notebook, "only_in_no")["matches"] == ["only_in_notebook"]
    assert "gamma" in complete(notebook, "only_in_notebook['")["matches"]
    assert complete(notebook, "only_h")["matches"] == []
    assert "only_in_notebook" not in complete(notebook, "%%distributed\nonly_in_no")["matches"]
    assert "In the notebook." in inspect(notebook, "here(")["data"]["text/plain"]
    assert not finds(notebook, "blend(")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%distr", {"%%distributed"}),
        ("%%distributed --", {"--help", "--ranks", "--into", "--timeout", "--full", "--timeline"}),
        ("%%distributed --ranks 0 --ti", {"--timeout", "--timeline"}),
        ("%nbgpu sta", {"start", "status"}),
        ("x = 1\n%nbgpu start --ra", {"--ranks"}),
        ("%pull only_here --", {"--as", "--into", "--rank", "--ranks"}),
        ("%pull onl", {"only_here"}),
        ("%pull x onl", {"only_here"}),
        ("%nbgpu vars onl", {"only_here"}),
    ],
)
def test_the_magics_own_lines(notebook: Kernel, line: str, expected: set[str]) -> None:
    reply = offer(notebook, line)
    assert set(reply["matches"]) == expected
    assert line[reply["cursor_start"] : reply["cursor_end"]] == line.split()[-1]


def test_calls_that_take_settings(notebook: Kernel) -> None:
    notebook.run("import nbgpu\ncluster = nbgpu.current()")
    reply = complete(notebook, 'cluster.train("autoencoder", ba')
    assert reply["matches"] == ["batch_size="]
    assert (reply["cursor_start"], reply["cursor_end"]) == (29, 31)
    assert complete(notebook, 'cluster.train(\n  "autoenc')["matches"] == ["autoencoder"]
    assert complete(notebook, "nbgpu.current().plan('survival', amp='b")["matches"] == ["bf16"]
    code = 'cluster.train("autoencoder", batch_size=4)'
    assert "1 to 4096" in inspect(notebook, code, code.index("size"))["data"]["text/plain"]
    asked = inspect(notebook, "cluster.train", detail=0)["data"]["text/plain"]
    assert "batch_size: int = 2" in asked
    assert "Start a training run" in asked


def test_the_magics_explain_themselves(notebook: Kernel) -> None:
    said = notebook.run("%nbgpu help").stdout
    assert all(f"%nbgpu {command} " in said for command in ("start", "resize", "vars", "help"))
    assert "%push lr" in said
    assert inspect(notebook, "%nbgpu", 6)["found"]
    notebook.run("%%distributed\nbefore = 1")
    for line in ("%%distributed --help", "%%distributed --help --nothing", "%%time\n%%distributed --help"):
        done = notebook.run(f"{line}\nbefore = 2")
        assert done.status == "ok"
        assert "seconds after which the ranks are interrupted" in done.stdout
    assert notebook.run("%%distributed\nbefore").said(0, 1) == [["1"], ["1"]]
    wrong = notebook.run("%nbgpu strat")
    assert "there is no such command. Did you mean start? Commands: start, status" in wrong.stderr


LOOK = """%%distributed --ranks 0
import json
c10d = dist.distributed_c10d
print(json.dumps([sorted(n for n in globals() if not n.startswith("_i")), _, len(Out), len(In), c10d._get_default_group()._get_sequence_number_for_group()]))
"""


def test_nothing_that_a_person_sees_changes(notebook: Kernel) -> None:
    def look() -> list[Any]:
        seen: list[Any] = json.loads(notebook.run(LOOK).stdout.removeprefix("[0] "))
        return seen

    notebook.run("%%distributed\n'the last value'")
    notebook.run("names_before = set(globals())")
    look()
    before = look()
    complete(notebook, "%%distributed\nx.sh")
    inspect(notebook, "%%distributed\nblend(")
    of_the_call = ("_f", "_args", "_kwargs", "_result")
    offered = matches(notebook, "%%distributed\n_")
    assert "_dh" in offered
    assert not [name for name in offered if name.endswith(of_the_call)]
    after = look()
    before[3] += 1  # the look itself is a cell
    assert after == before
    assert after[1] == "the last value"
    new = notebook.run("sorted(n for n in set(globals()) - names_before if not n.startswith('_i'))")
    assert new.value == "['names_before']"


def test_ranks_that_are_busy_are_not_waited_for(notebook: Kernel) -> None:
    notebook.run(
        "import nbgpu\nbusy = nbgpu.current().submit('import time; until = time.time() + 4\\n"
        "while time.time() < until: time.sleep(0.01)')"
    )
    for _ in range(3):
        assert complete(notebook, "%%distributed\nx.sh")["matches"] == []
        assert not finds(notebook, "%%distributed\nblend(")
    assert notebook.run("all(r.ready() for r in busy.values())").value == "False"
    assert notebook.run("[r.get(timeout=180) for r in busy.values()] and 'back'").value == "'back'"
    assert "shape" in matches(notebook, "%%distributed\nx.sh")


@pytest.mark.long
def test_where_no_rank_can_answer() -> None:
    with kernel() as notebook:
        notebook.run("%load_ext nbgpu\nimport nbgpu\nhere = 1")
        assert "here" in complete(notebook, "%%distributed\nhe")["matches"]  # there is no cluster
        assert notebook.run(f"%nbgpu start {launching.flags(1)}").status == "ok"
        notebook.run("busy = nbgpu.current().submit('import time; time.sleep(60)')")
        assert complete(notebook, "%%distributed\nworl")["matches"] == []
        # What the old rank owes is not waited for.
        assert notebook.run("%nbgpu restart").status == "ok"
        assert matches(notebook, "%%distributed\nworl") == ["world_size"]
        assert notebook.run("%nbgpu stop").status == "ok"
        notebook.run("%unload_ext nbgpu")
        assert notebook.run("'do_complete' in vars(get_ipython().kernel)").value == "False"
