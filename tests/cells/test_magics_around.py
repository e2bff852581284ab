"""What may stand above `%%distributed`: comments, and magics that run what stands below them."""

from __future__ import annotations

import re

import pytest
from kernel import Kernel

SLOW = "import time; time.sleep(0.6); print('on', rank)\nrank * 2"
SAID = ["[0] on 0", "[1] on 1", "[0] 0", "[1] 2"]


@pytest.mark.parametrize("above", ["# a comment\n", "\n  # one\n\n# two\n"])
def test_comments_above_the_magic(notebook: Kernel, above: str) -> None:
    done = notebook.run(f"{above}%%distributed --ranks 1\nprint(rank)\n1 / 0")
    assert done.stdout == "[1] 1\n"
    assert re.search(r"Cell In\[\d+\], line 2\n", done.error)


def test_below_time_its_output_comes_with_the_wall_time(notebook: Kernel) -> None:
    # As in a page, where slow cells get widgets.
    done = notebook.run(f"%%time\n# slow\n%%distributed\n{SLOW}", allow_stdin=True)
    assert done.error == ""
    *said, cpu, wall = [line for line in done.stdout.splitlines() if line]
    assert (cpu[:4], wall[:4]) == ("CPU ", "Wall")
    if said:  # where no widget has it
        assert sorted(said) == sorted(SAID)
    failed = notebook.run("%%time\n%%distributed\nif rank: raise ValueError('no')\ndist.barrier()")
    assert "on rank 1:" in failed.error + failed.stderr
    assert "ValueError: no" in failed.error + failed.stderr
    assert notebook.run(
        "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"
    ).stdout == ("[0-1] 2\n")


def test_capture_keeps_what_the_ranks_say(notebook: Kernel) -> None:
    done = notebook.run(f"%%capture kept\n%%distributed\n{SLOW}", allow_stdin=True)
    assert (done.stdout, done.stderr, done.error, done.displays) == ("", "", "", [])
    kept = notebook.run("print(kept.stdout, len(kept.outputs))").stdout.splitlines()
    assert kept[:-1] == SAID
    assert kept[-1].strip() == "0"
    shown = "%%capture kept\n%%distributed --ranks 0\nfrom IPython.display import HTML\ndisplay(HTML('<i>'))"
    assert notebook.run(shown).displays == []
    assert notebook.run("kept.outputs[0].data['text/html']").value == "'<i>'"


def test_timeit_runs_it_again_and_again(notebook: Kernel) -> None:
    notebook.run("%distributed count = 0")
    done = notebook.run("%%timeit -n 2 -r 3\n%%distributed\ncount += 1")
    assert "3 runs, 2 loops each" in done.stdout
    assert notebook.run("%distributed count").stdout == "[0-1] 6\n"


def test_a_cell_after_those_is_awaited_as_ever(notebook: Kernel) -> None:
    notebook.run("%%time\n%%distributed\nrank")
    notebook.run(
        "import asyncio\nturns = 0\nasync def count():\n    global turns\n    while turns < 1000:\n        turns += 1\n        await asyncio.sleep(0.01)\ncounting = asyncio.ensure_future(count())"
    )
    notebook.run("%%distributed\nimport time; time.sleep(0.5)")
    assert int(notebook.run("counting.cancel(); turns").value) > 5


def test_the_doctor_begins_with_the_cards_of_the_devices(notebook: Kernel) -> None:
    done = notebook.run("%nbgpu doctor", timeout_s=120)
    assert done.status == "ok", done.error
    head, _, findings = done.stdout.partition("\nok    system")
    assert "CPU" in head
    assert "memory" in head
    assert "GiB" in head
    assert "python" in findings
    assert not done.displays
